"""Random orders that take no memory: where a sample stands in an epoch is computed when it is asked for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence, Sized
from typing import Any, overload

import torch
from torch import Tensor
from torch.utils.data.distributed import DistributedSampler

from lightning_d9d.mesh.seeds import derived
from lightning_d9d.ops.philox import WORD, philox

_ROUNDS = 8
"""Rounds of the network; four are the fewest that look random (Luby and Rackoff, 1988), and small sizes need more."""
_CHUNK = 4096
"""Places whose samples are computed together."""


def permuted(places: Tensor, size: int, key: Tensor) -> Tensor:
    """Return what a random permutation of `range(size)` has at some places. Local; equal on every machine.

    It is a Feistel network on a rectangle of about `size` numbers, whose rounds add words of Philox. Numbers outside
    of the range are permuted again until they are inside (Black and Rogaway, "Ciphers with arbitrary finite domains",
    2002).

    Args:
        places: Integers from 0 to `size - 1`, any shape, int64.
        size: At least 1, at most 2**62.
        key: Which permutation, two words below 2**32, int64 `[2]`.
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


class PermutedOrder(Sequence[int]):
    """The samples of one epoch in random order. Slices are orders, too, and compute nothing.

    The sample `i` of epoch `e` has the index `e * num_samples + i`, so that a dataset knows in which epoch it is read.

    Args:
        num_samples: Of an epoch.
        seed: Of the order.
        epoch: From 0; each has its own order.
        places: Which places of the order these are; None for all.
    """

    def __init__(self, num_samples: int, seed: int, epoch: int, places: range | None = None) -> None:
        self._about = (num_samples, seed, epoch)
        self._places = range(num_samples) if places is None else places

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> PermutedOrder: ...
    def __getitem__(self, index: int | slice) -> int | PermutedOrder:
        if isinstance(index, slice):
            return PermutedOrder(*self._about, places=self._places[index])
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


class PermutedSampler(DistributedSampler[Any]):
    """A `DistributedSampler` whose order takes no memory, and whose indices tell the epoch: see `PermutedOrder`.

    Rank `r` of `n` has the places `r`, `r + n`, ... of the order. So the batches of all ranks, each of
    `global_batch_size / n` samples, are the same sets of samples for any `n`. Samples that are left over at the end are
    left out.

    Args:
        dataset: Its length is that of an epoch.
        num_replicas: Data ranks.
        rank: This one.
        seed: Of the order, the same on all ranks.
    """

    def __init__(self, dataset: Sized, num_replicas: int, rank: int, seed: int = 0) -> None:
        super().__init__(dataset, num_replicas, rank, seed=seed, drop_last=True)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[int]:
        order = PermutedOrder(len(self.dataset), self.seed, self.epoch)  # type: ignore[arg-type]
        return iter(share_of_rank(order, self.num_replicas, self.rank))

    def __len__(self) -> int:
        return len(self.dataset) // self.num_replicas  # type: ignore[arg-type]


def share_of_rank(samples: PermutedOrder, num_ranks: int, rank: int) -> PermutedOrder:
    """Return the samples of one of the data ranks. All have as many; what is left over is left out."""
    return samples[: len(samples) // num_ranks * num_ranks][rank::num_ranks]
