"""A program reads its row in blocks of `LANES x WIDTH` numbers; a thread loads `WIDTH` numbers, 16 bytes, at once.

A program reads its row in blocks of `LANES x WIDTH` numbers, `WIDTH` of which are the 16 bytes that a thread loads at
once. Maxima and sums are kept by lane, so threads do not need each other before the end of the row. There is one
exponential for each number and one for each lane. The gradient is written from the end of the row to its start, because
the numbers read last are still in the cache. Blocks extend past the columns of a row to the beginning of the next row.
So loads are wide even for an odd number of columns. The gap between rows is overwritten too.
"""

# pyright: reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lightning_d9d.ops.kernels.compiling import jit
from lightning_d9d.ops.rows import ceil_div, next_power_of_2

_MOST_AT_ONCE = 16384
_NUMBERS_PER_THREAD = 16
_PROGRAMS_OF_SCALE = 1056
"""Eight programs for each multiprocessor of an H200: enough to saturate memory, and quick to end if there is nothing to
do."""

_SCALED_AT_ONCE = 4096

_LOG2_E = tl.constexpr(1.4426950408889634)
_LOG2_E_REST = tl.constexpr(1.4426950408889634 - 1.44269502162933349609375)  # what float32 cuts
_LN_2 = tl.constexpr(0.6931471805599453)
_LOWEST = tl.constexpr(-1e30)
"""Initial value of maxima: finite, so that exponentials of a lane with only -inf are 0."""


def write_statistics(logits: Tensor, labels: Tensor, statistics: Tensor, *, first: int, soft_cap: float) -> None:
    """Write each row's log-sum-exp, logit of the label (0 if it is not a column) and sum of logits.

    Args:
        logits: Shape `[rows, columns]`, the last dim contiguous; it owns the memory between rows.
        labels: Int64 `[rows]`; column 0 has the label `first`.
        statistics: Float32 `[3, rows]`, the last dim contiguous; overwritten.
        first: Label of the first column.
        soft_cap: Soft cap; Soft cap; 0 for none.
    """
    _launch(logits, labels, statistics, statistics, first=first, soft_cap=soft_cap, READS=True, WRITES=False)


def write_gradient(
    logits: Tensor, labels: Tensor, lse: Tensor, factors: Tensor, *, first: int, soft_cap: float
) -> None:
    """Overwrite logits with `factors[0] * softmax - factors[1] * is_label - factors[2]`, through the soft cap.

    Args:
        logits: Shape `[rows, columns]`, the last dim contiguous; it owns the memory between rows.
        labels: Int64 `[rows]`; column 0 has the label `first`.
        lse: Log-sum-exp of each row, float32 `[rows]`.
        factors: Float32 `[3, rows]`, the last dim contiguous.
        first: Label of the first column.
        soft_cap: 0 for none.
    """
    statistics = lse.unsqueeze(0)
    _launch(logits, labels, statistics, factors, first=first, soft_cap=soft_cap, READS=False, WRITES=True)


def write_statistics_and_gradient(
    logits: Tensor,
    labels: Tensor,
    statistics: Tensor,
    *,
    ignore_index: int,
    soft_cap: float,
    z_loss: float,
    label_smoothing: float,
) -> None:
    """Do `write_statistics`, and `write_gradient` with the factors of the losses' sum, on whole rows at once."""
    _launch(
        logits,
        labels,
        statistics,
        statistics,
        soft_cap=soft_cap,
        ignore_index=ignore_index,
        z_loss=z_loss,
        smoothing=label_smoothing,
        READS=True,
        WRITES=True,
    )


def scale_in_place(tensor: Tensor, factor: Tensor) -> None:
    """Multiply a contiguous tensor by a float32 scalar on the device; if that is 1, memory is not touched."""
    if tensor.numel():
        num_programs = min(_PROGRAMS_OF_SCALE, ceil_div(tensor.numel(), _SCALED_AT_ONCE))
        _scale_kernel[(num_programs,)](tensor, factor, tensor.numel(), BLOCK=_SCALED_AT_ONCE, num_warps=8)


def _launch(
    logits: Tensor,
    labels: Tensor,
    statistics: Tensor,
    factors: Tensor,
    *,
    first: int = 0,
    soft_cap: float,
    ignore_index: int = 0,
    z_loss: float = 0.0,
    smoothing: float = 0.0,
    **parts: bool,
) -> None:
    rows, columns = logits.shape
    width = 16 // logits.element_size()
    at_once = min(_MOST_AT_ONCE, max(width, next_power_of_2(columns)))
    _kernel[(rows,)](
        logits,
        labels,
        statistics,
        factors,
        logits.stride(0),
        statistics.stride(0),
        factors.stride(0),
        columns,
        first,
        ignore_index,
        soft_cap,
        z_loss,
        smoothing,
        HAS_CAP=soft_cap != 0,
        LANES=at_once // width,
        WIDTH=width,
        num_warps=max(4, at_once // (32 * _NUMBERS_PER_THREAD)),
        **parts,
    )


@triton.jit
def _capped(logits, soft_cap):
    # tanh by exponentials loses digits near 0, where the series is exact to float32.
    x = tl.div_rn(logits, soft_cap)
    square = x * x
    series = square * (62 / 2835) - 17 / 315
    series = series * square + 2 / 15
    series = series * square - 1 / 3
    exp = tl.exp2(tl.abs(x) * (-2 * _LOG2_E))
    far = tl.div_rn(1 - exp, 1 + exp)
    return soft_cap * tl.where(square < 0.0625, x + x * square * series, tl.where(x < 0, -far, far))


@triton.jit
def _exp(x, EXACT: tl.constexpr):
    if EXACT:
        x = tl.where(x < -200.0, -200.0, x)  # its exponential is 0, and the rest is finite
    product = x * _LOG2_E
    result = tl.exp2(product)
    if EXACT:  # in float32 the rounding of the product would be most of the error
        rest = tl.fma(x, tl.full(x.shape, _LOG2_E, tl.float32), -product) + x * _LOG2_E_REST
        result += result * (rest * _LN_2)
    return result


@jit
def _kernel(
    logits_of_rows,
    labels,
    statistics,
    factors,
    logits_stride,
    statistics_stride,
    factors_stride,
    columns,
    first,
    ignore_index,
    soft_cap,
    z_loss,
    smoothing,
    READS: tl.constexpr,
    WRITES: tl.constexpr,
    HAS_CAP: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Write the statistics (`READS`) or read a log-sum-exp from there; then write the gradient if `WRITES`.

    With both, the factors are those of the losses' sum, this rank has all columns, and `factors` is not read.
    """
    EXACT: tl.constexpr = logits_of_rows.dtype.element_ty == tl.float32
    index = tl.program_id(0).to(tl.int64)
    row = logits_of_rows + index * logits_stride
    label = tl.load(labels + index)
    column = (label - first).to(tl.int32)
    block = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    if READS:
        top = tl.full([LANES], _LOWEST, tl.float32)
        exps = tl.zeros([LANES], tl.float32)
        total = tl.zeros([LANES], tl.float32)
        for start in range(0, columns, LANES * WIDTH):
            is_in = start + block < columns
            logits = tl.load(row + start + block, mask=start + block < logits_stride).to(tl.float32)
            if HAS_CAP:
                logits = _capped(logits, soft_cap)
            total += tl.sum(tl.where(is_in, logits, 0.0), 1)
            logits = tl.where(is_in, logits, float("-inf"))
            higher = tl.maximum(top, tl.max(logits, 1))
            exps = exps * _exp(top - higher, EXACT)
            exps += tl.sum(_exp(logits - higher[:, None], EXACT), 1)
            top = higher
        highest = tl.max(top, 0)
        lse = highest + tl.log(tl.sum(exps * _exp(top - highest, EXACT), 0))
        at_label = tl.load(row + column, mask=(column >= 0) & (column < columns), other=0.0).to(tl.float32)
        if HAS_CAP:
            at_label = _capped(at_label, soft_cap)
        tl.store(statistics + index, lse)
        tl.store(statistics + statistics_stride + index, at_label)
        tl.store(statistics + 2 * statistics_stride + index, tl.sum(total, 0))
    else:
        lse = tl.load(statistics + index)
    if WRITES:
        if READS:
            tl.debug_barrier()  # all have read before one writes
            counts = tl.where(label == ignore_index, 0.0, 1.0)
            of_softmax = counts * (lse * 2 * z_loss + 1)
            of_label = counts * (1 - smoothing)
            of_all = counts * smoothing / columns
        else:
            of_softmax = tl.load(factors + index)
            of_label = tl.load(factors + factors_stride + index)
            of_all = tl.load(factors + 2 * factors_stride + index)
        num_blocks = tl.cdiv(columns, LANES * WIDTH)
        for i in range(num_blocks):
            start = (num_blocks - 1 - i) * LANES * WIDTH
            is_in = start + block < logits_stride
            logits = tl.load(row + start + block, mask=is_in).to(tl.float32)
            if HAS_CAP:
                logits = _capped(logits, soft_cap)
            gradient = of_softmax * _exp(logits - lse, EXACT) - of_all
            gradient = tl.where(start + block == column, gradient - of_label, gradient)
            if HAS_CAP:
                part = logits / soft_cap
                gradient *= 1 - part * part
            tl.store(row + start + block, gradient.to(row.dtype.element_ty), mask=is_in)


@jit
def _scale_kernel(tensor, factor, size, BLOCK: tl.constexpr):
    by = tl.load(factor)
    if by != 1:
        for start in range(tl.program_id(0).to(tl.int64) * BLOCK, size, tl.num_programs(0) * BLOCK):
            at = start + tl.arange(0, BLOCK)
            numbers = tl.load(tensor + at, mask=at < size).to(tl.float32)
            tl.store(tensor + at, (numbers * by).to(tensor.dtype.element_ty), mask=at < size)
