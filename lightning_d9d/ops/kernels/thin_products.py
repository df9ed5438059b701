"""Triton kernels of products of sorted rows with thin matrices, one for each group: those of experts' adapters.

[Note: thin products] A product of rank r reads much and computes little, so the order of reads matters. The grid is
`EXPERTS x some`: neighbouring programs have different experts. An expert's rows are in the order of tokens. So programs
that run at the same time read copies of the same tokens, from memory once and then from the cache. For this purpose
rows are read from the tokens, through `sources`, instead of from their copies. Each program finds its rows from
`offsets`, on the device.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_d9d.ops.kernels.compiling import jit
from lightning_d9d.ops.rows import ceil_div, next_power_of_2, padded_for_products

_ROWS = 64
_COLUMNS = 128
"""Columns of a tile if the kernel adds to rows or sums rows."""
_ROWS_READ = 128
_COLUMNS_READ = 64
"""Columns of a tile if the kernel only reads rows."""
_MORE_PROGRAMS = 4
"""Factor for the number of programs that an expert of mean size needs, so that larger experts do not take longer."""
_BLOCK = 1024


def num_parts(num_rows: int, num_experts: int, rows: int) -> int:
    """Return the number of programs that share an expert's rows, in tiles of `rows`."""
    return max(1, min(_MORE_PROGRAMS * ceil_div(num_rows, rows * num_experts), ceil_div(num_rows, rows)))


def project(x: Tensor, matrices: Tensor, offsets: Tensor, sources: Tensor | None, scale: float, result: Tensor) -> None:
    """Fill `result` `[rows, n]` with `scale * matrices[g] @ x[row]`; matrices are `[groups, n, width]`.

    No tensor is empty. With `sources` a row is `x[sources[row]]`. Elements of a row of `x` are side by side.
    """
    (num_rows, rank), num_experts = result.shape, len(offsets)
    parts = num_parts(num_rows, num_experts, _ROWS_READ)
    with torch.cuda.device_of(x):
        _project[(parts * num_experts,)](
            x,
            x.stride(0),
            matrices,
            *matrices.stride(),
            offsets,
            sources,
            result,
            scale,
            num_experts,
            parts,
            x.shape[1],
            rank,
            ROWS=_ROWS_READ,
            COLUMNS=_COLUMNS_READ,
            RANK=padded_for_products(rank),
            num_warps=4,
            num_stages=4,
        )


def accumulate(rows: Tensor, h: Tensor, matrices: Tensor, offsets: Tensor, scale: float) -> None:
    """Add `scale * h[row] @ matrices[g]` to each row; matrices are `[groups, n, width]`. No tensor is empty."""
    (num_rows, width), num_experts = rows.shape, len(offsets)
    parts = num_parts(num_rows, num_experts, _ROWS)
    with torch.cuda.device_of(rows):
        _accumulate[(parts * num_experts,)](
            rows,
            h,
            matrices,
            *matrices.stride(),
            offsets,
            scale,
            num_experts,
            parts,
            width,
            h.shape[1],
            ROWS=_ROWS,
            COLUMNS=_COLUMNS,
            RANK=padded_for_products(h.shape[1]),
            num_warps=8,
        )


def gradient(h: Tensor, x: Tensor, offsets: Tensor, sources: Tensor | None, scale: float, result: Tensor) -> None:
    """Fill `result` `[groups, n, width]`, of any strides, with `scale * h.T @ x` of each group's rows.

    With `sources` a row is `x[sources[row]]`. Elements of a row of `x` are side by side. Columns and groups are not
    empty.
    """
    (num_experts, rank, width), n = result.shape, padded_for_products(result.shape[1])
    with torch.cuda.device_of(result):
        _gradient[(ceil_div(width, _COLUMNS) * num_experts,)](
            h,
            x,
            x.stride(0),
            offsets,
            sources,
            result,
            *result.stride(),
            scale,
            num_experts,
            width,
            rank,
            ROWS=_ROWS,
            COLUMNS=_COLUMNS,
            RANK=n,
            num_warps=4 if n <= 64 else 8,
            num_stages=3,
        )


def pick(products: Tensor, offsets: Tensor, sources: Tensor, scale: float, h: Tensor) -> None:
    """Fill each row of `h` `[rows, n]` with the columns of the row's expert in `products` `[tokens, groups * n]`.

    No tensor is empty.
    """
    _move(products, offsets, sources, scale, h, False)


def spread(h: Tensor, offsets: Tensor, sources: Tensor, columns: Tensor) -> None:
    """Write each row of `h` `[rows, n]` to the columns of the row's expert in `columns` `[tokens, groups * n]`.

    No tensor is empty.
    """
    _move(columns, offsets, sources, 1.0, h, True)


def _move(columns: Tensor, offsets: Tensor, sources: Tensor, scale: float, h: Tensor, spreads: bool) -> None:
    (num_rows, rank), num_experts = h.shape, len(offsets)
    wide = next_power_of_2(rank)
    rows = max(1, _BLOCK // wide)
    parts = num_parts(num_rows, num_experts, rows)
    with torch.cuda.device_of(h):
        _pick_or_spread[(parts * num_experts,)](
            columns,
            offsets,
            sources,
            h,
            scale,
            num_experts,
            parts,
            rank,
            ROWS=rows,
            RANK=wide,
            SPREADS=spreads,
            num_warps=4,
        )


@triton.jit
def rows_of_expert(offsets, expert):
    """Return the first row and the one after the last."""
    return tl.load(offsets + expert - 1, mask=expert > 0, other=0), tl.load(offsets + expert)


@jit
def _project(
    x,
    x_stride,
    matrices,
    expert_stride,
    rank_stride,
    column_stride,
    offsets,
    sources,
    result,
    scale,
    num_experts,
    parts,
    width,
    rank,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANK: tl.constexpr,
):
    expert, part = tl.program_id(0) % num_experts, tl.program_id(0) // num_experts
    first, end = rows_of_expert(offsets, expert)
    n = tl.arange(0, RANK)
    matrix = matrices + expert.to(tl.int64) * expert_stride + n[None, :] * rank_stride
    for start in range(first + part * ROWS, end, parts * ROWS):
        row = start + tl.arange(0, ROWS)
        source = row
        if sources is not None:
            source = tl.load(sources + row, mask=row < end, other=0)
        of_rows = x + source.to(tl.int64)[:, None] * x_stride
        total = tl.zeros([ROWS, RANK], tl.float32)
        for column in range(0, width, COLUMNS):
            k = column + tl.arange(0, COLUMNS)
            own = tl.load(of_rows + k[None, :], mask=(row < end)[:, None] & (k < width)[None, :], other=0.0)
            thin = tl.load(matrix + k[:, None] * column_stride, mask=(k < width)[:, None] & (n < rank), other=0.0)
            total = tl.dot(own, thin, total, input_precision="ieee")
        at = row.to(tl.int64)[:, None] * rank + n[None, :]
        tl.store(result + at, total * scale, mask=(row < end)[:, None] & (n < rank)[None, :])


@jit
def _accumulate(
    rows,
    h,
    matrices,
    expert_stride,
    rank_stride,
    column_stride,
    offsets,
    scale,
    num_experts,
    parts,
    width,
    rank,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANK: tl.constexpr,
):
    expert, part = tl.program_id(0) % num_experts, tl.program_id(0) // num_experts
    first, end = rows_of_expert(offsets, expert)
    n = tl.arange(0, RANK)
    matrix = matrices + expert.to(tl.int64) * expert_stride + n[:, None] * rank_stride
    for start in range(first + part * ROWS, end, parts * ROWS):
        row = start + tl.arange(0, ROWS)
        at = row.to(tl.int64)[:, None]
        own = tl.load(h + at * rank + n[None, :], mask=(row < end)[:, None] & (n < rank)[None, :], other=0.0)
        for column in range(0, width, COLUMNS):
            k = column + tl.arange(0, COLUMNS)
            mask = (row < end)[:, None] & (k < width)[None, :]
            thin = tl.load(matrix + k[None, :] * column_stride, mask=(n < rank)[:, None] & (k < width), other=0.0)
            before = tl.load(rows + at * width + k[None, :], mask=mask, other=0.0).to(tl.float32)
            added = tl.dot(own, thin, input_precision="ieee")
            tl.store(rows + at * width + k[None, :], before + added * scale, mask=mask)


@jit
def _gradient(
    h,
    x,
    x_stride,
    offsets,
    sources,
    result,
    expert_stride,
    rank_stride,
    column_stride,
    scale,
    num_experts,
    width,
    rank,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANK: tl.constexpr,
):
    """Compute a gradient; a program has all rows of an expert, and some columns."""
    expert = tl.program_id(0) % num_experts
    k = tl.program_id(0) // num_experts * COLUMNS + tl.arange(0, COLUMNS)
    first, end = rows_of_expert(offsets, expert)
    n = tl.arange(0, RANK)
    total = tl.zeros([COLUMNS, RANK], tl.float32)
    for start in range(first, end, ROWS):
        row = start + tl.arange(0, ROWS)
        source = row
        if sources is not None:
            source = tl.load(sources + row, mask=row < end, other=0)
        exists = (row < end)[:, None]
        at = source.to(tl.int64)[:, None] * x_stride
        own = tl.load(x + at + k[None, :], mask=exists & (k < width)[None, :], other=0.0)
        thin = tl.load(h + row.to(tl.int64)[:, None] * rank + n, mask=exists & (n < rank)[None, :], other=0.0)
        total = tl.dot(tl.trans(own), thin, total, input_precision="ieee")
    at = expert.to(tl.int64) * expert_stride + k.to(tl.int64)[:, None] * column_stride + n[None, :] * rank_stride
    tl.store(result + at, total * scale, mask=(k < width)[:, None] & (n < rank)[None, :])


@jit
def _pick_or_spread(
    columns,
    offsets,
    sources,
    h,
    scale,
    num_experts,
    parts,
    rank,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    SPREADS: tl.constexpr,
):
    expert, part = tl.program_id(0) % num_experts, tl.program_id(0) // num_experts
    first, end = rows_of_expert(offsets, expert)
    n = tl.arange(0, RANK)
    for start in range(first + part * ROWS, end, parts * ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < end)[:, None] & (n < rank)[None, :]
        source = tl.load(sources + row, mask=row < end, other=0).to(tl.int64)
        of_token = columns + source[:, None] * (num_experts * rank) + (expert * rank + n)[None, :]
        of_row = h + row.to(tl.int64)[:, None] * rank + n[None, :]
        if SPREADS:
            tl.store(of_token, tl.load(of_row, mask=mask, other=0.0), mask=mask)
        else:
            tl.store(of_row, tl.load(of_token, mask=mask, other=0.0).to(tl.float32) * scale, mask=mask)
