"""A sampler that deals out an epoch's order of rows to data ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data.distributed import DistributedSampler

from lightning_d9d.data.packing import EpochOrder


class EpochSampler(DistributedSampler[Any]):
    """Gives each data rank every `num_replicas`-th row of an order that follows from seed and epoch. Local.

    All ranks have as many rows; those that are left over at the end are left out. Under `D9DStrategy` a loader with
    this sampler goes on in the middle of an epoch, also on another number of data ranks.

    Args:
        order: The samples of each row, for each epoch.
        num_replicas: Data ranks.
        rank: Of these, the one that reads.
        seed: Seed of the order.
        shuffle: Whether each epoch has its own order. Otherwise all have that of epoch 0.
    """

    def __init__(self, order: EpochOrder, num_replicas: int, rank: int, seed: int, shuffle: bool = True) -> None:
        super().__init__(order, num_replicas, rank, shuffle, seed, drop_last=True)  # type: ignore[arg-type]
        self.order = order

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        rows = self.order(self.seed, self.epoch if self.shuffle else 0)
        return iter(rows[self.rank : self.num_replicas * self.num_samples : self.num_replicas])
