"""Inputs of attention, and its check against the reference, for the tests of all that computes it."""

import torch

from lightning_d9d.ops.attention import attention_reference
from tests.harness.compare import assert_close_named
from tests.harness.tolerances import Kind

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
