"""Attention against its reference, on its kernels (Triton's interpreter without a GPU), torch's and packages'."""

import math
import sys
from contextlib import nullcontext
from itertools import product
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
from tests.ops.grid import DEVICES, DTYPES, LAYOUTS, check_op

HEADS = [(4, 4), (4, 2), (6, 1)]
DOCUMENTS = {
    "none": None,
    "one": [[7] * 33, [0] * 33],
    "runs": [[0] * 10 + [1] + [2] * 22, [5] * 32 + [-1]],
    "of two tokens": [[place // 2 for place in range(33)], [-place // 2 for place in range(33)]],
    "all different": [[*range(33)], [*range(33, 0, -1)]],
    "come again": [[0, 1, 2] * 11, [4] * 8 + [3] * 17 + [4] * 8],
}
WINDOWS = [None, 1, 5, 33]


def make(heads, kv_heads, dtype=torch.float64, seq=33, device="cpu", head_dim=16):
    """Queries, keys, values and a gradient for the result; as projections leave them, heads behind the sequence."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(2, seq, n, head_dim, generator=generator) for n in (heads, kv_heads, kv_heads, heads)]
    q, k, v, gradient = (t.to(device, dtype).transpose(1, 2) for t in tensors)
    return [t.requires_grad_() for t in (q, k, v)], gradient


def ids_of(name, device="cpu"):
    return None if DOCUMENTS[name] is None else torch.tensor(DOCUMENTS[name], device=device)


@pytest.mark.parametrize("name", DOCUMENTS)
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_reference_by_definition(heads, kv_heads, name):
    (q, k, v), _ = make(heads, kv_heads)
    for window, sinks in product([None, 4], [None, torch.randn(heads, dtype=torch.float64)]):
        actual = attention_reference(q, k, v, ids_of(name), window=window, sinks=sinks)
        expected = torch.zeros_like(q)
        for row, ids in enumerate(DOCUMENTS[name] or [[0] * 33] * 2):
            for place, own in enumerate(ids):
                seen = range(max(0, place + 1 - (window or 33)), place + 1)
                before = [other for other in seen if ids[other] == own]
                for head in range(heads):
                    of_keys = head // (heads // kv_heads)
                    scores = k[row, of_keys, before] @ q[row, head, place] / math.sqrt(16)
                    total = scores.exp().sum() + (0 if sinks is None else sinks[head].exp())
                    expected[row, head, place] = scores.exp() / total @ v[row, of_keys, before]
        assert_close_named("attended", actual, expected)


@DEVICES
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", DOCUMENTS)
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_without_choice_equals_the_reference(heads, kv_heads, name, dtype, device):
    for window in WINDOWS:
        inputs, gradient = make(heads, kv_heads, dtype, device=device)
        actual = attention(*inputs, ids_of(name, device), window=window)
        assert actual.dtype == dtype
        assert_equals_reference(actual, inputs, gradient, ids_of(name, device), window=window)


def assert_equals_reference(actual, inputs, gradient, documents=None, *, sinks=None, **options):
    inputs = inputs if sinks is None else [*inputs, sinks]
    exact = [t.detach().double().requires_grad_() for t in inputs]
    expected = attention_reference(*exact[:3], documents, sinks=exact[3] if sinks is not None else None, **options)
    assert_close_named("attended", actual, expected.to(actual.dtype), kind=Kind.OUTPUT)
    gradients = torch.autograd.grad(actual, inputs, gradient)
    expected_gradients = torch.autograd.grad(expected, exact, gradient.double())
    for which, ours, theirs in zip("qkvs", gradients, expected_gradients, strict=False):
        if theirs.any():
            assert_close_named(f"gradient of {which}", ours.to(actual.dtype), theirs.to(actual.dtype))
        else:  # of a softmax over one key
            assert ours.norm() < 30 * torch.finfo(ours.dtype).eps * gradient.norm()


# On kernels of our own


def arguments(batch, heads, kv_heads, seq, head_dim, *, lengths=None, has_sinks=False):
    """By name, as `check_op` takes them; documents of about `lengths` tokens."""
    generator = torch.Generator().manual_seed(seq)
    shapes = {"q": (batch, heads, seq, head_dim), "k": (batch, kv_heads, seq, head_dim)}
    shapes["v"] = shapes["k"]
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    if has_sinks:
        tensors["sinks"] = torch.randn(heads, generator=generator)
    if lengths is not None:
        begins = torch.rand(batch, seq, generator=generator) < 1 / lengths
        tensors["documents"] = begins.cumsum(1)
    return tensors


def check(tensors, dtype, device, **options):
    def with_own_layout(q, k, v, sinks=None, **rest):
        return attention(q, k, v, sinks=sinks, **rest)

    def reference(q, k, v, sinks=None, **rest):
        return attention_reference(q, k, v, sinks=sinks, **rest)

    names = options.pop("gradients_of", [name for name in ("q", "k", "v", "sinks") if name in tensors])
    check_op(with_own_layout, reference, tensors, dtype, device, gradients_of=names, wide=["sinks"], **options)


@DEVICES
@pytest.mark.parametrize(
    ("shape", "lengths", "window", "has_sinks"),
    [
        ((1, 8, 4, 75, 24), 20, None, True),  # with two sinks the error of the reference is chance
        ((2, 2, 2, 33, 16), None, 7, False),
        ((1, 1, 1, 1, 8), None, None, False),
        ((1, 4, 1, 40, 16), None, None, True),
        ((2, 1, 1, 70, 16), 6, 40, False),
    ],
)
def test_small_shapes(device, shape, lengths, window, has_sinks):
    check(arguments(*shape, lengths=lengths, has_sinks=has_sinks), torch.float32, device, window=window)


@DEVICES
def test_large_blocks(device):
    for head_dim, lengths, window in [(64, 60, None), (128, None, 100)]:
        check(arguments(1, 1, 1, 140, head_dim, lengths=lengths), torch.float16, device, window=window)


@pytest.mark.gpu
@pytest.mark.parametrize("seq", [257, 1024])
@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [*product([16, 64, 80, 128, 256], DTYPES[1:]), (16, torch.float32), (80, torch.float32)],
    ids=str,
)
def test_every_shape(head_dim, dtype, seq):
    """Not those of a few tokens alone, whose gradients are differences of almost equal numbers."""
    for (heads, kv_heads), lengths, window, has_sinks in [
        ((4, 4), None, None, False),
        ((4, 2), 30, 200, True),
        ((6, 1), 300, None, False),
        ((4, 1), None, 50, False),
    ]:
        tensors = arguments(2, heads, kv_heads, seq, head_dim, lengths=lengths, has_sinks=has_sinks)
        check(tensors, dtype, "cuda", window=window)


@DEVICES
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(device, layout):
    check(arguments(2, 2, 1, 40, 16, lengths=10), torch.float32, device, layout=layout)


@DEVICES
def test_every_gradient_alone_and_together(device):
    tensors = arguments(1, 2, 1, 30, 16, lengths=10, has_sinks=True)
    for names in [["q"], ["k"], ["v"], ["sinks"]]:
        check(tensors, torch.float32, device, gradients_of=names)


@DEVICES
def test_ids_in_any_order(device):
    """Of 64 bits, and of 32 with the batch side by side in memory."""
    tensors = arguments(2, 1, 1, 70, 16)
    rows = [[2**40, 5, -(2**40)] * 23 + [5], [-1] * 20 + [7] * 30 + [-1] * 20]
    tensors["documents"] = torch.tensor(rows)
    check(tensors, torch.float32, device)
    tensors["documents"] = torch.tensor(rows[1:] * 2, dtype=torch.int32).T.contiguous().T
    check(tensors, torch.float32, device, gradients_of=[])


@DEVICES
def test_what_no_query_may_see_does_not_matter(device):
    (q, k, v), gradient = make(2, 1, torch.float32, seq=40, device=device)
    documents = torch.tensor([[0] * 3 + [1] * 37] * 2, device=device)
    results = []
    for junk in (0.0, 1e4):
        leaves = [t.detach().clone() for t in (q, k, v)]
        leaves[1][:, :, :3], leaves[2][:, :, :3] = junk, junk
        leaves = [t.requires_grad_() for t in leaves]
        with using_kernels("triton"):
            out = attention(*leaves, documents)
            gradients = torch.autograd.grad(out[:, :, 3:], leaves, gradient[:, :, 3:])
            results.append([each[:, :, 3:] for each in (out, *gradients)])
    for ours, theirs in zip(*results, strict=True):
        assert_bitwise_equal("with junk", ours, theirs)


@DEVICES
@pytest.mark.parametrize("kernels", ["auto", "triton"])
@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (2, 1)], ids=str)
def test_few_tokens(shape, kernels, device):
    batch, seq = shape
    q = torch.randn(batch, 4, seq, 16, requires_grad=True, device=device)
    k, v = (torch.randn(batch, 2, seq, 16, requires_grad=True, device=device) for _ in range(2))
    with using_kernels(kernels):
        result = attention(q, k, v, torch.zeros(shape, dtype=torch.int64, device=device))
        assert_close_named("attended", result, v.repeat_interleave(2, 1), kind=Kind.OUTPUT)
        result.sum().backward()
    assert all(t.grad is not None for t in (q, k, v))


@DEVICES
def test_the_operators_are_what_torch_takes_them_for(device):
    (q, k, v), gradient = make(2, 1, torch.float32, seq=20, device=device)
    sinks = torch.randn(2, device=device, requires_grad=True)
    documents = torch.tensor([[0] * 12 + [1] * 8] * 2, device=device)
    ops, some = torch.ops.lightning_d9d, ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.attention.default, (q, k, v, documents, sinks, 9, "triton"))
    torch.library.opcheck(ops.attention.default, (q, k, v, None, None, None, "triton"), test_utils=some)
    torch.library.opcheck(ops.attention.default, (q, k, v, None, sinks, None, "block"), test_utils=some)
    q, k, v = (t.detach() for t in (q, k, v))
    out, lse = ops.attention(q, k, v, None, None, None, "triton")
    backward = (gradient, q, k, v, out, lse, None, None, None, "triton", True, False, False)
    torch.library.opcheck(ops.attention_backward.default, backward, test_utils=some)


@DEVICES
def test_compiled_whole(device):
    def op(q, k, v, documents):
        return attention(q, k, v, documents, window=9)

    results = []
    with using_kernels("triton"):
        for each in (torch.compile(op, backend="aot_eager", fullgraph=True), op):
            leaves, gradient = make(2, 1, torch.float32, device=device)
            out = each(*leaves, ids_of("runs", device))
            results.append([out, *torch.autograd.grad(out, leaves, gradient)])
    for ours, theirs in zip(*results, strict=True):
        assert_bitwise_equal("compiled", ours, theirs)


class Stopped(torch.autograd.Function):
    """Lets no gradient through."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, *gradients):
        return None


@DEVICES
def test_without_a_gradient_there_are_none(device):
    leaves, _ = make(2, 1, torch.float32, device=device)
    with using_kernels("triton"):
        Stopped.apply(attention(*leaves)).sum().backward()
    assert [t.grad for t in leaves] == [None] * 3


@pytest.mark.gpu
def test_no_square_and_no_waiting():
    """Of 64k tokens a mask would take 8 GiB; the host does not wait for the device."""
    q, k, v = (torch.randn(1, n, 2**16, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for n in (4, 1, 1))
    documents = torch.arange(2**16, device="cuda")[None] // 1000
    for window in (None, 512):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.cuda.set_sync_debug_mode("error")
        try:
            attention(q, k, v, documents, window=window).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.cuda.max_memory_allocated() - before < 10 * q.nbytes


@pytest.mark.gpu
def test_offsets_beyond_32_bits():
    q = torch.randn(1, 2**15 + 3, 2048, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2)[:, ::2047]
    k = q[:, :1]
    assert q.stride(2) * q.shape[2] > 2**31
    documents = torch.arange(q.shape[2], device="cuda")[None] // 500
    assert_bitwise_equal(
        "attended", attention(q, k, k, documents), attention(*(t.contiguous() for t in (q, k, k)), documents)
    )


# On what it is given


NAMED = [
    "cudnn",
    "flash",
    "efficient",
    "math",
    "triton",
    pytest.param("flash-attn", marks=pytest.mark.flash_attn_4),
]


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", NAMED)
def test_named_kernels(kernel):
    for name, window, has_sinks in product(["none", "runs"], [None, 5], [False, True]):
        is_masked = name != "none" or window is not None
        kv_heads = 4 if kernel == "efficient" else 2
        inputs, gradient = make(4, kv_heads, torch.bfloat16, device="cuda", head_dim=64)
        documents = ids_of(name, "cuda")
        sinks = torch.randn(4, device="cuda").requires_grad_() if has_sinks else None
        options = {"window": window, "sinks": sinks}
        if (is_masked and kernel in ("cudnn", "flash")) or (has_sinks and kernel in ("efficient", "flash-attn")):
            with pytest.raises(ConfigError, match=f"kernel='{kernel}' cannot run .* Can: 'auto', .*'math', 'triton'"):
                attention(*inputs, documents, kernel=kernel, **options)
        else:
            actual = attention(*inputs, documents, kernel=kernel, **options)
            assert_equals_reference(actual, inputs, gradient, documents, **options)


@pytest.mark.gpu
def test_sinks_on_what_torch_would_choose():
    """Compiled and not."""
    results = []
    sinks = torch.randn(4, device="cuda").requires_grad_()
    for op in (attention, torch.compile(attention, backend="aot_eager", fullgraph=True)):
        inputs, gradient = make(4, 2, torch.bfloat16, seq=512, device="cuda", head_dim=128)
        results.append(op(*inputs, sinks=sinks))
        assert_equals_reference(results[-1], inputs, gradient, sinks=sinks)
    assert_bitwise_equal("compiled", *results)


@pytest.mark.parametrize(("kernel", "can_change"), [("math", True), ("auto", False)])
def test_results_that_are_not_cudnns_can_be_changed_in_place(kernel, can_change, monkeypatch):
    (q, k, v), gradient = make(4, 4)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    out = attention(q, k, v, kernel=kernel)
    with nullcontext() if can_change else pytest.raises(RuntimeError, match="is being modified inplace"):
        out.mul_(2).backward(gradient)


@pytest.mark.gpu
@pytest.mark.parametrize("has_sinks", [False, True], ids=["torch", "operator"])
def test_gradients_in_any_order_in_memory(has_sinks):
    """One process, equal inputs: what is kept for the first gradient must not serve another."""
    sinks = torch.randn(4, device="cuda").requires_grad_() if has_sinks else None
    for change in (torch.clone, torch.Tensor.contiguous, lambda g: g.mT.contiguous().mT, torch.clone):
        inputs, gradient = make(4, 2, torch.bfloat16, seq=512, device="cuda", head_dim=128)
        assert_equals_reference(attention(*inputs, sinks=sinks), inputs, change(gradient), sinks=sinks)


def test_sinks_without_kernels():
    inputs, gradient = make(4, 2)
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    for kernel in ("auto", "math"):
        actual = attention(*inputs, ids_of("runs"), window=9, sinks=sinks, kernel=kernel)
        assert_equals_reference(actual, inputs, gradient, ids_of("runs"), window=9, sinks=sinks)


def test_math_is_what_torch_calls_so():
    inputs, gradient = make(4, 2)
    actual = attention(*inputs, ids_of("runs"), kernel="math")
    assert_equals_reference(actual, inputs, gradient, ids_of("runs"))


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        ("cudnn", "torch has it not for torch.float64 on cpu with head_dim 16 and 4 heads on 2"),
        ("triton", "it takes float32, bfloat16 and float16 up to head_dim 256, not torch.float64"),
        ("flash-attn", "there is no package for it; pip install 'lightning-d9d.flash-attn.'"),
    ],
)
def test_a_kernel_that_cannot(kernel, reason):
    inputs, _ = make(4, 2)
    with pytest.raises(
        ConfigError, match=f"kernel='{kernel}' cannot run this attention: {reason}.* Can: 'auto', 'math'"
    ):
        attention(*inputs, kernel=kernel)


def test_arguments_that_do_not_fit():
    (q, k, v), _ = make(4, 2)
    for arguments_, options, message in [
        ((q, k, v[:, :, 1:]), {}, r"k \[2, 2, 33, 16\] and v \[2, 2, 32, 16\] must have the shape of q"),
        ((q[:, :3], k, v), {}, "a number of heads that divides that of q"),
        ((q, k, v, ids_of("one")[:, 1:]), {}, r"documents \[2, 32\] of torch.int64 must be integers of .* \[2, 33\]"),
        ((q, k, v), {"window": 0}, "window=0 must be 1 or more"),
        ((q, k, v), {"sinks": torch.zeros(2)}, r"sinks \[2\] must be one number a head of q, here 4"),
        ((q, k, v), {"kernel": "cuda"}, "kernel='cuda' must be one of 'auto', 'cudnn'"),
    ]:
        with pytest.raises(ConfigError, match=message):
            attention(*arguments_, **options)


# On packages


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
        pytest.raises(ConfigError, match="an id that comes again after another one"),
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
    """It is chosen where there are no documents, compiled and not, and takes part where blocks are put together."""
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
    """By kernels of torch alone, by documents, by other kernels that are named, and by few tokens."""
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
    """Of many keys, others on other kernels; forward and backward of a block run on one."""
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
