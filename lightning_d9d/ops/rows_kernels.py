"""A Triton kernel that adds up what programs have summed over their rows."""
# pyright: reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_d9d.ops.rows import ceil_div, next_power_of_2

_ROWS = 128
_COLUMNS = 16
"""Few, so that there are many programs: the sums of a weight are no larger than a cache."""
_COLUMNS_AT_ONCE = 8
"""Where a program has all rows at once: 32 bytes of each, the least that memory reads."""


def add_up(partial: Tensor, result: Tensor, *, at_once: bool = False) -> None:
    """Fill `result`, shape `[columns]` in any dtype, with the sums over the rows of `partial`, float32, in fixed order.

    Both have memory without gaps. With `at_once` a program loads all rows of its columns before it adds: faster for up
    to some hundred.
    """
    num_rows, dim = partial.shape
    rows, columns = (next_power_of_2(num_rows), _COLUMNS_AT_ONCE) if at_once else (_ROWS, _COLUMNS)
    warps = 8 if rows > _ROWS else 4
    with torch.cuda.device_of(partial):
        _add_up[(ceil_div(dim, columns),)](partial, result, num_rows, dim, ROWS=rows, COLUMNS=columns, num_warps=warps)


@triton.jit
def _add_up(partial_ptr, result_ptr, num_rows, dim, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, num_rows, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        mask = (row < num_rows) & (column < dim)[None, :]
        sums += tl.load(partial_ptr + row.to(tl.int64) * dim + column[None, :], mask=mask, other=0)
    tl.store(result_ptr + column, tl.sum(sums, axis=0), mask=column < dim)
