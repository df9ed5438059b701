"""Attention, rotary positions and norm against their definitions; the whole model is compared in tests/models."""

import math

import pytest
import torch

from lightning_d9d.modules import GroupedQueryAttention, RMSNorm, rope_tables
from lightning_d9d.ops import rms_norm, rope
from tests.harness.compare import assert_close_named
from tests.harness.tolerances import Kind


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_rope_turns_pairs(dtype):
    positions = torch.tensor([[0, 1, 7, 300]])
    x = torch.randn(1, 4, 2, 8, dtype=dtype)
    turned = rope(x, *rope_tables(positions, 8, 10_000.0, dtype))
    for place, position in enumerate(positions[0].tolist()):
        for pair in range(4):
            angle = position * 10_000.0 ** (-2 * pair / 8)
            number = torch.complex(x[0, place, :, pair], x[0, place, :, pair + 4])
            expected = number * complex(math.cos(angle), math.sin(angle))
            actual = torch.complex(turned[0, place, :, pair], turned[0, place, :, pair + 4])
            tolerance_kind = Kind.OUTPUT
            assert_close_named(
                f"{position}, {pair}", torch.view_as_real(actual), torch.view_as_real(expected), kind=tolerance_kind
            )


def test_rope_tables_of_a_bfloat16_model_are_float32():
    cos, _ = rope_tables(torch.tensor([[1001, 1002]]), 8, 10_000.0, torch.bfloat16)
    assert cos.dtype == torch.float32
    assert_close_named("cos", cos[0, :, 0, 0], torch.tensor([1001.0, 1002.0]).cos())
    assert rope(torch.randn(1, 2, 3, 8).bfloat16(), cos, cos).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_norm(dtype):
    norm = RMSNorm(32, eps=1e-2).to(dtype)
    with torch.no_grad():
        norm.weight.normal_()
    x = torch.randn(3, 5, 32, dtype=dtype)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-2).sqrt() * norm.weight.double()
    assert_close_named("norm", norm(x), expected.to(dtype), kind=Kind.OUTPUT)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
def test_attention_by_definition(heads, kv_heads):
    head_dim, seq = 8, 7
    torch.manual_seed(0)
    attention = GroupedQueryAttention(
        16, heads, kv_heads, head_dim, norm_eps=1e-6, bias=True, initializer_range=0.5
    ).double()
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.normal_()
    x = torch.randn(2, seq, 16, dtype=torch.float64)
    tables = rope_tables(torch.arange(seq).unsqueeze(0), head_dim, 100.0, torch.float64)

    q = attention.q_proj(x).view(2, seq, heads, head_dim)
    k = attention.k_proj(x).view(2, seq, kv_heads, head_dim)
    q, k = rms_norm(q, attention.q_norm.weight, 1e-6), rms_norm(k, attention.k_norm.weight, 1e-6)
    q, k = rope(q, *tables), rope(k, *tables)
    v = attention.v_proj(x).view(2, seq, kv_heads, head_dim)
    mixed = torch.zeros(2, seq, heads, head_dim, dtype=torch.float64)
    for head in range(heads):
        shared = head // (heads // kv_heads)
        for place in range(seq):
            past = slice(0, place + 1)
            scores = torch.einsum("bd,bsd->bs", q[:, place, head], k[:, past, shared]) / math.sqrt(head_dim)
            mixed[:, place, head] = torch.einsum("bs,bsd->bd", scores.softmax(-1), v[:, past, shared])
    assert_close_named("attention", attention(x, tables), attention.o_proj(mixed.flatten(-2)))


def test_hooks_of_norms_are_called():
    attention = GroupedQueryAttention(16, 4, 2, 8, norm_eps=1e-6, initializer_range=0.5).double()
    x, tables = torch.randn(2, 7, 16).double(), rope_tables(torch.arange(7).unsqueeze(0), 8, 100.0, torch.float64)
    expected, shapes = attention(x, tables), []
    handle = attention.q_norm.register_forward_hook(lambda _, __, out: shapes.append(tuple(out.shape)))
    assert_close_named("attention", attention(x, tables), expected)
    handle.remove()
    attention(x, tables)
    assert shapes == [(2, 7, 4, 8)]


def test_norms_may_be_exchanged():
    """Also by FSDP2, which gives what it shards another class, and gathers the weight when that is called."""
    torch.manual_seed(0)
    attention = GroupedQueryAttention(16, 4, 2, 8, norm_eps=1e-6, initializer_range=0.5).double()
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    tables = rope_tables(torch.arange(7).unsqueeze(0), 8, 100.0, torch.float64)
    expected = attention(x, tables)
    calls = []

    class Norm(RMSNorm):
        def forward(self, x):  # type: ignore[override]
            calls.append(tuple(x.shape))
            return super().forward(x)

    attention.k_norm.__class__ = Norm
    assert_close_named("attention", attention(x, tables), expected)
    assert calls == [(2, 7, 2, 8)]
    attention.k_norm.__class__, attention.k_norm.eps = RMSNorm, 1.0
    with_two_epsilons = attention(x, tables)
    attention.k_norm.forward = lambda x: rms_norm(x, attention.k_norm.weight, 1e-6)
    assert_close_named("attention", attention(x, tables), expected)
    del attention.k_norm.forward
    attention.k_norm.register_forward_hook(lambda _, __, out: None)
    assert_close_named("two epsilons", with_two_epsilons, attention(x, tables))
    assert not with_two_epsilons.allclose(expected)
