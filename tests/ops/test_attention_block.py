"""Blocks of attention: put together they are attention to all keys, with its gradients, on every kernel."""

from unittest.mock import patch

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_d9d.ops import attention_block as module
from lightning_d9d.ops.attention_block import (
    attention_block,
    attention_block_backward,
    block_kernel,
    merge,
    wide,
)
from lightning_d9d.ops.attention_masks import Masks
from lightning_d9d.ops.backend import using_kernels
from tests.harness.compare import assert_close_named, assert_tensors_close
from tests.harness.tolerances import Kind
from tests.ops.grid import DEVICES

HEADS = {"all heads their own": (4, 4), "two share one": (4, 2), "all share one": (6, 1)}
by_heads = pytest.mark.parametrize(("heads", "kv_heads"), HEADS.values(), ids=HEADS)
FLOAT64 = torch.float64


def make(heads, kv_heads, queries, keys, head_dim=8, dtype=FLOAT64, device="cpu", batch=2):
    """q, k, v and a gradient of the result: seen as in a model, where a token's heads lie side by side in memory."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(heads, queries), (kv_heads, keys), (kv_heads, keys), (heads, queries)]
    shapes = [(batch, seq, num, head_dim) for num, seq in sizes]
    return [torch.randn(shape, generator=generator).to(device, dtype).transpose(1, 2) for shape in shapes]


def by_definition(q, k, v, allowed, grad_out):
    """Result, logarithms and gradients in the widest dtype here, by autograd; `allowed` is `[batch, queries, keys]`."""
    q, k, v, grad_out = (t.detach().to(wide(t.dtype)).requires_grad_() for t in (q, k, v, grad_out))
    keys, values = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    scores = (q @ keys.mT / q.shape[-1] ** 0.5).masked_fill(~allowed.unsqueeze(1), float("-inf"))
    probabilities = scores.softmax(-1).masked_fill(~allowed.any(-1)[:, None, :, None], 0.0)
    out = probabilities @ values
    grads = torch.autograd.grad(out, (q, k, v), grad_out)
    return out.detach(), scores.logsumexp(-1).detach(), dict(zip(("dq", "dk", "dv"), grads, strict=True))


def lower(batch, length, device="cpu"):
    return torch.ones(batch, length, length, dtype=torch.bool, device=device).tril()


@by_heads
@pytest.mark.parametrize("max_scores", [1 << 24, 100, 1], ids=["at once", "by several rows", "by row"])
@pytest.mark.parametrize("causal", [True, False])
def test_one_block_is_attention(causal, max_scores, heads, kv_heads):
    q, k, v, grad_out = make(heads, kv_heads, 7, 7 if causal else 4)
    allowed = lower(2, 7) if causal else torch.ones(2, 7, 4, dtype=torch.bool)
    expected, log_sums, grads = by_definition(q, k, v, allowed, grad_out)
    with patch.object(module, "_MAX_SCORES", max_scores):
        out, lse = attention_block(q, k, v, Masks(causal))
        actual = attention_block_backward(grad_out, q, k, v, out, lse, Masks(causal))
    assert out.stride() == q.stride()
    assert_close_named("out", out, expected, kind=Kind.OUTPUT)
    assert_close_named("lse", lse, log_sums, kind=Kind.OUTPUT)
    assert_tensors_close(dict(zip(grads, actual, strict=True)), grads)


def in_blocks(q, k, v, documents, grad_out, borders):
    """Causal attention with one block for each pair of pieces between `borders`, and its gradients."""
    pieces = [slice(*pair) for pair in zip([0, *borders], [*borders, q.shape[2]], strict=True)]

    def masks(rows, keys):
        ids = (None, None) if documents is None else (documents[:, rows], documents[:, keys])
        return Masks(rows == keys, None, *ids)

    out = torch.zeros_like(q, dtype=wide(q.dtype))
    lse = torch.full_like(out[..., 0], float("-inf"))
    pairs = [(rows, keys) for row, rows in enumerate(pieces) for keys in pieces[: row + 1]]
    for rows, keys in pairs:
        block = attention_block(q[:, :, rows], k[:, :, keys], v[:, :, keys], masks(rows, keys))
        merge(out[:, :, rows], lse[:, :, rows], *block)
    grads = [torch.zeros_like(t, dtype=wide(t.dtype)) for t in (q, k, v)]
    whole = [grad_out, q, out.to(q.dtype), lse]
    for rows, keys in pairs:
        d, queries, result, log_sums = (t[:, :, rows] for t in whole)
        block = (d, queries, k[:, :, keys], v[:, :, keys], result, log_sums)
        parts = attention_block_backward(*block, masks(rows, keys))
        for grad, part, place in zip(grads, parts, (rows, keys, keys), strict=True):
            grad[:, :, place] += part
    return out, lse, dict(zip(("dq", "dk", "dv"), grads, strict=True))


@by_heads
@pytest.mark.parametrize("has_documents", [False, True], ids=["one document", "documents"])
def test_blocks_make_up_the_whole(has_documents, heads, kv_heads):
    """With documents some queries find no key in an earlier block, and some find none in any block."""
    q, k, v, grad_out = make(heads, kv_heads, 12, 12)
    documents = torch.tensor([[0] * 2 + [1] * 8 + [0] * 2, [3] * 5 + [4] * 7]) if has_documents else None
    allowed = lower(2, 12)
    if documents is not None:
        allowed &= documents.unsqueeze(-1) == documents.unsqueeze(-2)
    expected, log_sums, expected_grads = by_definition(q, k, v, allowed, grad_out)
    out, lse, grads = in_blocks(q, k, v, documents, grad_out, borders=[3, 4, 9])
    assert_close_named("out", out, expected, kind=Kind.OUTPUT)
    assert_close_named("lse", lse, log_sums, kind=Kind.OUTPUT)
    assert_tensors_close(grads, expected_grads)


@DEVICES
@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_queries_without_keys_get_nothing(kernels, device):
    q, k, v, grad_out = make(4, 2, 3, 5, dtype=torch.float32, device=device)
    documents = torch.tensor([[7, 1, 1]] * 2), torch.ones(2, 5, dtype=torch.int32)
    masks = Masks(False, None, *(each.to(device) for each in documents))
    with using_kernels(kernels):
        assert_nothing_without_keys(q, k, v, grad_out, masks)


def assert_nothing_without_keys(q, k, v, grad_out, masks):
    out, lse = attention_block(q, k, v, masks)
    assert (out[:, :, 0] == 0).all()
    assert (lse[:, :, 0] == float("-inf")).all()
    assert out[:, :, 1:].isfinite().all()
    dq, dk, dv = attention_block_backward(grad_out, q, k, v, out, lse, masks)
    assert (dq[:, :, 0] == 0).all()
    assert dk.isfinite().all()
    assert dv.isfinite().all()


def test_merging_what_no_query_attends_to():
    nothing = torch.zeros(1, 1, 2, 3), torch.full((1, 1, 2), float("-inf"))
    some = torch.randn(1, 1, 2, 3), torch.randn(1, 1, 2)
    for first, second, expected in ((nothing, some, some), (some, nothing, some), (nothing, nothing, nothing)):
        out, lse = (t.clone() for t in first)
        merge(out, lse, *second)
        assert torch.equal(out, expected[0])
        assert torch.equal(lse, expected[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, FLOAT64], ids=str)
def test_dtypes(dtype):
    """Logarithms are wide, everything else as given, and computed from what was given without further rounding."""
    q, k, v, grad_out = make(4, 2, 6, 6, dtype=dtype)
    out, lse = attention_block(q, k, v, Masks(True))
    assert out.dtype == dtype
    assert lse.dtype == wide(dtype)
    _, log_sums, _ = by_definition(q, k, v, lower(2, 6), grad_out)
    assert_close_named("lse", lse, log_sums, kind=Kind.OUTPUT)
    grads = attention_block_backward(grad_out, q, k, v, out, lse, Masks(True))
    assert [grad.dtype for grad in grads] == [dtype] * 3


def test_merging_adds_up_in_float32():
    """A thousand blocks of equal weight: bfloat16 would lose the later ones."""
    out, lse = torch.zeros(1, 1, 1, 2), torch.full((1, 1, 1), float("-inf"))
    for number in range(1000):
        merge(out, lse, torch.tensor([[[[1.0, number % 2]]]], dtype=torch.bfloat16), torch.zeros(1, 1, 1))
    assert_close_named("out", out, torch.tensor([[[[1.0, 0.5]]]]), kind=Kind.OUTPUT)
    assert_close_named("lse", lse, torch.tensor([[[1000.0]]]).log(), kind=Kind.OUTPUT)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], ids=str)
@by_heads
@pytest.mark.parametrize("head_dim", [64, 128])
def test_kernels(head_dim, heads, kv_heads, backend, dtype):
    q, k, v, grad_out = make(heads, kv_heads, 384, 384, head_dim, dtype=dtype, device="cuda")
    expected, log_sums, expected_grads = by_definition(q, k, v, lower(2, 384, "cuda"), grad_out)
    with sdpa_kernel(backend):
        assert block_kernel(q, k, v, Masks(True)) == backend.name.split("_")[0].lower()
        out, lse, grads = in_blocks(q, k, v, None, grad_out, borders=[128, 256])
    assert_close_named("lse", lse, log_sums, kind=Kind.OUTPUT)
    assert_close_named("out", out.bfloat16(), expected, kind=Kind.OUTPUT)
    assert_tensors_close({name: grad.bfloat16() for name, grad in grads.items()}, expected_grads)


@DEVICES
def test_own_kernels(device):
    """Blocks of several blocks, with documents that end and begin within them and lie in many."""
    dtypes = [torch.float32, torch.bfloat16] if device == "cuda" else [torch.float32]
    for dtype in dtypes:
        q, k, v, grad_out = make(2, 1, 70, 70, 16, dtype=dtype, device=device)
        documents = torch.tensor([[0] * 20 + [1] * 40 + [0] * 10, [3] * 50 + [4] * 20], device=device)
        allowed = lower(2, 70, device) & (documents.unsqueeze(-1) == documents.unsqueeze(-2))
        expected, log_sums, expected_grads = by_definition(q, k, v, allowed, grad_out)
        with using_kernels("triton"):
            assert block_kernel(q, k, v, Masks(True, None, documents, documents)) == "triton"
            out, lse, grads = in_blocks(q, k, v, documents, grad_out, borders=[40])
        assert_close_named("lse", lse, log_sums, kind=Kind.OUTPUT)
        assert_close_named("out", out.to(dtype), expected, kind=Kind.OUTPUT)
        assert_tensors_close({name: grad.to(dtype) for name, grad in grads.items()}, expected_grads)


@DEVICES
@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_windows(kernels, device):
    q, k, v, grad_out = make(2, 1, 50, 50, 16, dtype=torch.float32, device=device)
    expected, log_sums, expected_grads = by_definition(q, k, v, lower(2, 50, device).triu(-9), grad_out)
    with using_kernels(kernels):
        out, lse = attention_block(q, k, v, Masks(True, 10))
        grads = attention_block_backward(grad_out, q, k, v, out, lse, Masks(True, 10))
    assert_close_named("lse", lse, log_sums, kind=Kind.OUTPUT)
    assert_close_named("out", out, expected, kind=Kind.OUTPUT)
    assert_tensors_close(dict(zip(expected_grads, grads, strict=True)), expected_grads)


@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "dtype"), [(12, torch.bfloat16), (16, torch.float32)])
def test_what_no_kernel_of_torch_takes_runs_on_our_own(head_dim, dtype):
    q, k, v, grad_out = make(2, 1, 16, 16, head_dim, dtype, "cuda")
    assert block_kernel(q, k, v, Masks(True)) == "triton"
    expected, _, expected_grads = by_definition(q, k, v, lower(2, 16, "cuda"), grad_out)
    out, lse = attention_block(q, k, v, Masks(True))
    grads = attention_block_backward(grad_out, q, k, v, out, lse, Masks(True))
    assert_close_named("out", out, expected, kind=Kind.OUTPUT)
    assert_tensors_close(dict(zip(expected_grads, grads, strict=True)), expected_grads)
