"""Triton kernels of `rms_norm`: a program has some whole rows in registers, so memory is read and written once."""
# pyright: reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_d9d.ops.rows import num_programs, rows_of

_TILE = 4096
"""Elements that a program works on at a time; 16 a thread, so two loads of 16 bytes in 16 bits."""


def forward(
    x: Tensor,
    weight: Tensor,
    residual: Tensor | None,
    eps: float,
    zero_centered: bool,
    normed: Tensor,
    total: Tensor,
) -> None:
    """Fill `normed` and, with `residual`, `total`, which have memory without gaps. There are elements."""
    x = rows_of(x)
    residual = None if residual is None else rows_of(residual)
    num_rows, dim = x.shape
    rows, block, warps = _tile(dim)
    with torch.cuda.device_of(x):
        _forward[(triton.cdiv(num_rows, rows),)](
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
    """Fill `dx`, gradient of what was normed, and `dweight`, unless they are empty. There are elements."""
    dnormed, total = rows_of(dnormed), rows_of(total)
    dtotal = None if dtotal is None else rows_of(dtotal)
    num_rows, dim = total.shape
    rows, block, warps = _tile(dim)
    num_tiles = triton.cdiv(num_rows, rows)
    needs_weight = dweight.numel() > 0
    programs = num_programs(num_tiles, total.device) if needs_weight else num_tiles
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
        dweight.copy_(partial.sum(0))


def _tile(dim: int) -> tuple[int, int, int]:
    """Rows and columns of a tile, and its warps."""
    block = triton.next_power_of_2(dim)
    return max(1, _TILE // block), block, min(32, max(8, block // 512))


@triton.jit
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
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        row = tile * tl.full([1, 1], ROWS, tl.int64) + tl.arange(0, ROWS)[:, None]
        mask = (row < num_rows) & (column < dim)
        x = tl.load(total_ptr + row * total_stride + column, mask=mask, other=0).to(tl.float32)
        dnormed = tl.load(dnormed_ptr + row * dnormed_stride + column, mask=mask, other=0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, axis=1)[:, None] / dim + eps)
        normed = x * scale
        if partial_ptr is not None:
            dweight += dnormed * normed
        if dx_ptr is not None:
            dnormed *= weight
            dx = (dnormed - normed * (tl.sum(dnormed * normed, axis=1)[:, None] / dim)) * scale
            if dtotal_ptr is not None:
                dx += tl.load(dtotal_ptr + row * dtotal_stride + column, mask=mask, other=0).to(tl.float32)
            tl.store(dx_ptr + row * dim + column, dx, mask=mask)
    if partial_ptr is not None:
        sums = tl.sum(dweight, axis=0)[None, :]
        tl.store(partial_ptr + tl.program_id(0).to(tl.int64) * dim + column, sums, mask=column < dim)
