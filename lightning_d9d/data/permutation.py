"""Random orders that take no memory: a sample's place in an epoch is computed when it is needed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import overload

import torch
from torch import Tensor

from lightning_d9d.mesh.seeds import derived
from lightning_d9d.ops.philox import WORD, philox

_ROUNDS = 8
"""Rounds of the network; four are the fewest that look random (Luby and Rackoff, 1988), and small sizes need more."""
_CHUNK = 4096
"""Number of places whose samples are computed together."""


def permuted(places: Tensor, size: int, key: Tensor) -> Tensor:
    """Return the values of a random permutation of `range(size)` at some places. Local; equal on every machine.

    It is a Feistel network on a rectangle of about `size` numbers, whose rounds add words of Philox. Numbers outside of
    the range are permuted again until they are inside (Black and Rogaway, "Ciphers with arbitrary finite domains",
    2002).

    Args:
        places: Integers from 0 to `size - 1`, any shape, int64.
        size: At least 1, at most 2**62.
        key: Key of the permutation: two words below 2**32, int64 `[2]`.
    """
    columns = math.isqrt(size - 1) + 1
    rows = -(-size // columns)
    result = _mixed(places, rows, columns, key)
    while bool((outside := result >= size).any()):
        result[outside] = _mixed(result[outside], rows, columns, key)
    return result


def _mixed(numbers: Tensor, rows: int, columns: int, key: Tensor) -> Tensor:
    row, column = numbers // columns, numbers % columns
    zero = torch.zeros_like(row)
    for number in range(_ROUNDS):
        if number % 2 == 0:
            row = (row + philox((column, zero + number, zero, zero), key)[0]) % rows
        else:
            column = (column + philox((row, zero + number, zero, zero), key)[0]) % columns
    return row * columns + column


class PermutedOrder:
    """Random orders of `range(num_samples)` that take no memory, one for each epoch. Local.

    The sample `i` of epoch `e` has the index `e * num_samples + i`, so that a dataset knows in which epoch it is read.

    Args:
        num_samples: Number of samples of an epoch.
    """

    def __init__(self, num_samples: int) -> None:
        self.description: dict[str, int] = {}
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __call__(self, seed: int, epoch: int) -> PermutedEpoch:
        """Return the samples in the order of an epoch; nothing is computed yet."""
        return PermutedEpoch(self._num_samples, seed, epoch, range(self._num_samples))


class PermutedEpoch(Sequence[int]):
    """The samples of one epoch of a `PermutedOrder`. Slices are of this class, too, and compute nothing.

    Args:
        num_samples: Number of samples of the epoch.
        seed: Seed of the order.
        epoch: Epoch, from 0; each has its own order.
        places: Places of the order that this slice has.
    """

    def __init__(self, num_samples: int, seed: int, epoch: int, places: range) -> None:
        self._about = (num_samples, seed, epoch)
        self._places = places

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> PermutedEpoch: ...
    def __getitem__(self, index: int | slice) -> int | PermutedEpoch:
        if isinstance(index, slice):
            return PermutedEpoch(*self._about, places=self._places[index])
        return self._samples(self._places[index : index + 1 or None])[0]

    def __iter__(self) -> Iterator[int]:
        for start in range(0, len(self), _CHUNK):
            yield from self._samples(self._places[start : start + _CHUNK])

    def _samples(self, places: range) -> list[int]:
        size, seed, epoch = self._about
        number = derived(seed, "order of rows", epoch, bits=64)
        key = torch.tensor([number & WORD, number >> 32])
        places_ = torch.arange(places.start, places.stop, places.step)
        return (epoch * size + permuted(places_, size, key)).tolist()
