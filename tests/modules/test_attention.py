"""Attention, rotary positions and norm against their definitions; the whole model is compared in tests/models."""

import math

import pytest
import torch

from lightning_d9d import ConfigError
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
@pytest.mark.parametrize("zero_centered", [False, True], ids=["", "zero-centered"])
def test_norm(dtype, zero_centered):
    norm = RMSNorm(32, eps=1e-2, zero_centered=zero_centered).to(dtype)
    x = torch.randn(3, 5, 32, dtype=dtype)
    wide = x.double()
    normed = wide / (wide.square().mean(-1, keepdim=True) + 1e-2).sqrt()
    assert_close_named("new norm", norm(x), normed.to(dtype), kind=Kind.OUTPUT)
    with torch.no_grad():
        norm.weight.normal_()
    expected = normed * (norm.weight.double() + zero_centered)
    assert_close_named("norm", norm(x), expected.to(dtype), kind=Kind.OUTPUT)
    residual = torch.zeros_like(x)
    assert_close_named("norm of a sum", norm(x, residual)[0], expected.to(dtype), kind=Kind.OUTPUT)


def drawn(attention: GroupedQueryAttention) -> GroupedQueryAttention:
    """The same in float64, with random numbers for all parameters."""
    with torch.no_grad():
        for parameter in attention.double().parameters():
            parameter.normal_()
    return attention


def turned(x, tables, interleaved):
    """`x` times the matrix that turns each pair by its angle."""
    pairs = x.shape[-1] // 2
    first, second = (
        (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(0, pairs), slice(pairs, 2 * pairs))
    )
    cos, sin = tables
    result = torch.empty_like(x)
    result[..., first] = x[..., first] * cos - x[..., second] * sin
    result[..., second] = x[..., second] * cos + x[..., first] * sin
    return result


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 3}, {"sinks": True}, {"interleaved": True}, {"window": 2, "sinks": True, "interleaved": True}],
    ids=str,
)
def test_attention_by_definition(heads, kv_heads, options):
    head_dim, seq = 8, 7
    torch.manual_seed(0)
    attention = drawn(
        GroupedQueryAttention(16, heads, kv_heads, head_dim, norm_eps=1e-6, bias=True, initializer_range=0.5, **options)
    )
    x = torch.randn(2, seq, 16, dtype=torch.float64)
    tables = rope_tables(torch.arange(seq).unsqueeze(0), head_dim, 100.0, torch.float64)

    q = attention.q_proj(x).view(2, seq, heads, head_dim)
    k = attention.k_proj(x).view(2, seq, kv_heads, head_dim)
    q, k = rms_norm(q, attention.q_norm.weight, 1e-6), rms_norm(k, attention.k_norm.weight, 1e-6)
    q, k = (turned(t, tables, options.get("interleaved", False)) for t in (q, k))
    v = attention.v_proj(x).view(2, seq, kv_heads, head_dim)
    mixed = torch.zeros(2, seq, heads, head_dim, dtype=torch.float64)
    for head in range(heads):
        shared = head // (heads // kv_heads)
        for place in range(seq):
            past = slice(max(0, place + 1 - options.get("window", seq)), place + 1)
            scores = torch.einsum("bd,bsd->bs", q[:, place, head], k[:, past, shared]) / math.sqrt(head_dim)
            weights = scores.exp()
            sink = attention.sinks[head].exp() if options.get("sinks") else 0.0
            weights = weights / (weights.sum(-1, keepdim=True) + sink)
            mixed[:, place, head] = torch.einsum("bs,bsd->bd", weights, v[:, past, shared])
    expected = attention.o_proj(mixed.flatten(-2))
    actual = attention(x, tables)
    assert_close_named("attention", actual, expected)
    parameters, gradient = dict(attention.named_parameters()), torch.randn_like(expected)
    assert ("sinks" in parameters) == bool(options.get("sinks"))
    theirs = torch.autograd.grad(expected, parameters.values(), gradient)
    for name, one, other in zip(
        parameters, torch.autograd.grad(actual, parameters.values(), gradient), theirs, strict=True
    ):
        assert_close_named(f"gradient of {name}", one, other)


def test_sinks_start_at_zero_also_from_the_meta_device():
    with torch.device("meta"):
        attention = GroupedQueryAttention(16, 4, 2, 8, norm_eps=1e-6, initializer_range=0.5, sinks=True)
    attention.to_empty(device="cpu")
    assert isinstance(attention.sinks, torch.nn.Parameter)
    attention.sinks.data.fill_(7.0)
    attention.reset_parameters()
    assert attention.sinks.tolist() == [0.0] * 4


def test_an_empty_window_is_refused():
    with pytest.raises(ConfigError, match="window=0 must be 1 or more"):
        GroupedQueryAttention(16, 4, 2, 8, norm_eps=1e-6, initializer_range=0.5, window=0)


def test_what_mixes_values_is_called_with_window_and_sinks_only_if_there_are_any():
    calls = []

    def attend(q, k, v, documents, **options):
        calls.append(options)
        return q

    x, tables = torch.randn(2, 7, 16), rope_tables(torch.arange(7).unsqueeze(0), 8, 100.0, torch.float32)
    for options in ({}, {"window": 3, "sinks": True}):
        attention = GroupedQueryAttention(16, 4, 2, 8, norm_eps=1e-6, initializer_range=0.5, **options)
        attention.attend = attend
        attention(x, tables)
    assert calls == [{}, {"window": 3, "sinks": attention.sinks}]


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
    """FSDP2 may also exchange them: it gives sharded modules another class, and gathers the weight when one is
    called."""
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


def test_norms_may_be_left_out():
    torch.manual_seed(0)
    attention = GroupedQueryAttention(16, 4, 4, 8, norm_eps=1e-6, initializer_range=0.5).double()
    attention.q_norm = attention.k_norm = torch.nn.Identity()
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    tables = rope_tables(torch.arange(7).unsqueeze(0), 8, 100.0, torch.float64)
    q, k, v = (proj(x).unflatten(-1, (4, 8)) for proj in (attention.q_proj, attention.k_proj, attention.v_proj))
    q, k, v = (t.transpose(1, 2) for t in (rope(q, *tables), rope(k, *tables), v))
    mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert_close_named("attention", attention(x, tables), attention.o_proj(mixed.transpose(1, 2).flatten(-2)))


@pytest.mark.parametrize("exchanged", [("q_norm",), ("q_norm", "k_norm")], ids=str)
def test_norms_may_be_zero_centered(exchanged):
    torch.manual_seed(0)
    attention = GroupedQueryAttention(16, 4, 2, 8, norm_eps=1e-6, initializer_range=0.5).double()
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    tables = rope_tables(torch.arange(7).unsqueeze(0), 8, 100.0, torch.float64)
    for norm in (attention.q_norm, attention.k_norm):
        torch.nn.init.normal_(norm.weight)
    expected = attention(x, tables)
    for name in exchanged:
        norm = RMSNorm(8, 1e-6, zero_centered=True).double()
        norm.weight.data.copy_(getattr(attention, name).weight - 1)
        setattr(attention, name, norm)
    assert_close_named("attention", attention(x, tables), expected)
