"""A sampler that distributes an epoch's order of rows over data ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from torch.utils.data.distributed import DistributedSampler


class EpochOrder(Protocol):
    """The order in which an epoch reads rows, over all data ranks."""

    description: dict[str, int]
    """The numbers that determine the order, besides seed, epoch and the samples."""

    def __len__(self) -> int:
        """Return the number of rows, equal in all epochs."""
        ...

    def __call__(self, seed: int, epoch: int) -> Sequence[Any]:
        """Return the indices that a dataset is asked for, row by row."""
        ...


class EpochSampler(DistributedSampler[Any]):
    """Gives each data rank every `num_replicas`-th row of an order that seed and epoch determine. Local.

    So the batches of all ranks, each of `global_batch_size / num_replicas` rows, are the same sets of rows for any
    number of ranks. All ranks have equally many rows; the rows that remain at the end are left out. Under `D9DStrategy`
    a loader with this sampler resumes in the middle of an epoch, also on another number of data ranks.

    Args:
        order: The rows of each epoch: `PermutedOrder`, `PackedOrder`, `GroupedOrder`, or one of your own.
        num_replicas: Data ranks.
        rank: The data rank that reads.
        seed: Seed of the order, the same on all ranks.
        shuffle: Whether each epoch has its own order. If False, all epochs have the order of epoch 0.
    """

    def __init__(self, order: EpochOrder, num_replicas: int, rank: int, seed: int = 0, shuffle: bool = True) -> None:
        super().__init__(order, num_replicas, rank, shuffle, seed, drop_last=True)  # type: ignore[arg-type]
        self.order = order

    def __iter__(self) -> Iterator[Any]:
        rows = self.order(self.seed, self.epoch if self.shuffle else 0)
        return iter(rows[: self.num_replicas * len(self)][self.rank :: self.num_replicas])

    def __len__(self) -> int:
        return len(self.order) // self.num_replicas
