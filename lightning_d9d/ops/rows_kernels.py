"""A Triton kernel that adds up what programs have summed over their rows."""
# pyright: reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 128
_COLUMNS = 16
"""Few, so that there are many programs: the sums of a weight are no larger than a cache."""


def add_up(partial: Tensor, result: Tensor) -> None:
    """Fill `result`, shape `[columns]` in any dtype, with the sums over the rows of `partial`, float32, in their order.

    Both have memory without gaps.
    """
    num_rows, dim = partial.shape
    with torch.cuda.device_of(partial):
        _add_up[(triton.cdiv(dim, _COLUMNS),)](partial, result, num_rows, dim, ROWS=_ROWS, COLUMNS=_COLUMNS)


@triton.jit
def _add_up(partial_ptr, result_ptr, num_rows, dim, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, num_rows, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        mask = (row < num_rows) & (column < dim)[None, :]
        sums += tl.load(partial_ptr + row.to(tl.int64) * dim + column[None, :], mask=mask, other=0)
    tl.store(result_ptr + column, tl.sum(sums, axis=0), mask=column < dim)
