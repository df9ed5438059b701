"""How large the batches of a data module are, and which data rank it reads for."""

from __future__ import annotations

import lightning as L

from lightning_d9d.datamodules.batch_size import rows_of_rank
from lightning_d9d.errors import ConfigError


class RowsDataModule(L.LightningDataModule):
    """The settings that data modules of equally long rows share, checked.

    Args:
        sequence_length: Tokens in a row.
        batch_size: Rows in a batch of one data rank; 16 by default.
        global_batch_size: Rows of an optimizer step, on all ranks and in all accumulated batches, in place of
            `batch_size`.
        seed: Of the order.
        num_workers: Loader processes of each rank; 0 reads in the training process.

    Raises:
        ConfigError: A value is out of range, or both sizes are given.
    """

    def __init__(
        self, sequence_length: int, batch_size: int | None, global_batch_size: int | None, seed: int, num_workers: int
    ) -> None:
        super().__init__()
        owner = type(self).__name__
        if batch_size is not None and global_batch_size is not None:
            raise ConfigError(
                f"batch_size={batch_size} and global_batch_size={global_batch_size} of {owner} both say how "
                "large batches are; give one"
            )
        sizes = {"sequence_length": sequence_length, "batch_size": batch_size, "global_batch_size": global_batch_size}
        for name, value in sizes.items():
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} of {owner} must be at least 1.")
        if num_workers < 0:
            raise ConfigError(f"num_workers={num_workers} of {owner} must be at least 0.")
        self.sequence_length = sequence_length
        self.batch_size = 16 if batch_size is None and global_batch_size is None else batch_size
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.num_workers = num_workers

    @property
    def rows_of_rank(self) -> int:
        """Rows in a batch of this data rank.

        Raises:
            ConfigError: The size `global_batch_size` does not divide by data ranks, accumulation and microbatches.
        """
        if self.global_batch_size is not None:
            return rows_of_rank(self.global_batch_size, self.trainer)
        assert self.batch_size is not None
        return self.batch_size

    @property
    def data_rank(self) -> dict[str, int]:
        """The data rank that this process reads for, as `rank`, and how many there are, as `num_replicas`."""
        # Not left to Lightning, whose sampler takes its seed from the job instead of from the data module.
        return (self.trainer and self.trainer.distributed_sampler_kwargs) or {"num_replicas": 1, "rank": 0}
