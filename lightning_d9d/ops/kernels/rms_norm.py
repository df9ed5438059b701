"""Triton kernels of `rms_norm`: a program holds some whole rows in registers, so memory is read and written once."""
# pyright: reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_d9d.ops.kernels.compiling import jit
from lightning_d9d.ops.kernels.rows import add_up
from lightning_d9d.ops.rows import ceil_div, next_power_of_2, num_programs, rows_of

_FORWARD_TILE = 2048
"""Elements that a program processes at a time; 8 for each thread, so a load of 16 bytes in 16 bits."""
_BACKWARD_TILE = 4096
"""Elements in the backward: twice as many, so that fewer programs have fewer sums to add."""


def forward(
    x: Tensor,
    weight: Tensor,
    residual: Tensor | None,
    eps: float,
    zero_centered: bool,
    normed: Tensor,
    total: Tensor,
) -> None:
    """Fill `normed` and, with `residual`, `total`, which are contiguous and not empty."""
    x = rows_of(x)
    residual = None if residual is None else rows_of(residual)
    num_rows, dim = x.shape
    rows, block, warps = _tile(dim, _FORWARD_TILE)
    with torch.cuda.device_of(x):
        _forward[(ceil_div(num_rows, rows),)](
            x,
            residual,
            weight.contiguous(),
            normed,
            total,
            num_rows,
            dim,
            x.stride(0),
            0 if residual is None else residual.stride(0),
            eps,
            ZERO_CENTERED=zero_centered,
            ROWS=rows,
            BLOCK=block,
            num_warps=warps,
        )


def backward(
    dnormed: Tensor,
    dtotal: Tensor | None,
    total: Tensor,
    weight: Tensor,
    eps: float,
    zero_centered: bool,
    dx: Tensor,
    dweight: Tensor,
) -> None:
    """Fill `dx`, the gradient of the normed tensor, and `dweight`, unless they are empty."""
    dnormed, total = rows_of(dnormed), rows_of(total)
    dtotal = None if dtotal is None else rows_of(dtotal)
    num_rows, dim = total.shape
    rows, block, warps = _tile(dim, _BACKWARD_TILE)
    num_tiles = ceil_div(num_rows, rows)
    needs_weight = dweight.numel() > 0
    programs = num_programs(num_tiles, total.device, a_processor=2) if needs_weight else num_tiles
    partial = torch.empty(programs, dim, dtype=torch.float32, device=total.device) if needs_weight else None
    with torch.cuda.device_of(total):
        _backward[(programs,)](
            dnormed,
            dtotal,
            total,
            weight.contiguous(),
            dx if dx.numel() else None,
            partial,
            num_rows,
            dim,
            num_tiles,
            dnormed.stride(0),
            0 if dtotal is None else dtotal.stride(0),
            total.stride(0),
            eps,
            ZERO_CENTERED=zero_centered,
            ROWS=rows,
            BLOCK=block,
            num_warps=warps,
        )
    if partial is not None:
        add_up(partial, dweight)


def _tile(dim: int, size: int) -> tuple[int, int, int]:
    """Return rows and columns of a tile, and its warps."""
    block = next_power_of_2(dim)
    return max(1, size // block), block, min(32, max(8, block // 512))


@jit
def _forward(
    x_ptr,
    residual_ptr,
    weight_ptr,
    normed_ptr,
    total_ptr,
    num_rows,
    dim,
    x_stride,
    residual_stride,
    eps,
    ZERO_CENTERED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < num_rows) & (column < dim)
    x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0).to(tl.float32)
    if residual_ptr is not None:
        x += tl.load(residual_ptr + row * residual_stride + column, mask=mask, other=0).to(tl.float32)
        rounded = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row * dim + column, rounded, mask=mask)
        x = rounded.to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < dim, other=0).to(tl.float32)
    if ZERO_CENTERED:
        weight += 1
    scale = tl.rsqrt(tl.sum(x * x, axis=1)[:, None] / dim + eps)
    tl.store(normed_ptr + row * dim + column, x * scale * weight, mask=mask)


@triton.jit
def _load(ptr, stride, row, column, num_rows, dim):
    """Load a tile, with zeros after the last row, and zeros for an absent tensor."""
    if ptr is None:
        return tl.zeros([1, 1], tl.float32)
    else:
        return tl.load(ptr + row * stride + column, mask=(row < num_rows) & (column < dim), other=0)


@jit
def _backward(
    dnormed_ptr,
    dtotal_ptr,
    total_ptr,
    weight_ptr,
    dx_ptr,
    partial_ptr,
    num_rows,
    dim,
    num_tiles,
    dnormed_stride,
    dtotal_stride,
    total_stride,
    eps,
    ZERO_CENTERED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    column = tl.arange(0, BLOCK)[None, :]
    weight = tl.load(weight_ptr + column, mask=column < dim, other=0).to(tl.float32)
    if ZERO_CENTERED:
        weight += 1
    dweight = tl.zeros([ROWS, BLOCK], tl.float32)
    row = tl.program_id(0) * tl.full([1, 1], ROWS, tl.int64) + tl.arange(0, ROWS)[:, None]
    x = _load(total_ptr, total_stride, row, column, num_rows, dim)
    dnormed = _load(dnormed_ptr, dnormed_stride, row, column, num_rows, dim)
    dtotal = _load(dtotal_ptr, dtotal_stride, row, column, num_rows, dim)
    for _ in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        # The next tile is loaded while this one is computed: sums over rows make all threads wait.
        next_row = row + tl.num_programs(0) * ROWS
        next_x = _load(total_ptr, total_stride, next_row, column, num_rows, dim)
        next_dnormed = _load(dnormed_ptr, dnormed_stride, next_row, column, num_rows, dim)
        next_dtotal = _load(dtotal_ptr, dtotal_stride, next_row, column, num_rows, dim)
        normed, gradient = x.to(tl.float32), dnormed.to(tl.float32)
        # without eps it is infinite for rows that do not exist, and the sums would be NaN
        scale = tl.where(row < num_rows, tl.rsqrt(tl.sum(normed * normed, axis=1)[:, None] / dim + eps), 0)
        normed *= scale
        if partial_ptr is not None:
            dweight += gradient * normed
        if dx_ptr is not None:
            gradient *= weight
            dx = (gradient - normed * (tl.sum(gradient * normed, axis=1)[:, None] / dim)) * scale
            dx += dtotal.to(tl.float32)
            tl.store(dx_ptr + row * dim + column, dx, mask=(row < num_rows) & (column < dim))
        row, x, dnormed, dtotal = next_row, next_x, next_dnormed, next_dtotal
    if partial_ptr is not None:
        sums = tl.sum(dweight, axis=0)[None, :]
        tl.store(partial_ptr + tl.program_id(0).to(tl.int64) * dim + column, sums, mask=column < dim)
