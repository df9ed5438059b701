"""Triton kernels of `adapted_swiglu`: SwiGLU of experts' rows with the thin products around it.

A program of the forward has all columns of some rows, so it has their products with the next adapter at the end. One of
the backward has all rows of an expert and some columns, so it has those columns' gradients of the adapters' matrices at
the end. What it adds to sums over columns is a part, and a second kernel adds the parts.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_d9d.ops.kernels.thin_products import num_parts, padded, rows_of_expert
from lightning_d9d.ops.rows import ceil_div

_ROWS = 32
_COLUMNS = 128
_BLOCK = 1024
_MOST_FOR_4_WARPS = 16
"""Columns of thin tiles; more take the registers of more warps."""


def forward(
    gate_up: Tensor,
    h: Tensor | None,
    b: Tensor | None,
    a: Tensor | None,
    weights: Tensor,
    offsets: Tensor,
    scale: float,
    result: Tensor,
    projected: Tensor,
) -> None:
    """Fill the last two; `projected` where there is `a`. All but `offsets` have memory without gaps and elements."""
    (num_rows, inner), num_experts = result.shape, len(offsets)
    rank, rank_out = 0 if b is None else b.shape[2], 0 if a is None else a.shape[1]
    parts = num_parts(num_rows, num_experts, _ROWS)
    with torch.cuda.device_of(result):
        _forward[(parts * num_experts,)](
            gate_up,
            h,
            b,
            a,
            weights,
            offsets,
            scale,
            result,
            projected,
            num_experts,
            parts,
            inner,
            rank,
            rank_out,
            ROWS=_ROWS,
            COLUMNS=_COLUMNS,
            RANK=padded(rank),
            RANK_OUT=padded(rank_out),
            num_warps=_num_warps(rank, rank_out),
        )


def backward(
    dy: Tensor,
    d_projected: Tensor | None,
    gate_up: Tensor,
    h: Tensor | None,
    b: Tensor | None,
    a: Tensor | None,
    weights: Tensor,
    offsets: Tensor,
    scale: float,
    results: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
) -> None:
    """Fill the gradients of `gate_up`, `h`, `b`, `a` and `weights`, where there are such; as in `forward`."""
    d_gate_up, dh, db, da, d_weights = results
    (num_rows, inner), num_experts = dy.shape, len(offsets)
    rank, rank_out = 0 if b is None else b.shape[2], 0 if a is None else a.shape[1]
    blocks = ceil_div(inner, _COLUMNS)
    of_h = dy.new_empty(blocks if rank else 0, num_rows, 2 * rank, dtype=torch.float32)
    of_weights = dy.new_empty(blocks, num_rows, dtype=torch.float32)
    with torch.cuda.device_of(dy):
        _backward[(blocks * num_experts,)](
            dy,
            d_projected,
            gate_up,
            h,
            b,
            a,
            weights,
            offsets,
            scale,
            d_gate_up,
            of_h,
            db,
            da,
            of_weights,
            num_rows,
            num_experts,
            inner,
            rank,
            rank_out,
            ROWS=_ROWS,
            COLUMNS=_COLUMNS,
            RANK=padded(rank),
            RANK_OUT=padded(rank_out),
            num_warps=_num_warps(rank, rank_out),
        )
        for partial, result in ((of_h, dh), (of_weights, d_weights)):
            if result.numel():
                _add_up[(ceil_div(result.numel(), _BLOCK),)](
                    partial, result, result.numel(), blocks, BLOCK=_BLOCK, num_warps=4
                )


def _num_warps(rank: int, rank_out: int) -> int:
    return 4 if max(rank, rank_out) <= _MOST_FOR_4_WARPS else 8


@triton.jit
def _thin_rows(pointer, row, end, first, rank, width, RANK: tl.constexpr):
    """A tile of `[rows, rank]`, zero in what is padded."""
    n = tl.arange(0, RANK)
    at = row.to(tl.int64)[:, None] * width + first + n[None, :]
    return tl.load(pointer + at, mask=(row < end)[:, None] & (n < rank)[None, :], other=0.0)


@triton.jit
def _of_b(b, expert, k, first, inner, rank, RANK: tl.constexpr):
    """Columns k of gate or up as `[RANK, COLUMNS]`, from `[experts, 2 * inner, rank]`."""
    n = tl.arange(0, RANK)
    at = (expert.to(tl.int64) * 2 * inner + first + k.to(tl.int64))[None, :] * rank + n[:, None]
    return tl.load(b + at, mask=(n < rank)[:, None] & (k < inner)[None, :], other=0.0)


@triton.jit
def _of_a(a, expert, k, inner, rank, RANK: tl.constexpr):
    """Columns k as `[RANK, COLUMNS]`, from `[experts, rank, inner]`."""
    n = tl.arange(0, RANK)
    at = (expert.to(tl.int64) * rank + n)[:, None] * inner + k[None, :]
    return tl.load(a + at, mask=(n < rank)[:, None] & (k < inner)[None, :], other=0.0)


@triton.jit
def _forward(
    gate_up,
    h,
    b,
    a,
    weights,
    offsets,
    scale,
    result,
    projected,
    num_experts,
    parts,
    inner,
    rank,
    rank_out,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANK: tl.constexpr,
    RANK_OUT: tl.constexpr,
):
    expert, part = tl.program_id(0) % num_experts, tl.program_id(0) // num_experts
    first, end = rows_of_expert(offsets, expert)
    dtype = gate_up.dtype.element_ty
    for start in range(first + part * ROWS, end, parts * ROWS):
        row = start + tl.arange(0, ROWS)
        at = row.to(tl.int64)[:, None]
        weight = tl.load(weights + row, mask=row < end, other=0.0).to(tl.float32)[:, None]
        if h is not None:
            of_gate = _thin_rows(h, row, end, 0, rank, 2 * rank, RANK)
            of_up = _thin_rows(h, row, end, rank, rank, 2 * rank, RANK)
        total = tl.zeros([ROWS, RANK_OUT], tl.float32)
        for column in range(0, inner, COLUMNS):
            k = column + tl.arange(0, COLUMNS)
            mask = (row < end)[:, None] & (k < inner)[None, :]
            gate = tl.load(gate_up + at * 2 * inner + k[None, :], mask=mask, other=0.0).to(tl.float32)
            up = tl.load(gate_up + at * 2 * inner + inner + k[None, :], mask=mask, other=0.0).to(tl.float32)
            if h is not None:
                gate = tl.dot(of_gate, _of_b(b, expert, k, 0, inner, rank, RANK), gate, input_precision="ieee")
                up = tl.dot(of_up, _of_b(b, expert, k, inner, inner, rank, RANK), up, input_precision="ieee")
            activated = (gate * tl.sigmoid(gate) * up * weight).to(dtype)
            tl.store(result + at * inner + k[None, :], activated, mask=mask)
            if a is not None:
                thin = _of_a(a, expert, k, inner, rank_out, RANK_OUT)
                total = tl.dot(activated, tl.trans(thin), total, input_precision="ieee")
        if a is not None:
            n = tl.arange(0, RANK_OUT)[None, :]
            tl.store(projected + at * rank_out + n, total * scale, mask=(row < end)[:, None] & (n < rank_out))


@triton.jit
def _backward(
    dy,
    d_projected,
    gate_up,
    h,
    b,
    a,
    weights,
    offsets,
    scale,
    d_gate_up,
    of_h,
    db,
    da,
    of_weights,
    num_rows,
    num_experts,
    inner,
    rank,
    rank_out,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANK: tl.constexpr,
    RANK_OUT: tl.constexpr,
):
    expert, block = tl.program_id(0) % num_experts, (tl.program_id(0) // num_experts).to(tl.int64)
    first, end = rows_of_expert(offsets, expert)
    k = (block * COLUMNS).to(tl.int32) + tl.arange(0, COLUMNS)
    n, n_out = tl.arange(0, RANK)[None, :], tl.arange(0, RANK_OUT)[None, :]
    dtype = gate_up.dtype.element_ty
    if h is not None:
        b_gate = _of_b(b, expert, k, 0, inner, rank, RANK)
        b_up = _of_b(b, expert, k, inner, inner, rank, RANK)
        db_gate = tl.zeros([COLUMNS, RANK], tl.float32)
        db_up = tl.zeros([COLUMNS, RANK], tl.float32)
    if a is not None:
        thin = _of_a(a, expert, k, inner, rank_out, RANK_OUT)
        of_a = tl.zeros([COLUMNS, RANK_OUT], tl.float32)
    for start in range(first, end, ROWS):
        row = start + tl.arange(0, ROWS)
        at = row.to(tl.int64)[:, None]
        exists = (row < end)[:, None]
        mask = exists & (k < inner)[None, :]
        gradient = tl.load(dy + at * inner + k[None, :], mask=mask, other=0.0).to(tl.float32)
        gate = tl.load(gate_up + at * 2 * inner + k[None, :], mask=mask, other=0.0).to(tl.float32)
        up = tl.load(gate_up + at * 2 * inner + inner + k[None, :], mask=mask, other=0.0).to(tl.float32)
        weight = tl.load(weights + row, mask=row < end, other=0.0).to(tl.float32)
        if h is not None:
            of_gate = _thin_rows(h, row, end, 0, rank, 2 * rank, RANK)
            of_up = _thin_rows(h, row, end, rank, rank, 2 * rank, RANK)
            gate = tl.dot(of_gate, b_gate, gate, input_precision="ieee")
            up = tl.dot(of_up, b_up, up, input_precision="ieee")
        if a is not None:
            of_projected = _thin_rows(d_projected, row, end, 0, rank_out, rank_out, RANK_OUT)
            gradient += scale * tl.dot(of_projected, thin, input_precision="ieee")
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        activated = silu * up
        tl.store(of_weights + block * num_rows + row, tl.sum(gradient * activated, 1), mask=row < end)
        if a is not None:
            inner_rows = (activated * weight[:, None]).to(dtype)
            of_a = tl.dot(tl.trans(inner_rows), of_projected, of_a, input_precision="ieee")
        gradient *= weight[:, None]
        d_gate = (gradient * up * (sigmoid + silu * (1 - sigmoid))).to(dtype)
        d_up = (gradient * silu).to(dtype)
        tl.store(d_gate_up + at * 2 * inner + k[None, :], d_gate, mask=mask)
        tl.store(d_gate_up + at * 2 * inner + inner + k[None, :], d_up, mask=mask)
        if h is not None:
            db_gate = tl.dot(tl.trans(d_gate), of_gate, db_gate, input_precision="ieee")
            db_up = tl.dot(tl.trans(d_up), of_up, db_up, input_precision="ieee")
            dh_gate = tl.dot(d_gate, tl.trans(b_gate), input_precision="ieee")
            dh_up = tl.dot(d_up, tl.trans(b_up), input_precision="ieee")
            target = of_h + (block * num_rows + at) * 2 * rank + n
            tl.store(target, dh_gate, mask=exists & (n < rank))
            tl.store(target + rank, dh_up, mask=exists & (n < rank))
    if h is not None:
        target = db + (expert.to(tl.int64) * 2 * inner + k)[:, None] * rank + n
        tl.store(target, db_gate, mask=(k < inner)[:, None] & (n < rank))
        tl.store(target + inner * rank, db_up, mask=(k < inner)[:, None] & (n < rank))
    if a is not None:
        target = da + (expert.to(tl.int64) * rank_out + n_out) * inner + k[:, None]
        tl.store(target, of_a * scale, mask=(k < inner)[:, None] & (n_out < rank_out))


@triton.jit
def _add_up(partial, result, num_elements, num_blocks, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < num_elements
    total = tl.zeros([BLOCK], tl.float32)
    for block in range(num_blocks):
        total += tl.load(partial + block * num_elements + at, mask=mask, other=0.0)
    tl.store(result + at, total, mask=mask)
