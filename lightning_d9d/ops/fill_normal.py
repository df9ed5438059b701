"""Normal values by place, computed by threads of the host or by a kernel of the device."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_d9d.errors import ConfigError
from lightning_d9d.ops.backend import runs_triton
from lightning_d9d.ops.places import MEAN, Runs, runs_of, scale_of

_ON_HOST = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
"""Dtypes that threads write; torch casts to other dtypes."""
_CHUNK = 2**17
"""Number of values that a thread computes at a time: 1 MB of words, and few calls that need Python's lock."""
_GAP = 1024
"""Length of a gap, in words, that takes about as long to compute as to skip."""


def fill_normal_(target: Tensor, std: float, key: int, shape: Sequence[int], ranges: Sequence[range]) -> Tensor:
    """Fill a slice of a whole tensor with normal values of mean zero. Local.

    The bits are the same on every device and for every slice; `ops/places.py` says why. In other dtypes they are the
    float32 values, rounded to nearest. On CUDA a kernel writes them; for float64 and on other devices, threads of the
    host compute them. The page docs/explanation/initial-weights.md describes their difference from a true normal
    distribution.

    Args:
        target: This rank's slice, in any floating dtype; overwritten.
        std: standard deviation.
        key: 128 bits, which determine all values.
        shape: Shape of the whole tensor.
        ranges: Indices of the slice in each dim.

    Returns:
        `target`.

    Raises:
        ConfigError: The dtype is not a floating one, or the standard deviation is negative or not finite.
    """
    if not target.is_floating_point() or not 0 <= std < math.inf:
        raise ConfigError(
            f"normal values need a floating dtype and a finite std of at least 0, not {target.dtype} and std={std}"
        )
    assert tuple(target.shape) == tuple(map(len, ranges)), "a slice has the sizes of its ranges"
    if target.numel() == 0:
        return target
    on_device = runs_triton(target)
    in_place = target.is_contiguous() and (on_device or (target.device.type == "cpu" and target.dtype in _ON_HOST))
    device = target.device if on_device else torch.device("cpu")
    dtype = target.dtype if target.dtype in _ON_HOST else torch.float32
    whole = target.detach() if in_place else torch.empty(target.shape, dtype=dtype, device=device)
    start = 0
    for runs in runs_of(shape, ranges):
        part = whole.view(-1)[start : start + runs.num_runs * runs.length]
        start += part.numel()
        _fill(part, scale_of(std), key, runs, on_device)
    if not in_place:
        target.detach().copy_(whole)
    return target


def _fill(part: Tensor, scale: float, key: int, runs: Runs, on_device: bool) -> None:
    if not on_device:
        _fill_on_host(part, scale, key, runs)
        return
    from lightning_d9d.ops.kernels import fill_normal as kernels

    kernels.fill_normal(part, scale, key, runs)


def _fill_on_host(target: Tensor, scale: float, key: int, runs: Runs) -> None:
    """Fill a contiguous tensor of the host, in threads that share no data."""
    is_bfloat16 = target.dtype == torch.bfloat16
    rows = (target.view(torch.int16) if is_bfloat16 else target).view(runs.num_runs, runs.length).numpy()
    width = runs.stride if runs.stride - runs.length <= _GAP else runs.length
    height = max(1, _CHUNK // max(1, width))

    def fill(corner: tuple[int, int]) -> None:
        part = rows[corner[0] : corner[0] + height, corner[1] : corner[1] + _CHUNK]
        first = runs.first + corner[0] * runs.stride + corner[1]
        values = _values(words_of(key, Runs(first, runs.stride, part.shape[1], part.shape[0])), scale)
        part[...] = _rounded_to_bfloat16(values) if is_bfloat16 else values

    corners = itertools.product(range(0, runs.num_runs, height), range(0, runs.length, _CHUNK))
    if target.numel() <= _CHUNK:
        for corner in corners:
            fill(corner)
        return
    with ThreadPoolExecutor(num_threads()) as pool:
        for _ in pool.map(fill, corners):
            pass


def num_threads() -> int:
    """Return the number of cores for this process: those it may use, at most its share of its node's."""
    cores = os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    return max(1, min(allowed, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def words_of(key: int, runs: Runs) -> NDArray[np.uint64]:
    """Compute the random words at these places, shape `[num_runs, length]`. Python's lock is released meanwhile."""
    generator = np.random.Philox(key=key, counter=runs.first // 4)
    if runs.num_runs == 1 or runs.stride - runs.length <= _GAP:
        skipped = runs.first % 4
        words = generator.random_raw(skipped + (runs.num_runs - 1) * runs.stride + runs.length)[skipped:]
        return np.lib.stride_tricks.as_strided(words, (runs.num_runs, runs.length), (8 * runs.stride, 8))
    words = np.empty((runs.num_runs, runs.length), np.uint64)
    at = runs.first // 4
    for row, place in zip(words, itertools.count(runs.first, runs.stride), strict=False):
        generator.advance(place // 4 - at)
        drawn = generator.random_raw(place % 4 + runs.length)
        row[:] = drawn[place % 4 :]
        at = place // 4 + (len(drawn) + 3) // 4
    return words


def _values(words: NDArray[np.uint64], scale: float) -> NDArray[np.float32]:
    """Convert words, whose lower halves come first in memory, to float32 values."""
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
    """Round finite values to the nearest bfloat16, the even one of two, as bits. The values are overwritten."""
    bits = values.view(np.uint32)
    bits += 0x7FFF + (bits >> 16 & 1)
    return bits.view(np.int16)[:, 1::2]
