"""Defines normal values that follow from a key and from an element's place in a whole tensor, one by one.

[Note: values by place] Element `i` of a tensor in row-major order has word `i` of a Philox stream. Kernels and NumPy's
C code compute the same 64 random bits. The value is a sum of integers, times one float32 number:

    word % 2**16  +  word // 2**16 % 2**16  +  2**16 * (number of ones in the upper 32 bits)  -  mean of these

The number of ones is binomial, and two uniform pieces fill the gaps between its steps. The sum is exact, in 22 bits, so
one product rounds, and another rounding casts it. Neither a logarithm nor a sum of floats can differ between devices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

ROUNDS = 10
"""Rounds of Philox4x64, as in NumPy."""
FACTORS = 0xD2E7470EE14C6C93, 0xCA5A826395121157
STEPS = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B
"""Added to the key's words after each round."""
MEAN = 16 * 2**16 + 2**16 - 1
"""Sum of a word's pieces on average."""
VARIANCE = 8 * 2**32 + (2**32 - 1) / 6
"""Variance of the sum: 32 coins weigh `2**16` each, and each of two pieces has `2**16` values."""
WORD = 2**64 - 1
"""The largest word, which as a mask keeps the lower 64 bits."""


class Runs(NamedTuple):
    """Places in a whole tensor: `num_runs` runs of `length`, whose first places are `stride` apart."""

    first: int
    stride: int
    length: int
    num_runs: int


def runs_of(shape: Sequence[int], ranges: Sequence[range]) -> Iterator[Runs]:
    """List the places of a slice that is not empty, in its own row-major order, in the longest possible runs."""
    dims: list[tuple[int, int]] = []  # size and stride, the outermost first
    first, stride = 0, 1
    for size, held in zip(reversed(shape), reversed(ranges), strict=True):
        first += held.start * stride
        if dims and math.prod(dims[0]) == stride:
            dims[0] = len(held) * dims[0][0], dims[0][1]
        elif len(held) > 1:
            dims.insert(0, (len(held), stride))
        stride *= size
    if not dims or dims[-1][1] != 1:
        dims.append((1, 1))
    *outer, (count, stride), (length, _) = [(1, 0), *dims]
    for place in itertools.product(*(range(size) for size, _ in outer)):
        yield Runs(first + sum(i * s for i, (_, s) in zip(place, outer, strict=True)), stride, length, count)


def scale_of(std: float) -> float:
    """Return the float32 number that the integers are multiplied by."""
    return float(np.float32(std / math.sqrt(VARIANCE)))


def normal_reference(places: Sequence[int], std: float, key: int) -> Tensor:
    """Compute the float32 values at these places of a whole tensor one by one: the definition of `fill_normal_`."""
    values = []
    for place in places:
        word = word_of(place, key)
        total = word % 2**16 + (word >> 16) % 2**16 + 2**16 * (word >> 32).bit_count() - MEAN
        values.append(np.float32(total) * np.float32(scale_of(std)))
    return torch.tensor(values, dtype=torch.float32)


def word_of(place: int, key: int) -> int:
    """Compute a word of Philox4x64, which makes four (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3")."""
    c0, c1, c2, c3 = place // 4 + 1, 0, 0, 0  # NumPy counts on before it makes words
    k0, k1 = key & WORD, key >> 64
    for _ in range(ROUNDS):
        p0, p2 = c0 * FACTORS[0], c2 * FACTORS[1]
        c0, c1, c2, c3 = p2 >> 64 ^ c1 ^ k0, p2 & WORD, p0 >> 64 ^ c3 ^ k1, p0 & WORD
        k0, k1 = k0 + STEPS[0] & WORD, k1 + STEPS[1] & WORD
    return (c0, c1, c2, c3)[place % 4]
