"""Attention within documents against its reference, and that against a loop over tokens."""

import math

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from lightning_d9d.ops import attention, document_mask
from lightning_d9d.ops.attention import attention_reference
from tests.harness.compare import assert_bitwise_equal, assert_close_named
from tests.harness.tolerances import Kind

HEADS = [(4, 4), (4, 2), (6, 1)]
DOCUMENTS = {
    "none": None,
    "one": [[7] * 33, [0] * 33],
    "runs": [[0] * 10 + [1] + [2] * 22, [5] * 32 + [-1]],
    "of two tokens": [[place // 2 for place in range(33)], [-place // 2 for place in range(33)]],
    "come again": [[0, 1, 2] * 11, [4] * 8 + [3] * 17 + [4] * 8],
}
on_every_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def make(heads, kv_heads, dtype=torch.float64, seq=33, device="cpu"):
    """Queries, keys, values and a gradient for the result; as projections leave them, heads behind the sequence."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(2, seq, n, 16, generator=generator) for n in (heads, kv_heads, kv_heads, heads)]
    q, k, v, gradient = (t.to(device, dtype).transpose(1, 2) for t in tensors)
    return [t.requires_grad_() for t in (q, k, v)], gradient


def ids_of(name, device="cpu"):
    return None if DOCUMENTS[name] is None else torch.tensor(DOCUMENTS[name], device=device)


@pytest.mark.parametrize("name", DOCUMENTS)
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_reference_by_definition(heads, kv_heads, name):
    (q, k, v), _ = make(heads, kv_heads)
    actual = attention_reference(q, k, v, ids_of(name))
    expected = torch.zeros_like(q)
    for row, ids in enumerate(DOCUMENTS[name] or [[0] * 33] * 2):
        for place, own in enumerate(ids):
            before = [other for other in range(place + 1) if ids[other] == own]
            for head in range(heads):
                of_keys = head // (heads // kv_heads)
                scores = k[row, of_keys, before] @ q[row, head, place] / math.sqrt(16)
                expected[row, head, place] = scores.softmax(0) @ v[row, of_keys, before]
    assert_close_named("attended", actual, expected)


@on_every_device
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", DOCUMENTS)
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_equals_reference(heads, kv_heads, name, dtype, device):
    inputs, gradient = make(heads, kv_heads, dtype, device=device)
    actual = attention(*inputs, ids_of(name, device))
    assert actual.dtype == dtype
    exact = [t.detach().double().requires_grad_() for t in inputs]
    expected = attention_reference(*exact, ids_of(name, device))
    assert_close_named("attended", actual, expected.to(dtype), kind=Kind.OUTPUT)
    gradients = torch.autograd.grad(actual, inputs, gradient)
    expected_gradients = torch.autograd.grad(expected, exact, gradient.double())
    for which, ours, theirs in zip("qkv", gradients, expected_gradients, strict=True):
        assert_close_named(f"gradient of {which}", ours, theirs.to(dtype))


def test_a_mask_for_many_calls_is_kept_once():
    inputs, _ = make(4, 2)
    ids = ids_of("runs")
    mask = document_mask(ids, torch.float64)
    kept = []
    with saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        results = [attention(*inputs, mask) for _ in range(3)]
    squares = {t.data_ptr() for t in kept if t.shape[-2:] == (33, 33)}
    assert squares == {mask.data_ptr()}
    for result in results:
        assert_bitwise_equal("attended", result, attention(*inputs, ids))


@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (2, 1)], ids=str)
def test_few_tokens(shape):
    batch, seq = shape
    q = torch.randn(batch, 4, seq, 16, requires_grad=True)
    k, v = (torch.randn(batch, 2, seq, 16, requires_grad=True) for _ in range(2))
    result = attention(q, k, v, torch.zeros(shape, dtype=torch.int64))
    assert_close_named("attended", result, v.repeat_interleave(2, 1), kind=Kind.OUTPUT)
    result.sum().backward()
    assert all(t.grad is not None for t in (q, k, v))
