"""Plans the blocks of queries and keys that meet in attention, on the device.

A program has a block of rows (queries, or keys for their gradients) and processes the columns (the other ones) a block
at a time. A plan has the range of blocks with a pair, and in it the range in which all pairs count. For documents the
plan uses the smallest and largest id of each block. So it is tight if documents are contiguous with ids that rise or
fall. Other ids cost time, not correctness.
"""
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_d9d.ops.attention_masks import Masks
from lightning_d9d.ops.kernels.compiling import jit
from lightning_d9d.ops.rows import ceil_div, next_power_of_2

SIZES = ["num_queries", "num_keys", "num_rows", "num_columns", "length", "heads", "group", "parts", "window"]
"""Arguments whose values do not recompile kernels."""


class Blocks(NamedTuple):
    """Rows and columns that a program has at a time, and its launch settings."""

    rows: int
    columns: int
    warps: int
    stages: int


def plan_blocks(
    masks: Masks, num_rows: int, num_columns: int, blocks: Blocks, *, rows_are_queries: bool, device: torch.device
) -> Tensor:
    """Return shape `[batch, blocks of rows, 4]`, one batch if it is the same for all.

    Its entries are the first block of columns and the one after the last, then the same for blocks without masks.
    """
    ids = (masks.q_documents, masks.k_documents) if rows_are_queries else (masks.k_documents, masks.q_documents)
    row_ids, column_ids = ids
    row_blocks, column_blocks = ceil_div(num_rows, blocks.rows), ceil_div(num_columns, blocks.columns)
    batch = 1 if row_ids is None else len(row_ids)
    extremes = None
    if row_ids is not None and column_ids is not None:
        extremes = column_ids.new_empty(2, batch, column_blocks)
        if column_blocks:
            _extremes[(column_blocks, batch)](
                column_ids, *extremes, column_ids.stride(0), num_columns, COLUMNS=blocks.columns, num_warps=1
            )
    plan = torch.empty(batch, row_blocks, 4, dtype=torch.int32, device=device)
    _plan_rows[(row_blocks, batch)](
        plan,
        row_ids,
        *((None, None) if extremes is None else extremes),
        0 if row_ids is None else row_ids.stride(0),
        num_rows,
        num_columns,
        masks.window,
        CAUSAL=masks.causal,
        ROWS_ARE_QUERIES=rows_are_queries,
        ROWS=blocks.rows,
        COLUMNS=blocks.columns,
        BLOCKS=next_power_of_2(max(1, column_blocks)),
    )
    return plan


@jit(do_not_specialize=SIZES)
def _extremes(ids_ptr, low_ptr, high_ptr, ids_stride, length, COLUMNS: tl.constexpr):
    """Write the smallest and largest id of each block of columns."""
    block = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    ids = ids_from(ids_ptr + batch * ids_stride, block * COLUMNS, length, COLUMNS)
    place = batch * tl.num_programs(0) + block
    tl.store(low_ptr + place, tl.min(ids, 0))
    tl.store(high_ptr + place, tl.max(ids, 0))


@jit(do_not_specialize=SIZES)
def _plan_rows(
    plan_ptr,
    row_ids_ptr,
    low_ptr,
    high_ptr,
    row_ids_stride,
    num_rows,
    num_columns,
    window,
    CAUSAL: tl.constexpr,
    ROWS_ARE_QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    batch = tl.program_id(1).to(tl.int64)
    first_row = tl.program_id(0) * ROWS
    last_row = tl.minimum(first_row + ROWS, num_rows) - 1
    column = tl.arange(0, BLOCKS)
    first = column * COLUMNS
    last = tl.minimum(first + COLUMNS, num_columns) - 1
    is_useful = first < num_columns
    is_full = first + COLUMNS <= num_columns
    if CAUSAL:
        if ROWS_ARE_QUERIES:
            most, least = last_row - first, first_row - last  # distances from queries back to keys
        else:
            most, least = last - first_row, first - last_row
        is_useful = is_useful & (most >= 0)
        is_full = is_full & (least >= 0)
        if window is not None:
            is_useful = is_useful & (least < window)
            is_full = is_full & (most < window)
    if row_ids_ptr is not None:
        ids = ids_from(row_ids_ptr + batch * row_ids_stride, first_row, num_rows, ROWS)
        low = tl.min(ids, 0)
        high = tl.max(ids, 0)
        num_blocks = tl.cdiv(num_columns, COLUMNS)
        column_low = tl.load(low_ptr + batch * num_blocks + column, mask=column < num_blocks, other=0)
        column_high = tl.load(high_ptr + batch * num_blocks + column, mask=column < num_blocks, other=0)
        is_useful = is_useful & (column_low <= high) & (column_high >= low)
        is_full = is_full & (low == high) & (column_low == low) & (column_high == low)
    is_full = is_full & is_useful
    end = tl.max(tl.where(is_useful, column + 1, 0), 0)
    start = tl.minimum(tl.min(tl.where(is_useful, column, BLOCKS), 0), end)
    full_end = tl.max(tl.where(is_full, column + 1, 0), 0)
    full_start = tl.max(tl.where((column < full_end) & (is_full == 0), column + 1, 0), 0)
    place = plan_ptr + (batch * tl.num_programs(0) + tl.program_id(0)) * 4
    tl.store(place, start)
    tl.store(place + 1, end)
    tl.store(place + 2, tl.maximum(full_start, start))  # both are `start` if the range is empty
    tl.store(place + 3, tl.maximum(full_end, start))


@triton.jit
def ids_from(ids_ptr, first, length, SIZE: tl.constexpr):
    """Return ids from `first` on; after the last one comes the first of these again."""
    places = first + tl.arange(0, SIZE)
    return tl.load(ids_ptr + tl.where(places < length, places, first))
