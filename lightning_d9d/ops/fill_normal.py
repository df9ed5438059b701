"""Normal values that follow from a key and from where an element lies in a whole tensor, and from nothing else.

[Note: values by place] Element `i` of a tensor in row-major order has word `i` of a Philox stream: 64 random bits, which
kernels and NumPy's C code make alike. The value is a sum of integers, times one float32 number:

    word % 2**16  +  word // 2**16 % 2**16  +  2**16 * (number of ones in the upper 32 bits)  -  mean of these

The number of ones is binomial, and two uniform pieces fill the gaps between its steps. The sum is exact, in 22 bits, so
one product rounds, and another when it is cast. Neither a logarithm nor a sum of floats can differ between devices.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_d9d.errors import ConfigError
from lightning_d9d.ops.backend import runs_triton

ROUNDS = 10
"""Rounds of Philox4x64, as NumPy has them."""
FACTORS = 0xD2E7470EE14C6C93, 0xCA5A826395121157
STEPS = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B
"""What is added to the key's words after each round."""
MEAN = 16 * 2**16 + 2**16 - 1
"""What the pieces of a word sum up to on average."""
VARIANCE = 8 * 2**32 + (2**32 - 1) / 6
"""32 coins weigh `2**16` each, and each of two pieces has `2**16` values."""
_WORD = 2**64 - 1
_CHUNK = 2**17
"""Values that a thread makes at a time: 1 MB of words, and few calls that need Python's lock."""
_GAP = 512
"""Words between two runs that are made in less time than it takes to skip them."""


class Runs(NamedTuple):
    """Places in a whole tensor: `count` runs of `length`, whose first places are `stride` apart."""

    first: int
    stride: int
    length: int
    count: int


def fill_normal_(target: Tensor, std: float, key: int, shape: Sequence[int], ranges: Sequence[range]) -> Tensor:
    """Fills a slice of a whole tensor with normal values of mean zero. Local.

    The same bits on every device, whatever the slice: [Note: values by place]. In dtypes other than float32 they are
    the float32 values, rounded to the nearest. On CUDA a kernel writes them; for float64 and other devices threads of
    the host make them. How far they are from a true normal: docs/explanation/initial-weights.md.

    Args:
        target: what this rank holds, in any floating dtype; overwritten.
        std: standard deviation.
        key: 128 bits, from which all values follow.
        shape: of the whole tensor.
        ranges: for each dim the indices that the slice has.

    Returns:
        `target`.

    Raises:
        ConfigError: The dtype has no fractions, or the standard deviation is negative or not finite.
    """
    if not target.is_floating_point() or not 0 <= std < math.inf:
        raise ConfigError(
            f"normal values need a floating dtype and a finite std of at least 0, not {target.dtype} and std={std}"
        )
    assert tuple(target.shape) == tuple(map(len, ranges)), "a slice has the sizes of its ranges"
    if target.numel() == 0:
        return target
    scale = _scale(std)
    on_device = runs_triton(target)
    flat = target.detach().view(-1) if target.is_contiguous() and (on_device or target.device.type == "cpu") else None
    filled = torch.empty(target.numel(), dtype=target.dtype, device=target.device if on_device else "cpu")
    filled = filled if flat is None else flat
    start = 0
    for runs in runs_of(shape, ranges):
        part = filled[start : start + runs.count * runs.length]
        start += runs.count * runs.length
        if on_device:
            from lightning_d9d.ops.kernels import fill_normal as kernels

            kernels.fill_normal(part, scale, key, runs)
        else:
            _fill_on_host(part, scale, key, runs)
    if flat is None:
        target.detach().copy_(filled.view(target.shape))
    return target


def fill_normal_reference(places: Sequence[int], std: float, key: int) -> Tensor:
    """The float32 values at these places of a whole tensor, one after the other: what `fill_normal_` means."""
    values = []
    for place in places:
        word = _word(place, key)
        total = word % 2**16 + (word >> 16) % 2**16 + 2**16 * (word >> 32).bit_count() - MEAN
        values.append(np.float32(total) * np.float32(_scale(std)))
    return torch.tensor(values, dtype=torch.float32)


def _word(place: int, key: int) -> int:
    """One of the four words of a call of Philox4x64 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3")."""
    c0, c1, c2, c3 = place // 4 + 1, 0, 0, 0  # NumPy counts on before it makes words
    k0, k1 = key & _WORD, key >> 64
    for _ in range(ROUNDS):
        p0, p2 = c0 * FACTORS[0], c2 * FACTORS[1]
        c0, c1, c2, c3 = p2 >> 64 ^ c1 ^ k0, p2 & _WORD, p0 >> 64 ^ c3 ^ k1, p0 & _WORD
        k0, k1 = k0 + STEPS[0] & _WORD, k1 + STEPS[1] & _WORD
    return (c0, c1, c2, c3)[place % 4]


def runs_of(shape: Sequence[int], ranges: Sequence[range]) -> Iterator[Runs]:
    """The places of a slice that has elements, in its own row-major order; runs are as long as they can be."""
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


def _scale(std: float) -> float:
    """The float32 number that the integers are multiplied by."""
    return float(np.float32(std / math.sqrt(VARIANCE)))


def _fill_on_host(target: Tensor, scale: float, key: int, runs: Runs) -> None:
    """In threads, which share nothing; `target` is contiguous."""
    is_bfloat16 = target.dtype == torch.bfloat16
    rows = (target.view(torch.int16) if is_bfloat16 else target).view(runs.count, runs.length).numpy()
    width = runs.stride if runs.stride - runs.length <= _GAP else runs.length
    height = max(1, _CHUNK // max(1, width))

    def fill(corner: tuple[int, int]) -> None:
        part = rows[corner[0] : corner[0] + height, corner[1] : corner[1] + _CHUNK]
        first = runs.first + corner[0] * runs.stride + corner[1]
        values = _values(words_of(key, Runs(first, runs.stride, part.shape[1], part.shape[0])), scale)
        part[...] = _rounded_to_bfloat16(values) if is_bfloat16 else values

    corners = itertools.product(range(0, runs.count, height), range(0, runs.length, _CHUNK))
    if target.numel() <= _CHUNK:
        for corner in corners:
            fill(corner)
        return
    with ThreadPoolExecutor(num_threads()) as pool:
        for _ in pool.map(fill, corners):
            pass


def num_threads() -> int:
    """Cores for this process: those it may use, unless its node's ranks have fewer each."""
    cores = os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    return max(1, min(allowed, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def words_of(key: int, runs: Runs) -> NDArray[np.uint64]:
    """The random words at these places, shape `[count, length]`. Python's lock is free meanwhile."""
    generator = np.random.Philox(key=key, counter=runs.first // 4)
    if runs.count == 1 or runs.stride - runs.length <= _GAP:
        skipped = runs.first % 4
        words = generator.random_raw(skipped + (runs.count - 1) * runs.stride + runs.length)[skipped:]
        return np.lib.stride_tricks.as_strided(words, (runs.count, runs.length), (8 * runs.stride, 8))
    words = np.empty((runs.count, runs.length), np.uint64)
    at = runs.first // 4
    for row, place in zip(words, itertools.count(runs.first, runs.stride), strict=False):
        generator.advance(place // 4 - at)
        drawn = generator.random_raw(place % 4 + runs.length)
        row[:] = drawn[place % 4 :]
        at = place // 4 + (len(drawn) + 3) // 4
    return words


def _values(words: NDArray[np.uint64], scale: float) -> NDArray[np.float32]:
    """The float32 values of words, whose lower halves come first in memory."""
    pieces = words.view(np.uint16)
    total = np.bitwise_count(words.view(np.uint32)[:, 1::2]).astype(np.int32)
    total <<= 16
    total += pieces[:, 0::4]
    total += pieces[:, 1::4]
    total -= MEAN
    values = total.astype(np.float32)
    values *= np.float32(scale)
    return values


def _rounded_to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.int16]:
    """The bits of the nearest bfloat16, the even one of two, of finite values."""
    bits = values.view(np.uint32)
    bits += 0x7FFF + (bits >> 16 & 1)
    return bits.view(np.int16)[:, 1::2]
