"""Kernels of `vocab_parallel_cross_entropy`: each reads a rank's logits once, in float32 arithmetic."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 4096
"""At a time: 32 bytes of 16-bit logits for each thread of eight warps."""


def own_losses(logits: Tensor, labels: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """The logarithm of the sum of exponentials of each row, and its logit at the label, or 0 where that is elsewhere.

    Args:
        logits: shape `[tokens, columns]`.
        labels: int64 `[tokens]`, columns of the whole vocabulary.
        first: which of those this rank's first one is.

    Returns:
        Both float32 `[tokens]`.
    """
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    num_rows, num_columns = logits.shape
    lse = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    at_label = torch.empty_like(lse)
    if num_rows:
        _own_losses[(num_rows,)](
            logits,
            labels.contiguous(),
            lse,
            at_label,
            first,
            logits.stride(0),
            num_columns,
            _COLUMNS,
            num_warps=8,  # type: ignore[call-arg]
        )
    return lse, at_label


def gradient(logits: Tensor, labels: Tensor, lse: Tensor, factors: Tensor, first: int) -> Tensor:
    """`(exp(logits - lse) - is_label) * factors`.

    Args:
        logits: shape `[tokens, columns]`.
        labels: int64 `[tokens]`, columns of the whole vocabulary.
        lse: float32 `[tokens]`.
        factors: float32 `[tokens]`.
        first: which column of the whole vocabulary this rank's first one is.

    Returns:
        Contiguous, in the shape and dtype of `logits`.
    """
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    result = torch.empty_like(logits, memory_format=torch.contiguous_format)
    if result.numel():
        num_rows, num_columns = logits.shape
        _gradient[(num_rows, triton.cdiv(num_columns, _COLUMNS))](
            logits,
            labels.contiguous(),
            lse.contiguous(),
            factors.contiguous(),
            result,
            first,
            logits.stride(0),
            num_columns,
            _COLUMNS,
            num_warps=8,  # type: ignore[call-arg]
        )
    return result


@triton.jit
def _own_losses(logits, labels, lse, at_label, first, row_stride, num_columns, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    columns = tl.arange(0, COLUMNS)
    most = -float("inf")
    sums = tl.zeros([COLUMNS], dtype=tl.float32)
    for start in range(0, num_columns, COLUMNS):
        is_there = start + columns < num_columns
        x = tl.load(logits + start + columns, mask=is_there, other=-float("inf")).to(tl.float32)
        more = tl.maximum(most, tl.max(x, 0))
        # While there is nothing but -inf, any number will do to subtract: exponentials are 0.
        shift = tl.where(more == -float("inf"), 0.0, more)
        sums = sums * tl.exp(most - shift) + tl.exp(x - shift)
        most = more
    total = tl.sum(sums, 0)
    tl.store(lse + row, tl.where(most == -float("inf"), 0.0, most) + tl.log(total))
    own = tl.load(labels + row) - first
    is_ours = (own >= 0) & (own < num_columns)
    tl.store(at_label + row, tl.load(logits + own, mask=is_ours, other=0.0).to(tl.float32))


@triton.jit
def _gradient(logits, labels, lse, factors, result, first, row_stride, num_columns, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_there = columns < num_columns
    x = tl.load(logits + row * row_stride + columns, mask=is_there, other=0.0).to(tl.float32)
    is_label = columns == tl.load(labels + row) - first
    y = (tl.exp(x - tl.load(lse + row)) - is_label.to(tl.float32)) * tl.load(factors + row)
    tl.store(result + row * num_columns + columns, y, mask=is_there)
