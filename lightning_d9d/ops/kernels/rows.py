"""A Triton kernel that adds the sums that programs have computed over their rows."""
# pyright: reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from lightning_d9d.ops.kernels.compiling import jit
from lightning_d9d.ops.rows import ceil_div, next_power_of_2

_ROWS = 128
_COLUMNS = 16
"""Columns of a program. Few columns make many programs, and the sums of a weight fit into a cache anyway."""
_COLUMNS_AT_ONCE = 8
"""Columns of a program that holds all rows at once: 32 bytes of each row, the smallest read of memory."""


def add_up(
    partial: Tensor, result: Tensor, second: Tensor | None = None, *, num_first: int = 0, at_once: bool = False
) -> None:
    """Fill `result`, shape `[columns]` in any dtype, with the sums over the rows of `partial`, float32, in fixed order.

    With `second`, of the same shape and dtype, these are the sums of the first `num_first` rows, and `second` gets
    those of the others. All are contiguous. With `at_once` a program loads all rows of its columns before it adds,
    which is faster for up to several hundred rows.
    """
    num_rows, dim = partial.shape
    if second is None:
        num_first = num_rows
    rows, columns = _ROWS, _COLUMNS
    if at_once:
        rows, columns = next_power_of_2(max(num_first, num_rows - num_first)), _COLUMNS_AT_ONCE
    with torch.cuda.device_of(partial):
        _add_up[(ceil_div(dim, columns), 1 if second is None else 2)](
            partial,
            result,
            result if second is None else second,
            num_first,
            num_rows,
            dim,
            ROWS=rows,
            COLUMNS=columns,
            num_warps=8 if rows > _ROWS else 4,
        )


@jit
def _add_up(partial_ptr, result_ptr, second_ptr, num_first, num_rows, dim, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    is_second = tl.program_id(1)
    first_row, end = is_second * num_first, tl.where(is_second == 1, num_rows, num_first)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < dim
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(first_row, end, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        offset = row.to(tl.int64) * dim + column[None, :]
        sums += tl.load(partial_ptr + offset, mask=(row < end) & mask[None, :], other=0)
    result_ptr = tl.where(is_second == 1, second_ptr, result_ptr)
    tl.store(result_ptr + column, tl.sum(sums, axis=0), mask=mask)
