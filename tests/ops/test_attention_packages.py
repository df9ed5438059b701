"""Attention on packages, which stand-ins with the same interfaces replace."""

import sys
from types import ModuleType
from unittest.mock import patch

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_d9d.errors import ConfigError
from lightning_d9d.ops import attention
from lightning_d9d.ops import flash_attention as packages
from lightning_d9d.ops.attention import attention_reference
from lightning_d9d.ops.attention_block import attention_block_backward_reference, attention_block_reference
from lightning_d9d.ops.attention_masks import Masks
from lightning_d9d.ops.backend import using_kernels
from lightning_d9d.ops.packages import optional_module
from tests.harness.compare import assert_bitwise_equal, assert_close_named
from tests.harness.tolerances import Kind
from tests.ops.attention_inputs import assert_equals_reference, ids_of, make


def package_of(calls, *, returns_logarithms):
    """One that is called like them, and computes with the reference."""
    module = ModuleType("flash attention")

    def attend(q, k, v, *, causal, window_size=(-1, -1)):
        assert causal
        assert window_size[1] == (0 if window_size[0] >= 0 else -1)
        calls.append(window_size[0])
        window = window_size[0] + 1 if window_size[0] >= 0 else None
        out = attention_reference(*(t.transpose(1, 2) for t in (q, k, v)), window=window).transpose(1, 2)
        return (out, None) if returns_logarithms else out

    def attend_apart(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options):
        assert cu_seqlens_q.dtype == torch.int32
        assert cu_seqlens_q is cu_seqlens_k
        lengths = cu_seqlens_q.diff().tolist()
        assert max(lengths) == max_seqlen_q == max_seqlen_k
        parts = zip(*(t.split(lengths) for t in (q, k, v)), strict=True)
        outs = [attend(*(t.unsqueeze(0) for t in part), **options) for part in parts]
        whole = torch.cat([out[0] if returns_logarithms else out for out in outs], 1)[0]
        return (whole, None) if returns_logarithms else whole

    module.flash_attn_func, module.flash_attn_varlen_func = attend, attend_apart
    return module


@pytest.mark.parametrize("returns_logarithms", [False, True])
@pytest.mark.parametrize("name", ["none", "runs", "of two tokens"])
def test_packages(name, returns_logarithms):
    (q, k, v), _ = make(4, 2)
    for window in (None, 5):
        calls = []
        package = package_of(calls, returns_logarithms=returns_logarithms)
        with patch.object(packages, "flash_attention_package", lambda package=package: package):
            actual = packages.flash_attention(q, k, v, ids_of(name), window)
        expected = attention_reference(q, k, v, ids_of(name), window=window)
        assert_close_named("attended", actual, expected, kind=Kind.OUTPUT)
        assert set(calls) == {-1 if window is None else 4}


def test_documents_in_pieces_are_not_for_packages():
    (q, k, v), _ = make(4, 2)
    package = package_of([], returns_logarithms=False)
    with (
        patch.object(packages, "flash_attention_package", lambda: package),
        pytest.raises(ConfigError, match="an id again after another id"),
    ):
        packages.flash_attention(q, k, v, ids_of("come again"), None)


def test_the_newest_package_is_taken(monkeypatch):
    versions = ["flash_attn.flash_attn_interface", "flash_attn_interface", "flash_attn.cute.interface"]
    modules = {name: None for name in versions} | {name: ModuleType(name) for name in ("flash_attn", "flash_attn.cute")}
    monkeypatch.setattr(packages, "optional_module", optional_module.__wrapped__)
    with patch.dict(sys.modules, modules):
        assert packages.flash_attention_package() is None
        for name in versions:
            sys.modules[name] = version_4()[0] if "cute" in name else ModuleType(name)
            assert packages.flash_attention_package() is sys.modules[name]


def test_drafts_of_version_4_are_left_alone(monkeypatch):
    """flash-attn 2.8 brings one."""
    draft, version_2 = ModuleType("flash_attn.cute.interface"), ModuleType("flash_attn.flash_attn_interface")
    draft.flash_attn_func = lambda q, k, v, softmax_scale=None, causal=False: None  # type: ignore[attr-defined]
    draft._flash_attn_bwd = lambda: None  # type: ignore[attr-defined]
    found = {draft.__name__: draft, version_2.__name__: version_2}
    monkeypatch.setattr(packages, "optional_module", found.get)
    assert packages.flash_attention_package() is version_2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import cutlass_that_is_not_there", "installed, but not what it needs: No module named 'cutlass_that_is_not_"),
        ("from sys import nothing_of_the_kind", "cannot be imported: ImportError: cannot import name 'nothing_of_the_"),
        ("import sys; sys.nothing_of_the_kind", "cannot be imported: AttributeError: module 'sys' has no attribute"),
    ],
)
def test_a_package_that_cannot_be_imported_is_named(text, message, tmp_path, monkeypatch, caplog):
    (tmp_path / "flash_attn_interface.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert optional_module.__wrapped__("flash_attn_interface") is None
    (record,) = caplog.records
    assert record.getMessage().startswith("flash_attn_interface ")
    assert message in record.getMessage()


def version_4():
    """One with blocks, on the reference; `calls` are the arguments by name of all."""
    module, calls = ModuleType("flash_attn.cute.interface"), []

    def attend(q, k, v, *, return_lse, **options):
        assert return_lse
        calls.append(options)
        left, right = options["window_size"]
        assert (left is None) == (right is None)
        window = None if left is None else left + 1
        out, lse = attention_block_reference(*(t.transpose(1, 2) for t in (q, k, v)), Masks(options["causal"], window))
        return out.transpose(1, 2), lse

    def differentiate(q, k, v, out, grad_out, lse, *, causal, window_size_left, window_size_right, **options):
        calls.append(options)
        assert (window_size_left is None) == (window_size_right is None)
        window = None if window_size_left is None else window_size_left + 1
        tensors = (t.transpose(1, 2) for t in (grad_out, q, k, v, out))
        grads = attention_block_backward_reference(*tensors, lse, Masks(causal, window))
        return tuple(grad.transpose(1, 2) for grad in grads)

    module.flash_attn_func, module._flash_attn_bwd = attend, differentiate
    return module, calls


@pytest.fixture
def has_version_4(monkeypatch):
    module, calls = version_4()
    monkeypatch.setattr(packages, "flash_attention_package", lambda: module)
    monkeypatch.setattr(packages, "_LEAST_KEYS", 33)
    for name in ("lightning_d9d.ops.attention", "lightning_d9d.ops.flash_attention"):
        monkeypatch.setattr(sys.modules[name], "runs_blocks", lambda q, k, v: q.dtype != torch.float64)
    return calls


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_version_4_is_an_operator(has_version_4, has_sinks, window, monkeypatch):
    """It is chosen if there are no documents, compiled and not, and is one of the kernels of blocks."""
    monkeypatch.setattr(
        sys.modules["lightning_d9d.ops.attention"], "runs_triton", lambda *_, by_default=True: by_default
    )
    results = []
    options = {"sinks": torch.randn(4, requires_grad=True) if has_sinks else None, "window": window}
    for op in (attention, torch.compile(attention, backend="aot_eager", fullgraph=True)):
        inputs, gradient = make(4, 2, torch.float32)
        results.append(op(*inputs, **options))
        assert_equals_reference(results[-1], inputs, gradient, **options)
    assert_bitwise_equal("compiled", *results)
    assert len(has_version_4) == 4
    assert [call.get("deterministic") for call in has_version_4] == [None, False] * 2


def test_version_4_sums_in_order_if_asked(has_version_4, monkeypatch):
    monkeypatch.setattr(
        sys.modules["lightning_d9d.ops.attention"], "runs_triton", lambda *_, by_default=True: by_default
    )
    inputs, gradient = make(4, 2, torch.float32)
    torch.use_deterministic_algorithms(True)
    try:
        attention(*inputs).backward(gradient)
    finally:
        torch.use_deterministic_algorithms(False)
    assert has_version_4[-1]["deterministic"] is True


def test_version_4_is_left_alone(has_version_4):
    """It is not used with torch's kernels alone, with documents, with other named kernels, or for few tokens."""
    inputs, gradient = make(4, 2, torch.float32, seq=32)
    with using_kernels("triton"):
        assert_equals_reference(attention(*inputs), inputs, gradient)
    inputs, gradient = make(4, 2, torch.float32)
    with using_kernels("torch"):
        assert_equals_reference(attention(*inputs), inputs, gradient)
    assert_equals_reference(attention(*inputs, ids_of("runs")), inputs, gradient, ids_of("runs"))
    assert_equals_reference(attention(*inputs, kernel="math"), inputs, gradient)
    assert not has_version_4


def test_who_has_blocks(monkeypatch):
    """Version 4 on Hopper, for heads that were compared, unless torch's kernels are narrowed down."""
    q, k, v = (torch.randn(1, heads, 8, 128, dtype=torch.bfloat16) for heads in (4, 2, 2))
    module, _ = version_4()
    monkeypatch.setattr(packages, "flash_attention_package", lambda: module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert not packages.runs_blocks(q, k, v)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert packages.runs_blocks(q, k, v)
    assert not packages.runs_blocks(q.float(), k.float(), v.float())
    assert not packages.runs_blocks(*(t[..., :96] for t in (q, k, v)))
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        with sdpa_kernel(backend):
            assert not packages.runs_blocks(q, k, v)
    with monkeypatch.context() as others:
        others.setattr(torch.cuda, "get_device_capability", lambda _: (10, 0))
        others.setattr(packages, "flash_attention_package", lambda: pytest.fail("imported in vain"))
        assert not packages.runs_blocks(q, k, v)
    del module._flash_attn_bwd
    assert not packages.runs_blocks(q, k, v)
    monkeypatch.setattr(packages, "flash_attention_package", lambda: None)
    assert not packages.runs_blocks(q, k, v)


@pytest.mark.parametrize("causal", [True, False])
def test_version_4_runs_blocks(has_version_4, causal, monkeypatch):
    """It runs blocks of many keys, and other kernels run the others. Forward and backward of a block run on one
    kernel."""
    blocks = sys.modules["lightning_d9d.ops.attention_block"]
    monkeypatch.setattr(blocks, "runs_triton", lambda *_, by_default=True: by_default)
    (q, k, v), grad_out = make(4, 2, torch.float32, seq=40)
    q, k, v = (t.detach() for t in (q, k, v))
    for keys, num_calls in ((40, 2), (20, 2)):
        queries = slice(0, keys if causal else None)
        tensors = q[:, :, queries], k[:, :, :keys], v[:, :, :keys]
        out, lse = blocks.attention_block(*tensors, Masks(causal))
        grads = blocks.attention_block_backward(grad_out[:, :, queries], *tensors, out, lse, Masks(causal))
        assert len(has_version_4) == num_calls
        expected = attention_block_reference(*tensors, Masks(causal))
        of_expected = attention_block_backward_reference(grad_out[:, :, queries], *tensors, *expected, Masks(causal))
        names = ("out", "lse", "dq", "dk", "dv")
        for name, actual, value in zip(names, (out, lse, *grads), (*expected, *of_expected), strict=True):
            assert_close_named(f"{name} of {keys} keys", actual, value, kind=Kind.GRADIENT)


def test_a_length_that_the_compiler_does_not_know_is_short(monkeypatch):
    monkeypatch.setattr(packages, "_LEAST_KEYS", 5)
    monkeypatch.setattr(packages, "runs_blocks", lambda q, k, v: True)

    def run(lengths):
        keys = lengths.new_empty(1, 1, int(lengths.max()), 1)
        return lengths + (1 if packages.is_faster(keys, keys, keys) else 0)

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(run, backend="eager", fullgraph=True)
        assert compiled(torch.tensor([2, 7])).tolist() == [2, 7]
    assert run(torch.tensor([2, 7])).tolist() == [3, 8]
    assert run(torch.tensor([2, 4])).tolist() == [2, 4]


@pytest.mark.parametrize("sizes", [(0, 5, 5), (2, 0, 5), (2, 5, 0)])
def test_version_4_is_not_called_without_tokens(has_version_4, sizes):
    batch, queries, keys = sizes
    q = torch.randn(batch, 4, queries, 16)
    k, v = (torch.randn(batch, 2, keys, 16) for _ in range(2))
    out, lse = packages.block(q, k, v, causal=False, window=None)
    grads = packages.block_backward(out, q, k, v, out, lse, causal=False, window=None)
    assert_bitwise_equal("out", out, torch.zeros_like(q))
    assert_bitwise_equal("lse", lse, torch.full(q.shape[:-1], float("-inf")))
    for grad, t in zip(grads, (q, k, v), strict=True):
        assert_bitwise_equal("gradient", grad, torch.zeros_like(t))
    assert not has_version_4
