"""The settings, checks and loaders that data modules of rows of tokens share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import lightning as L
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSampler
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset
from torch.utils.data.distributed import DistributedSampler

from lightning_d9d.data import DataRank
from lightning_d9d.datamodules.batch_size import rows_of_rank
from lightning_d9d.errors import ConfigError
from lightning_d9d.generation.sources import check_tokenizer_path
from lightning_d9d.mesh.agreement import Ranks
from lightning_d9d.strategy.module import D9DModule
from lightning_d9d.strategy.strategy import D9DStrategy

Loader = DataLoader[dict[str, Tensor]]
_Read = TypeVar("_Read")


class RowsDataModule(L.LightningDataModule):
    """The settings that data modules of rows of tokens share, with checks.

    Validation, test and prediction take each held-out row once, on any number of data ranks. For that, a `D9DModule`
    under `D9DStrategy` evaluates different numbers of rows on ranks. In training an incomplete last batch is left out.

    On a GPU batches come from pinned memory, so that the host does not wait for their copies.

    Args:
        sequence_length: Tokens in a row.
        batch_size: Rows in a batch of one data rank; 16 by default.
        global_batch_size: Rows of an optimizer step, on all ranks and in all accumulated batches, in place of
            `batch_size`.
        validation_fraction: Share of the data that is held out, between 0 and 1.
        default_fraction: Share that is used if none is given.
        validation_files: Validation data that replace the share, if any.
        seed: Seed of the order.
        num_workers: Loader processes of each rank; 0 reads in the training process.
        sizes: Further settings, each at least 1.

    Raises:
        ConfigError: A value is out of range, or two settings contradict each other.
    """

    tokenizer: Any = None
    """A directory, a name that `transformers` knows, "bytes", or a tokenizer object; None if it is unknown."""

    def __init__(
        self,
        *,
        sequence_length: int,
        batch_size: int | None,
        global_batch_size: int | None,
        validation_fraction: float | None,
        default_fraction: float = 0.05,
        validation_files: Any = None,
        seed: int,
        num_workers: int,
        **sizes: int,
    ) -> None:
        super().__init__()
        owner = type(self).__name__
        if batch_size is not None and global_batch_size is not None:
            raise ConfigError(
                f"batch_size={batch_size} and global_batch_size={global_batch_size} of {owner} both set the size of "
                "batches; set one"
            )
        sizes |= {"sequence_length": sequence_length}
        given = {"batch_size": batch_size, "global_batch_size": global_batch_size}
        for name, value in (sizes | given).items():
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} of {owner} must be at least 1.")
        if num_workers < 0:
            raise ConfigError(f"num_workers={num_workers} of {owner} must be at least 0.")
        if validation_fraction is not None and validation_files is not None:
            raise ConfigError(
                f"validation_fraction={validation_fraction} and the validation files {validation_files!r} of {owner} "
                "both set the validation data; set one"
            )
        fraction = default_fraction if validation_fraction is None else validation_fraction
        if not 0 < fraction < 1:
            raise ConfigError(
                f"validation_fraction={fraction} of {owner} must be between 0 and 1, e.g. {default_fraction}."
            )
        self.sequence_length = sequence_length
        self.batch_size = 16 if batch_size is None and global_batch_size is None else batch_size
        self.global_batch_size = global_batch_size
        self.validation_fraction = fraction
        self.seed = seed
        self.num_workers = num_workers

    def check_paths(self, *, resumes: bool) -> None:
        """Raise `ConfigError` if the tokenizer is a directory that does not exist. Local."""
        if isinstance(self.tokenizer, str):
            check_tokenizer_path(self.tokenizer)

    def test_dataloader(self) -> Loader:
        """Return `val_dataloader()`."""
        return self.val_dataloader()

    @property
    def rows_of_rank(self) -> int:
        """Rows in a batch of this data rank.

        Raises:
            ConfigError: `global_batch_size` is not divisible by data ranks, accumulation and microbatches.
        """
        if self.global_batch_size is not None:
            return rows_of_rank(self.global_batch_size, self.trainer)
        assert self.batch_size is not None
        return self.batch_size

    @property
    def batch_shape(self) -> tuple[int, int] | None:
        """Rows in a batch of this data rank, and tokens in each row; None if rows may be shorter."""
        return self.rows_of_rank, self.sequence_length

    @property
    def data_rank(self) -> DataRank:
        """The data rank for which this process reads."""
        # Not left to Lightning, whose sampler takes its seed from the job instead of from the data module.
        ranks = self.trainer and self.trainer.distributed_sampler_kwargs
        return DataRank(ranks["rank"], ranks["num_replicas"]) if ranks else DataRank()

    @property
    def _vocab_size(self) -> int | None:
        """The vocabulary of the trained model; None if it does not say."""
        module = self.trainer and self.trainer.lightning_module
        return getattr(getattr(module, "config", None), "vocab_size", None)

    def _held_out_loader(self, dataset: Dataset[dict[str, Tensor]], rows: Sequence[Any]) -> Loader:
        """Make the loader of this data rank's held-out rows; over all ranks each row counts once.

        So ranks may have different numbers of rows. Where the model does not support that, rows are left out with a
        warning.

        Args:
            dataset: The rows.
            rows: The indices that the dataset is asked for, in order. Predictions are numbered by their places in it.
        """
        rank, num_ranks = self.data_rank
        self._check_enough(len(rows), num_ranks, trains=False)
        numbered, num_left_out = Subset(dataset, rows), len(rows) % num_ranks
        if num_left_out == 0 or self._ranks_may_differ:
            return self._loader(numbered, UnrepeatedDistributedSampler(numbered, num_ranks, rank, False), trains=False)
        rank_zero_warn(
            f"{num_left_out} of {len(rows)} held-out rows of {type(self).__name__} are left out, because {num_ranks} "
            "data ranks need equally many; evaluate with a D9DModule under D9DStrategy, or on one data rank"
        )
        return self._loader(
            numbered, DistributedSampler(numbered, num_ranks, rank, False, drop_last=True), trains=False
        )

    @property
    def _ranks_may_differ(self) -> bool:
        """True if data ranks may evaluate different numbers of batches."""
        strategy = self.trainer and self.trainer.strategy
        if not isinstance(strategy, D9DStrategy):
            return False  # forwards may be collective, as with FSDP
        is_aligned = isinstance(self.trainer and self.trainer.lightning_module, D9DModule)
        return is_aligned or not strategy.ranks.needs_equal_batches

    def _check_enough(self, num_rows: int, num_ranks: int, trains: bool) -> None:
        """Check the number of rows.

        Raises:
            ConfigError: There are too few rows: for one batch on every data rank or, in evaluation, for one row.
        """
        rows = self.rows_of_rank
        num_needed = num_ranks * (rows if trains else 1)
        if num_rows < num_needed:
            raise ConfigError(
                f"the {'training' if trains else 'held-out'} data of {type(self).__name__} have {num_rows} rows of "
                f"sequence_length={self.sequence_length}, but {num_needed} are needed (batch_size={rows}, {num_ranks} "
                "data ranks). Give more data, lower sequence_length or the batch size, or change the validation data"
            )

    def _training_loader(self, dataset: Dataset[dict[str, Tensor]], sampler: DistributedSampler[Any]) -> Loader:
        """Make the loader of this data rank's training rows; an incomplete last batch is left out."""
        self._check_enough(len(sampler.dataset), sampler.num_replicas, trains=True)  # type: ignore[arg-type]
        return self._loader(dataset, sampler, trains=True)

    def _loader(self, dataset: Dataset[dict[str, Tensor]], sampler: DistributedSampler[Any], trains: bool) -> Loader:
        is_on_gpu = self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
        return DataLoader(
            dataset,
            batch_size=self.rows_of_rank,  # by its name, as Lightning makes a loader of predictions from this one
            sampler=sampler,
            drop_last=trains,
            num_workers=self.num_workers,
            pin_memory=is_on_gpu,
        )

    @contextmanager
    def _on_all_ranks(self) -> Iterator[None]:
        """Run a block of `setup` that reads data: an error on one rank is raised on all. Collective in a Trainer."""
        ranks = Ranks(alone=self.trainer is None)
        if ranks.alone:
            yield
            return
        with ranks.agreed("data cannot be read"):
            yield

    def _required(self, read: _Read | None) -> _Read:
        """Return the data that `setup` has read."""
        if read is None:
            raise RuntimeError(f"{type(self).__name__} has not read any data yet: call setup() first (a Trainer does).")
        return read
