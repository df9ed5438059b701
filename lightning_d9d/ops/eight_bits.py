"""Optimizer states in eight bits: small floating-point numbers, and an exponent that 32 places of a row share.

[Note: states in eight bits] A block is 32 places in one row of the whole tensor. The block has a *scale* of one byte:
the float32 exponent of the smallest power of two that its codes represent. The largest magnitude in the block
determines the scale. Each place has a *code* of one byte, which counts steps. There are 16 steps for each power of two,
as 4 bits of mantissa have:

    exp_avg       sign and 7 bits: 8 powers of two, from which the smallest is subtracted, so that codes begin at 0
    exp_avg_sq    8 bits: 16 powers of two, of which the smallest is the least value

So a square is never 0 after a step. AdamW divides by its root, so a 0 beside an average that is not 0 would make a step
of any size. Squares below the smallest power of two are raised to it, which makes the step smaller.

Stored values are rounded up or down at random, without bias. If it were rounded to nearest, an average that changes by
a thousandth a step would never leave its code. Codes are upper bits of a float32, so the CPU and CUDA convert them
without rounding of their own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 32
"""Number of places of a row with one scale."""
CUT = 19
"""Number of float32 bits that a code lacks; this many random bits round it."""
LEAST_SQUARE = 2.0**-126
"""The smallest possible `exp_avg_sq`, a normal number."""


class Codes(NamedTuple):
    """A format of codes."""

    room: int
    """Summand for a magnitude's bits: it raises the exponent by one if the top step is below the magnitude."""
    below: int
    """Number of powers of two from the smallest to the largest."""
    most_scale: int
    """The largest scale."""


AVERAGE = Codes(2**23 - 1 - int((15 / 16 - 2**-7) * 2**23), 7, 247)
"""Codes of `exp_avg`."""
SQUARE = Codes(2**19 - 1, 15, 239)
"""Codes of `exp_avg_sq`."""


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the scales of a tensor of one dim or more. Local."""
    return (*shape[:-1], -(-shape[-1] // BLOCK))


def decoded(codes: Tensor, scales: Tensor, kind: Codes) -> Tensor:
    """Return the float32 values of codes; bfloat16 can represent them, too. Local.

    Args:
        codes: Uint8, of any shape of one dim or more.
        scales: Uint8, of the shape that `scale_shape` returns.
        kind: `AVERAGE` or `SQUARE`.
    """
    wide, base = codes.int(), _of_places(scales, codes.shape[-1]) << 23
    if kind is SQUARE:
        return _as_float((wide << CUT) + base)
    magnitudes = _as_float(((wide & 127) << CUT) + base) - _as_float(base)
    return torch.where(wide < 128, magnitudes, -magnitudes)


def encoded(values: Tensor, random: Tensor, kind: Codes) -> tuple[Tensor, Tensor]:
    """Compute codes and scales of values, rounded at random, so that `decoded` returns the values on average. Local.

    Args:
        values: Float32, finite, of one dim or more; for `SQUARE` 0 or more, and values that are too small are raised.
        random: Int64 of the same shape, from 0 to below `2**19`.
        kind: `AVERAGE` or `SQUARE`.

    Returns:
        Uint8, of the shape of the values, and of the shape that `scale_shape` returns.
    """
    columns = values.shape[-1]
    blocks = F.pad(values.abs(), (0, -columns % BLOCK)).unflatten(-1, (-1, BLOCK))
    scales = (((_bits(blocks.amax(-1)) + kind.room) >> 23) - kind.below).clamp(1, kind.most_scale)
    base = _of_places(scales, columns) << 23
    magnitudes = values if kind is SQUARE else values.abs() + _as_float(base)
    codes = (_bits(magnitudes) - base + random.int()).clamp(min=0) >> CUT
    if kind is AVERAGE:
        codes = codes | (_bits(values) >> 24 & 128)
    return codes.to(torch.uint8), scales.to(torch.uint8)


def _of_places(scales: Tensor, columns: int) -> Tensor:
    return scales.int().repeat_interleave(BLOCK, -1)[..., :columns]


def _bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int32)


def _as_float(bits: Tensor) -> Tensor:
    return bits.contiguous().view(torch.float32)
