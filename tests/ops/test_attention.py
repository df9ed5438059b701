"""Attention against its reference, on its kernels (Triton's interpreter without a GPU), torch's and packages'."""

import importlib
import math
from contextlib import nullcontext
from itertools import product

import pytest
import torch

from lightning_d9d.errors import ConfigError
from lightning_d9d.ops import attention
from lightning_d9d.ops.attention import attention_reference
from lightning_d9d.ops.backend import using_kernels
from tests.harness.compare import assert_bitwise_equal, assert_close_named
from tests.harness.tolerances import Kind
from tests.ops.attention_inputs import DOCUMENTS, HEADS, WINDOWS, assert_equals_reference, ids_of, make
from tests.ops.grid import DEVICES, DTYPES, LAYOUTS, check_op

attention_module = importlib.import_module("lightning_d9d.ops.attention")


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


# On kernels of our own


def arguments(batch, heads, kv_heads, seq, head_dim, *, lengths=None, has_sinks=False):
    """Return arguments by name, as `check_op` takes them, with documents of about `lengths` tokens."""
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
    """Shapes have more than a few tokens, whose gradients are differences of almost equal numbers."""
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
    """Ids have 64 bits, or 32 bits with the batch side by side in memory."""
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
    """A mask of 64k tokens would take 8 GiB. The host does not wait for the device."""
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
            with pytest.raises(
                ConfigError, match=f"kernel='{kernel}' does not support .* Supported: 'auto', .*'math', 'triton'"
            ):
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


@pytest.mark.parametrize(
    ("dtype", "kv_heads", "is_ours"),
    [(torch.float32, 2, True), (torch.float32, 4, False), (torch.bfloat16, 2, False), (torch.float64, 2, False)],
    ids=str,
)
def test_what_torch_would_do_with_all_scores_runs_on_kernels(dtype, kv_heads, is_ours, monkeypatch):
    """CUDA has no kernel of torch's for float32 and shared heads."""
    operator, calls = attention_module._attend_op, []

    def on_cuda(*tensors, by_default=True):
        return by_default and all(tensor.dtype != torch.float64 for tensor in tensors)

    monkeypatch.setattr(attention_module, "runs_triton", on_cuda)
    monkeypatch.setattr(attention_module, "_attend_op", lambda *args: calls.append(args[-1]) or operator(*args))
    inputs, gradient = make(4, kv_heads, dtype)
    assert_equals_reference(attention(*inputs), inputs, gradient)
    assert calls == ["triton"] * is_ours


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
        ConfigError, match=f"kernel='{kernel}' does not support this attention: {reason}.* Supported: 'auto', 'math'"
    ):
        attention(*inputs, kernel=kernel)


def test_arguments_that_do_not_fit():
    (q, k, v), _ = make(4, 2)
    for arguments_, options, message in [
        ((q, k, v[:, :, 1:]), {}, r"k \[2, 2, 33, 16\] and v \[2, 2, 32, 16\] must have the shape of q"),
        ((q[:, :3], k, v), {}, "a number of heads that divides that of q"),
        ((q, k, v, ids_of("one")[:, 1:]), {}, r"documents \[2, 32\] of torch.int64 must be integers of .* \[2, 33\]"),
        ((q, k, v), {"window": 0}, "window=0 must be 1 or more"),
        ((q, k, v), {"sinks": torch.zeros(2)}, r"sinks \[2\] must have one number for each head of q, here 4"),
        ((q, k, v), {"kernel": "cuda"}, "kernel='cuda' must be one of 'auto', 'cudnn'"),
    ]:
        with pytest.raises(ConfigError, match=message):
            attention(*arguments_, **options)
