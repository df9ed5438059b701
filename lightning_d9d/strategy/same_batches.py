"""Checks that ranks which share batches read the same ones."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from lightning_d9d.errors import ConfigError
from lightning_d9d.mesh.collectives import all_gather_object, digest
from lightning_d9d.pipeline.trees import take_apart


class SameBatches:
    """Compares the first batch of each kind over the ranks that must read the same.

    Args:
        readers: These ranks; None if there is only one.
    """

    def __init__(self, readers: dist.ProcessGroup | None) -> None:
        self.readers = readers
        self._compared: set[str] = set()

    def check(self, kind: str, batch: Any) -> None:
        """Compare hashes, if this is the first batch of its kind. Collective over the readers.

        Args:
            kind: Kind of the batch: "train", "val", ...
            batch: This rank's.

        Raises:
            ConfigError: The batches differ; raised on all of these ranks.
        """
        if self.readers is None or kind in self._compared:
            return
        self._compared.add(kind)
        if len(set(all_gather_object(digest(take_apart(batch)[0]), self.readers))) > 1:
            raise ConfigError(
                f"rank {dist.get_rank()}: ranks {dist.get_process_group_ranks(self.readers)} read different first "
                f"{kind} batches, but each runs a part of the same one. Make data depend only on the data-parallel "
                "rank (strategy.distributed_sampler_kwargs), and use the same seed for shuffling on all ranks"
            )
