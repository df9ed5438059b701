"""Triton kernels of `adapted_swiglu`: SwiGLU of experts' rows with the thin products around it.

A program of the forward has all columns of some rows, so it can compute their products with the next adapter at the
end. A program of the backward has all rows of an expert and some columns. So it has the gradients of these columns of
the adapters' matrices at the end. Its contribution to sums over columns is partial, and a second kernel adds the parts.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_d9d.ops.kernels.compiling import jit
from lightning_d9d.ops.kernels.thin_products import num_parts, rows_of_expert
from lightning_d9d.ops.rows import ceil_div, padded_for_products, shared_memory


class _Tile(NamedTuple):
    """How a program works through rows.

    Args:
        rows: The number of rows of a tile.
        columns: The number of columns of a wide tile; thin tiles have a rank's.
        wide: The number of wide tiles that a stage reads.
        stages: The number of stages that are loaded or in use at a time, if they fit.
        warps: The number of warps of a program.
    """

    rows: int
    columns: int
    wide: int
    stages: int
    warps: int

    def num_stages(self, like: Tensor, rank: int, rank_out: int) -> int:
        """Return an estimate of the number of stages that fit into shared memory; in float32 more may fit.

        Products rearrange their tiles. One more stage stands for what they need, which is enough on Hopper.
        """
        thin = 2 * padded_for_products(rank) + padded_for_products(rank_out)
        num_bytes = self.rows * (self.wide * self.columns + thin) * like.dtype.itemsize
        return max(1, min(self.stages, shared_memory(like.device) // num_bytes - 1))

    def num_warps(self, rank: int, rank_out: int) -> int:
        """Return the number of warps of a program: wide thin tiles need the registers of more warps."""
        return max(self.warps, 8) if max(rank, rank_out) > _MOST_FOR_FEW_WARPS else self.warps


_FORWARD = _Tile(64, 64, 2, 3, 4)
_BACKWARD = _Tile(64, 64, 3, 3, 4)
_BLOCK = 1024
_MOST_FOR_FEW_WARPS = 32
"""Maximum number of columns of thin tiles."""


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
    """Fill the last two tensors; `projected` only with `a`. All but `offsets` are contiguous and not empty."""
    (num_rows, inner), num_experts = result.shape, len(offsets)
    rank, rank_out = 0 if b is None else b.shape[2], 0 if a is None else a.shape[1]
    parts = num_parts(num_rows, num_experts, _FORWARD.rows)
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
            ROWS=_FORWARD.rows,
            COLUMNS=_FORWARD.columns,
            RANK=padded_for_products(rank),
            RANK_OUT=padded_for_products(rank_out),
            STAGES=_FORWARD.num_stages(result, rank, rank_out),
            num_warps=_FORWARD.num_warps(rank, rank_out),
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
    """Fill the gradients of the given ones of `gate_up`, `h`, `b`, `a` and `weights`, as in `forward`."""
    d_gate_up, dh, db, da, d_weights = results
    (num_rows, inner), num_experts = dy.shape, len(offsets)
    rank, rank_out = 0 if b is None else b.shape[2], 0 if a is None else a.shape[1]
    blocks = ceil_div(inner, _BACKWARD.columns)
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
            ROWS=_BACKWARD.rows,
            COLUMNS=_BACKWARD.columns,
            RANK=padded_for_products(rank),
            RANK_OUT=padded_for_products(rank_out),
            STAGES=_BACKWARD.num_stages(dy, rank, rank_out),
            num_warps=_BACKWARD.num_warps(rank, rank_out),
        )
        for partial, result in ((of_h, dh), (of_weights, d_weights)):
            if result.numel():
                _add_up[(ceil_div(result.numel(), _BLOCK),)](
                    partial, result, result.numel(), blocks, BLOCK=_BLOCK, num_warps=4
                )


@triton.jit
def _thin_tile(pointer, row, num_rows, rank: tl.constexpr, width: tl.constexpr, RANK: tl.constexpr):
    """Load a tile of rows whose first is at the pointer, `[rows, RANK]`, with zeros as padding."""
    n = tl.arange(0, RANK)
    return tl.load(
        pointer + row[:, None] * width + n[None, :], mask=(row < num_rows)[:, None] & (n < rank)[None, :], other=0.0
    )


@triton.jit
def _matrix_tile(
    pointer,
    k,
    num_columns,
    column_stride: tl.constexpr,
    rank: tl.constexpr,
    rank_stride: tl.constexpr,
    RANK: tl.constexpr,
):
    """Load a tile of columns of a thin matrix, `[RANK, columns]`, with zeros as padding."""
    n = tl.arange(0, RANK)
    at = n[:, None] * rank_stride + k[None, :] * column_stride
    return tl.load(pointer + at, mask=(n < rank)[:, None] & (k < num_columns)[None, :], other=0.0)


@triton.jit
def _thin_tiles(pointer, row, num_rows, rank: tl.constexpr, RANK: tl.constexpr):
    """Load the tiles of the gate and of up, which are side by side."""
    gate = _thin_tile(pointer, row, num_rows, rank, 2 * rank, RANK)
    return gate, _thin_tile(pointer + rank, row, num_rows, rank, 2 * rank, RANK)


@triton.jit
def _matrix_tiles(pointer, k, num_columns, inner: tl.constexpr, rank: tl.constexpr, RANK: tl.constexpr):
    """Load the tiles of the gate and of up, which are `inner` rows apart."""
    gate = _matrix_tile(pointer, k, num_columns, rank, rank, 1, RANK)
    return gate, _matrix_tile(pointer + inner * rank, k, num_columns, rank, rank, 1, RANK)


@triton.jit
def _store_thin_tile(pointer, row, num_rows, rank: tl.constexpr, width: tl.constexpr, RANK: tl.constexpr, values):
    """Write the tile that `_thin_tile` reads."""
    n = tl.arange(0, RANK)[None, :]
    tl.store(pointer + row[:, None] * width + n, values, mask=(row < num_rows)[:, None] & (n < rank))


@triton.jit
def _store_matrix_tile(
    pointer,
    k,
    num_columns,
    column_stride: tl.constexpr,
    rank: tl.constexpr,
    rank_stride: tl.constexpr,
    RANK: tl.constexpr,
    values,
):
    """Write the tile that `_matrix_tile` reads, from `[columns, RANK]`."""
    n = tl.arange(0, RANK)[None, :]
    at = k[:, None] * column_stride + n * rank_stride
    tl.store(pointer + at, values, mask=(k < num_columns)[:, None] & (n < rank))


@jit
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
    inner: tl.constexpr,
    rank: tl.constexpr,
    rank_out: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANK: tl.constexpr,
    RANK_OUT: tl.constexpr,
    STAGES: tl.constexpr,
):
    expert, part = tl.program_id(0) % num_experts, tl.program_id(0) // num_experts
    first, end = rows_of_expert(offsets, expert)
    dtype = gate_up.dtype.element_ty
    row, k = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    wide_expert = expert.to(tl.int64)
    zero = wide_expert * 0
    for start in range(first + part * ROWS, end, parts * ROWS):
        wide_start, num_rows = start + zero, end - start
        weight = tl.load(weights + start + row, mask=row < num_rows, other=0.0).to(tl.float32)[:, None]
        if h is not None:
            of_gate, of_up = _thin_tiles(h + wide_start * 2 * rank, row, num_rows, rank, RANK)
        total = tl.zeros([ROWS, RANK_OUT], tl.float32)
        for column in tl.range(0, inner, COLUMNS, num_stages=STAGES):
            num_columns = inner - column
            mask = (row < num_rows)[:, None] & (k < num_columns)[None, :]
            at = row[:, None] * (2 * inner) + k[None, :]
            gate_at = gate_up + wide_start * 2 * inner + column
            gate = tl.load(gate_at + at, mask=mask, other=0.0).to(tl.float32)
            up = tl.load(gate_at + inner + at, mask=mask, other=0.0).to(tl.float32)
            if h is not None:
                b_at = b + (wide_expert * 2 * inner + column) * rank
                b_gate, b_up = _matrix_tiles(b_at, k, num_columns, inner, rank, RANK)
                gate = tl.dot(of_gate, b_gate, gate, input_precision="ieee")
                up = tl.dot(of_up, b_up, up, input_precision="ieee")
            activated = (gate * tl.sigmoid(gate) * up * weight).to(dtype)
            tl.store(result + wide_start * inner + column + row[:, None] * inner + k[None, :], activated, mask=mask)
            if a is not None:
                thin = _matrix_tile(
                    a + wide_expert * rank_out * inner + column, k, num_columns, 1, rank_out, inner, RANK_OUT
                )
                total = tl.dot(activated, tl.trans(thin), total, input_precision="ieee")
        if a is not None:
            target = projected + wide_start * rank_out
            _store_thin_tile(target, row, num_rows, rank_out, rank_out, RANK_OUT, total * scale)


@jit
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
    num_all,
    num_experts,
    inner: tl.constexpr,
    rank: tl.constexpr,
    rank_out: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANK: tl.constexpr,
    RANK_OUT: tl.constexpr,
    STAGES: tl.constexpr,
):
    expert, block = tl.program_id(0) % num_experts, (tl.program_id(0) // num_experts).to(tl.int64)
    first, end = rows_of_expert(offsets, expert)
    row, k = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    column, num_columns = block * COLUMNS, (inner - block * COLUMNS).to(tl.int32)
    wide_expert, zero = expert.to(tl.int64), expert.to(tl.int64) * 0
    b_at = (wide_expert * 2 * inner + column) * rank
    a_at = wide_expert * rank_out * inner + column
    if h is not None:
        b_gate, b_up = _matrix_tiles(b + b_at, k, num_columns, inner, rank, RANK)
        db_gate, db_up = tl.zeros([COLUMNS, RANK], tl.float32), tl.zeros([COLUMNS, RANK], tl.float32)
    if a is not None:
        thin = _matrix_tile(a + a_at, k, num_columns, 1, rank_out, inner, RANK_OUT)
        of_a = tl.zeros([COLUMNS, RANK_OUT], tl.float32)
    for start in tl.range(first, end, ROWS, num_stages=STAGES):
        wide_start, num_rows = start + zero, end - start
        mask = (row < num_rows)[:, None] & (k < num_columns)[None, :]
        at = row[:, None] * (2 * inner) + k[None, :]
        gate_at = wide_start * 2 * inner + column
        dy_at = dy + wide_start * inner + column + row[:, None] * inner + k[None, :]
        gradient = tl.load(dy_at, mask=mask, other=0.0).to(tl.float32)
        gate = tl.load(gate_up + gate_at + at, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(gate_up + gate_at + inner + at, mask=mask, other=0.0).to(tl.float32)
        weight = tl.load(weights + start + row, mask=row < num_rows, other=0.0).to(tl.float32)
        if h is not None:
            of_gate, of_up = _thin_tiles(h + wide_start * 2 * rank, row, num_rows, rank, RANK)
            gate = tl.dot(of_gate, b_gate, gate, input_precision="ieee")
            up = tl.dot(of_up, b_up, up, input_precision="ieee")
        if a is not None:
            of_projected = _thin_tile(d_projected + wide_start * rank_out, row, num_rows, rank_out, rank_out, RANK_OUT)
            gradient += scale * tl.dot(of_projected, thin, input_precision="ieee")
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        tl.store(of_weights + block * num_all + start + row, tl.sum(gradient * silu * up, 1), mask=row < num_rows)
        if a is not None:
            activated = (silu * up * weight[:, None]).to(gate_up.dtype.element_ty)
            of_a = tl.dot(tl.trans(activated), of_projected, of_a, input_precision="ieee")
        gradient *= weight[:, None]
        d_up = (gradient * silu).to(gate_up.dtype.element_ty)
        tl.store(d_gate_up + gate_at + inner + at, d_up, mask=mask)
        d_gate = (gradient * up * (sigmoid + silu * (1 - sigmoid))).to(gate_up.dtype.element_ty)
        tl.store(d_gate_up + gate_at + at, d_gate, mask=mask)
        if h is not None:
            db_gate = tl.dot(tl.trans(d_gate), of_gate, db_gate, input_precision="ieee")
            db_up = tl.dot(tl.trans(d_up), of_up, db_up, input_precision="ieee")
            target = of_h + (block * num_all + wide_start) * 2 * rank
            dh_gate = tl.dot(d_gate, tl.trans(b_gate), input_precision="ieee")
            _store_thin_tile(target, row, num_rows, rank, 2 * rank, RANK, dh_gate)
            dh_up = tl.dot(d_up, tl.trans(b_up), input_precision="ieee")
            _store_thin_tile(target + rank, row, num_rows, rank, 2 * rank, RANK, dh_up)
    if h is not None:
        _store_matrix_tile(db + b_at, k, num_columns, rank, rank, 1, RANK, db_gate)
        _store_matrix_tile(db + b_at + inner * rank, k, num_columns, rank, rank, 1, RANK, db_up)
    if a is not None:
        _store_matrix_tile(da + a_at, k, num_columns, 1, rank_out, inner, RANK_OUT, of_a * scale)


@jit
def _add_up(partial, result, num_elements, num_blocks, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < num_elements
    total = tl.zeros([BLOCK], tl.float32)
    for block in range(num_blocks):
        total += tl.load(partial + block * num_elements + at, mask=mask, other=0.0)
    tl.store(result + at, total, mask=mask)
