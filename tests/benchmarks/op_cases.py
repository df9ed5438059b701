"""What `ops` measures: of each op its inputs, its peers, and the bytes or operations that it cannot do without.

Sizes are those of Qwen3-30B-A3B. Bytes are of each input and result once; operations those of products alone.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_d9d.modules.rope import rope_tables
from lightning_d9d.ops import (
    Permutation,
    attention,
    fill_normal_,
    grouped_gemm,
    linear_cross_entropy,
    moe_permute,
    moe_route,
    moe_unpermute,
    norm_rope_qk,
    rms_norm,
    rope_qk,
    round_stochastic_,
    swiglu,
)
from lightning_d9d.ops.moe_permute import moe_unpermute_reference, sort_by_expert, sort_reference
from lightning_d9d.ops.moe_route import moe_route_reference
from lightning_d9d.ops.norm_rope import norm_rope_reference
from lightning_d9d.ops.rms_norm import rms_norm_reference
from lightning_d9d.ops.rope import rope_reference
from lightning_d9d.ops.stochastic import round_stochastic_reference
from lightning_d9d.ops.swiglu import swiglu_reference
from tests.benchmarks.adamw_cases import adamw, adamw_in_eight_bits
from tests.benchmarks.op_case import Inputs, OpCase, Sizes, Work, compiled, forward_backward, liger_function, peers

EPS = 1e-6
MOST_OF_PRODUCTS = 1.1
"""Time of `linear_cross_entropy`, of that of its three products."""
MOST_LOGITS = 2**30
"""Bytes that it may take beside inputs and gradients."""
LEAST_NORMAL = 20e9
"""Initial weights a second."""
MOST_OF_NORMAL = 10.0
"""Time of `fill_normal_`, of that of torch's `normal_`, whose values differ between devices and meshes."""
LEAST_ATTENTION = {"forward": 610e12, "backward": 427e12}
"""Operations a second of cuDNN's on an H200 at 4 x 32 x 4096 x 128 with 4 heads of keys."""


def op_cases(sizes: Sizes) -> list[OpCase]:
    """Return the cases of all ops."""
    tokens, dim, heads, kv_heads = sizes.tokens, sizes.hidden, sizes.heads, sizes.kv_heads
    cases = [
        _rms_norm("rms_norm", sizes, tokens, dim),
        _rms_norm_residual(sizes),
        _rms_norm("rms_norm, per head", sizes, tokens, heads, sizes.head_dim),
        _rope(sizes),
        _norm_rope(sizes),
        _swiglu(sizes, weighted=False),
        _swiglu(sizes, weighted=True),
        _moe_route(sizes),
        _moe_sort(sizes),
        _moe_permute(sizes),
        _moe_unpermute(sizes, weighted=False),
        _moe_unpermute(sizes, weighted=True),
        _grouped_gemm("grouped_gemm, gate and up", sizes, dim, 2 * sizes.width),
        _grouped_gemm("grouped_gemm, down", sizes, sizes.width, dim),
        _attention("attention", sizes, heads, kv_heads),
        _attention_of_documents(sizes),
        _linear_cross_entropy(sizes),
        _round_stochastic(sizes),
        _fill_normal(sizes),
        adamw("stochastic_adamw", sizes, sizes.layers, sizes.dtype, sizes.dtype),
        adamw("stochastic_adamw, float32 states", sizes, sizes.layers // 2, sizes.dtype, torch.float32),
        adamw("stochastic_adamw, float32", sizes, sizes.layers // 2, torch.float32, torch.float32),
        adamw_in_eight_bits(sizes, max(1, sizes.layers // 2)),
    ]
    return [dataclasses.replace(case, dtype=sizes.dtype) for case in cases]


def _rms_norm(name: str, sizes: Sizes, *shape: int) -> OpCase:
    def op(x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, EPS)

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm_reference(x, weight, EPS)

    def liger(x: Tensor, weight: Tensor) -> Tensor:
        return liger_function("rms_norm", "LigerRMSNormFunction")(x, weight, EPS, 0.0, "llama", False)

    x = sizes.bytes(*shape)
    return OpCase(
        name=name,
        inputs=lambda make: {"x": make.trained(*shape), "weight": make.trained(shape[-1])},
        ours=op,
        peers=peers(op, plain, Liger=liger),
        work=forward_backward(Work(2 * x), Work(3 * x)),
    )


def _rms_norm_residual(sizes: Sizes) -> OpCase:
    def op(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
        return rms_norm(x, weight, EPS, residual=residual)

    def plain(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
        return rms_norm_reference(x, weight, EPS, residual=residual)

    def liger(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
        return liger_function("fused_add_rms_norm", "LigerFusedAddRMSNormFunction")(
            x, residual, weight, EPS, 0.0, "llama", False
        )

    shape = sizes.tokens, sizes.hidden
    x = sizes.bytes(*shape)
    return OpCase(
        name="rms_norm, residual",
        inputs=lambda make: {
            "x": make.trained(*shape),
            "residual": make.trained(*shape),
            "weight": make.trained(sizes.hidden),
        },
        ours=op,
        peers=peers(op, plain, Liger=liger),
        work=forward_backward(Work(4 * x), Work(4 * x)),
        note="x and residual have one gradient",
    )


def _heads(sizes: Sizes, make: Inputs) -> dict[str, Any]:
    """Queries, keys and tables."""
    positions = torch.arange(sizes.seq, device=make.device).unsqueeze(0)
    cos, sin = rope_tables(positions, sizes.head_dim, 1e6, sizes.dtype)
    q, k = (make.trained(sizes.batch, sizes.seq, heads, sizes.head_dim) for heads in (sizes.heads, sizes.kv_heads))
    return {"q": q, "k": k, "cos": cos, "sin": sin}


def _rope(sizes: Sizes) -> OpCase:
    def op(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        return rope_qk(q, k, cos, sin)

    def plain(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        return rope_reference(q, cos, sin), rope_reference(k, cos, sin)

    def liger(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        tables = cos.squeeze(2), sin.squeeze(2), None, 1, sizes.head_dim
        q, k = liger_function("rope", "LigerRopeFunction")(q.transpose(1, 2), k.transpose(1, 2), *tables)
        return q.transpose(1, 2), k.transpose(1, 2)

    work = Work(2 * sizes.bytes(sizes.tokens, sizes.heads + sizes.kv_heads, sizes.head_dim))
    return OpCase(
        name="rope",
        inputs=lambda make: _heads(sizes, make),
        ours=op,
        peers=peers(op, plain, Liger=liger),
        work=forward_backward(work, work),
        note="queries and keys; Liger's overwrites them",
    )


def _norm_rope(sizes: Sizes) -> OpCase:
    def op(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, of_q: Tensor, of_k: Tensor) -> tuple[Tensor, ...]:
        return norm_rope_qk(q, k, of_q, of_k, EPS, cos, sin)

    def plain(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, of_q: Tensor, of_k: Tensor) -> tuple[Tensor, ...]:
        return norm_rope_reference(q, of_q, EPS, cos, sin), norm_rope_reference(k, of_k, EPS, cos, sin)

    def liger(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, of_q: Tensor, of_k: Tensor) -> tuple[Tensor, ...]:
        q, k = (
            liger_function("rms_norm", "LigerRMSNormFunction")(x, weight, EPS, 0.0, "llama", False)
            for x, weight in ((q, of_q), (k, of_k))
        )
        tables = cos.squeeze(2), sin.squeeze(2), None, 1, sizes.head_dim
        q, k = liger_function("rope", "LigerRopeFunction")(q.transpose(1, 2), k.transpose(1, 2), *tables)
        return q.transpose(1, 2), k.transpose(1, 2)

    x = sizes.bytes(sizes.tokens, sizes.heads + sizes.kv_heads, sizes.head_dim)
    return OpCase(
        name="norm_rope",
        inputs=lambda make: {
            **_heads(sizes, make),
            "of_q": make.trained(sizes.head_dim),
            "of_k": make.trained(sizes.head_dim),
        },
        ours=op,
        peers=peers(op, plain, Liger=liger),
        work=forward_backward(Work(2 * x), Work(3 * x)),
        note="queries and keys; Liger's norm, then its rope",
    )


def _swiglu(sizes: Sizes, weighted: bool) -> OpCase:
    def op(gate_up: Tensor, weights: Tensor | None) -> Tensor:
        return swiglu(gate_up, weights)

    def plain(gate_up: Tensor, weights: Tensor | None) -> Tensor:
        return swiglu_reference(gate_up, weights)

    def liger(gate_up: Tensor, weights: None) -> Tensor:
        return liger_function("swiglu", "LigerFusedGateUpSiLUMulFunction")(gate_up)

    rows = sizes.tokens * sizes.top_k
    x = sizes.bytes(rows, sizes.width)
    return OpCase(
        name="swiglu, router's weights" if weighted else "swiglu",
        inputs=lambda make: {
            "gate_up": make.trained(rows, 2 * sizes.width),
            "weights": make.trained(rows, dtype=torch.float32) if weighted else None,
        },
        ours=op,
        peers=peers(op, plain) if weighted else peers(op, plain, Liger=liger),
        work=forward_backward(Work(3 * x + 4 * rows * weighted), Work(5 * x + 8 * rows * weighted)),
    )


def _moe_route(sizes: Sizes) -> OpCase:
    def op(logits: Tensor) -> Tensor:
        return moe_route(logits, sizes.top_k).weights

    def plain(logits: Tensor) -> Tensor:
        return moe_route_reference(logits, sizes.top_k).weights

    def inputs(make: Inputs) -> dict[str, Any]:
        """A token's are all different, since of equal ones each may take another."""
        return {"logits": (make.ranks(sizes).to(sizes.dtype) / 16).requires_grad_()}

    logits, chosen = sizes.bytes(sizes.tokens, sizes.experts), sizes.tokens * sizes.top_k
    return OpCase(
        name="moe_route",
        inputs=inputs,
        ours=op,
        peers=peers(op, plain),
        work=forward_backward(Work(logits + 12 * chosen), Work(logits + 16 * chosen)),
    )


def _moe_sort(sizes: Sizes) -> OpCase:
    def op(indices: Tensor) -> Permutation:
        return sort_by_expert(indices, sizes.experts)

    def plain(indices: Tensor) -> tuple[Tensor, ...]:
        return sort_reference(indices, sizes.experts, 1)

    return OpCase(
        name="moe_permute, its sort",
        inputs=lambda make: {"indices": make.experts(sizes)},
        ours=op,
        peers=peers(op, plain),
        work={"forward": Work(12 * sizes.tokens * sizes.top_k)},
    )


def _moe_permute(sizes: Sizes) -> OpCase:
    def op(x: Tensor, weights: Tensor, indices: Tensor) -> tuple[Tensor, Tensor | None]:
        return moe_permute(x, indices, weights, sizes.experts)[:2]

    def plain(x: Tensor, weights: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        order = indices.flatten().sort(stable=True).indices
        return x.index_select(0, order // sizes.top_k), weights.flatten().index_select(0, order)

    copies = sizes.tokens * sizes.top_k
    x = sizes.bytes(sizes.tokens, sizes.hidden)
    work = Work((1 + sizes.top_k) * x + 8 * copies)
    return OpCase(
        name="moe_permute",
        inputs=lambda make: {
            "x": make.trained(sizes.tokens, sizes.hidden),
            "weights": make.trained(sizes.tokens, sizes.top_k, dtype=torch.float32),
            "indices": make.experts(sizes),
        },
        ours=op,
        peers=peers(op, plain),
        work=forward_backward(work, work),
        note="with the sort",
    )


def _moe_unpermute(sizes: Sizes, weighted: bool) -> OpCase:
    def op(rows: Tensor, permutation: Permutation, weights: Tensor | None) -> Tensor:
        return moe_unpermute(rows, permutation, weights)

    def plain(rows: Tensor, permutation: Permutation, weights: Tensor | None) -> Tensor:
        return moe_unpermute_reference(rows, permutation, weights)

    copies = sizes.tokens * sizes.top_k
    x = sizes.bytes(sizes.tokens, sizes.hidden)
    all_rows = sizes.top_k * x
    return OpCase(
        name="moe_unpermute, weights" if weighted else "moe_unpermute",
        inputs=lambda make: {
            "rows": make.trained(copies, sizes.hidden),
            "permutation": sort_by_expert(make.experts(sizes), sizes.experts),
            "weights": make.trained(sizes.tokens, sizes.top_k, dtype=torch.float32) if weighted else None,
        },
        ours=op,
        peers=peers(op, plain),
        work=forward_backward(
            Work(all_rows + x + 4 * copies), Work(x + all_rows + weighted * (all_rows + 4 * copies) + 4 * copies)
        ),
    )


def _grouped_gemm(name: str, sizes: Sizes, in_features: int, out_features: int) -> OpCase:
    def op(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        return grouped_gemm(x, weight, offsets)

    def plain(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        return F.grouped_mm(x, weight.transpose(1, 2), offs=offsets)

    copies = sizes.tokens * sizes.top_k
    flops = 2 * copies * in_features * out_features
    return OpCase(
        name=name,
        inputs=lambda make: {
            "x": make.trained(copies, in_features),
            "weight": make.trained(sizes.experts, out_features, in_features),
            "offsets": sort_by_expert(make.experts(sizes), sizes.experts).offsets,
        },
        ours=op,
        peers={"grouped_mm": plain},
        work=forward_backward(Work(flops=flops), Work(flops=2 * flops)),
        note="ours is torch's grouped_mm, or quack-kernels where they are; rows of experts as random routing has them",
    )


def _queries(sizes: Sizes, make: Inputs) -> dict[str, Any]:
    """Return queries, keys and values as projections leave them: the heads of a token side by side."""
    names = {"q": sizes.heads, "k": sizes.kv_heads, "v": sizes.kv_heads}
    return {
        name: make.fixed(sizes.batch, sizes.seq, heads, sizes.head_dim).transpose(1, 2).requires_grad_()
        for name, heads in names.items()
    }


def _attention(name: str, sizes: Sizes, heads: int, kv_heads: int) -> OpCase:
    def op(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v)

    def cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    flops = 4 * sizes.batch * heads * sizes.head_dim * sizes.seq**2 // 2
    return OpCase(
        name=name,
        inputs=lambda make: _queries(sizes, make),
        ours=op,
        kernels="auto",  # cuDNN's where nothing is masked but the future
        peers={"torch": op, "cuDNN": cudnn},
        work=forward_backward(
            Work(flops=flops, least_rate=LEAST_ATTENTION["forward"]),
            Work(flops=5 * flops // 2, least_rate=LEAST_ATTENTION["backward"]),
        ),
        note="causal; operations of pairs that count",
    )


def _attention_of_documents(sizes: Sizes) -> OpCase:
    length = sizes.seq // sizes.documents
    masks: dict[torch.device, Any] = {}

    def op(q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
        return attention(q, k, v, documents)

    def flex(q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
        from torch.nn.attention.flex_attention import create_block_mask

        def counts(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (query >= key) & (query // length == key // length)

        if q.device not in masks:
            masks[q.device] = create_block_mask(counts, None, None, sizes.seq, sizes.seq, str(q.device))
        return compiled_flex(q, k, v, block_mask=masks[q.device], enable_gqa=True)

    from torch.nn.attention.flex_attention import flex_attention

    compiled_flex = compiled(flex_attention)
    flops = 4 * sizes.batch * sizes.heads * sizes.head_dim * sizes.documents * length**2 // 2
    return OpCase(
        name="attention, documents",
        inputs=lambda make: {
            **_queries(sizes, make),
            "documents": (torch.arange(sizes.seq, device=make.device) // length).expand(sizes.batch, -1).contiguous(),
        },
        ours=op,
        kernels="auto",
        peers={"torch": op, "flex": flex},
        work=forward_backward(Work(flops=flops), Work(flops=5 * flops // 2)),
        note=f"{sizes.documents} in a row, equally long; operations of pairs that count",
    )


def _linear_cross_entropy(sizes: Sizes) -> OpCase:
    def op(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return linear_cross_entropy(x, weight, labels, reduction="sum")

    def plain(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, weight).float(), labels, reduction="sum")

    def liger(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        options = None, None, -100, 0.0, 0.0, "sum"  # bias, weights of classes, ignored label, z-loss, smoothing
        return liger_function("fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyFunction")(
            x, weight, labels, *options
        )[0]

    def products(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return F.linear(x, weight)

    return OpCase(
        name="linear_cross_entropy",
        inputs=lambda make: {
            "x": make.trained(sizes.tokens, sizes.hidden),
            "weight": make.fixed(sizes.vocab, sizes.hidden).mul_(sizes.hidden**-0.5).requires_grad_(),
            "labels": make.below(sizes.vocab, sizes.tokens),
        },
        ours=op,
        peers=peers(op, plain, Liger=liger) | {"products": products},
        work={"both": Work(flops=6 * sizes.tokens * sizes.hidden * sizes.vocab)},
        limits={"products": MOST_OF_PRODUCTS},
        most_extra=MOST_LOGITS,
        graphed=False,
        note="a sum of losses; products are those of logits and both gradients without anything between",
    )


def _round_stochastic(sizes: Sizes) -> OpCase:
    def op(target: Tensor, source: Tensor) -> Tensor:
        return round_stochastic_(target, source, seed=1)

    def plain(target: Tensor, source: Tensor) -> Tensor:
        return round_stochastic_reference(source, seed=1)

    return OpCase(
        name="round_stochastic",
        inputs=lambda make: {
            "target": make.fixed(sizes.rounded, dtype=torch.bfloat16),
            "source": make.fixed(sizes.rounded, dtype=torch.float32),
        },
        ours=op,
        peers=peers(op, plain),
        work={"forward": Work(6 * sizes.rounded)},
        graphed=False,
    )


def _fill_normal(sizes: Sizes) -> OpCase:
    shape = (sizes.experts, 2 * sizes.width, sizes.hidden)

    def op(target: Tensor) -> Tensor:
        return fill_normal_(target, 0.02, key=2**127 + 1, shape=shape, ranges=[range(size) for size in shape])

    return OpCase(
        name="fill_normal",
        inputs=lambda make: {"target": make.fixed(*shape)},
        ours=op,
        peers={"normal_": lambda target: target.normal_(std=0.02)},
        work={"forward": Work(flops=math.prod(shape), least_rate=LEAST_NORMAL)},
        limits={"normal_": MOST_OF_NORMAL},
        note="an operation is a value; normal_ draws others",
    )
