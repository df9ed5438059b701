"""The rows of a loader on each data rank, where Lightning chooses them."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning as L
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.overrides.distributed import (
    UnrepeatedDistributedSampler,
    UnrepeatedDistributedSamplerWrapper,
)
from lightning.pytorch.trainer.states import RunningStage
from torch.utils.data import DataLoader, RandomSampler, Sampler, SequentialSampler

from lightning_d9d.loop.patches import Patches

_EVALUATIONS = (RunningStage.VALIDATING, RunningStage.SANITY_CHECKING, RunningStage.TESTING)


def adapt_samplers(patches: Patches, trainer: L.Trainer, num_ranks: int, *, may_differ: bool) -> None:
    """Make validation and test take each row once, in this run. Local.

    Lightning's sampler repeats rows until all data ranks have equally many. Ranks that read the same batches keep their
    samplers.

    Args:
        patches: Those of the run.
        trainer: Trainer of the run.
        num_ranks: Number of data ranks.
        may_differ: Whether data ranks may evaluate different numbers of batches. Otherwise rows are repeated, with a
            warning.
    """
    if trainer.world_size == 1:
        return
    if num_ranks == 1:
        patches.replace(trainer._accelerator_connector, "use_distributed_sampler", False)
        return
    connector = trainer._data_connector
    patches.replace(connector, "_resolve_sampler", partial(_resolve_sampler, connector, num_ranks, may_differ))


def _resolve_sampler(
    connector: Any,
    num_ranks: int,
    may_differ: bool,
    dataloader: DataLoader[Any],
    shuffle: bool,
    mode: RunningStage | None = None,
) -> Sampler[Any]:
    if mode is None or mode not in _EVALUATIONS or not connector._requires_distributed_sampler(dataloader):
        return type(connector)._resolve_sampler(connector, dataloader, shuffle=shuffle, mode=mode)
    sampler: Any = dataloader.sampler
    num_rows = len(sampler)
    if may_differ and num_rows >= num_ranks:
        shuffles = shuffle and not connector.trainer.overfit_batches
        options = {**connector.trainer.distributed_sampler_kwargs, "shuffle": shuffles}
        if isinstance(sampler, RandomSampler | SequentialSampler):
            return UnrepeatedDistributedSampler(dataloader.dataset, **options)
        return UnrepeatedDistributedSamplerWrapper(sampler, **options)
    if num_repeated := -num_rows % num_ranks:
        remedy = (
            f"give at least {num_ranks} rows"
            if may_differ
            else "make it a D9DModule, whose ranks may have different numbers, or evaluate on one rank"
        )
        rank_zero_warn(
            f"{num_repeated} of {num_rows} rows of a {mode.dataloader_prefix}_dataloader are repeated and count twice, "
            f"because the {num_ranks} data ranks of this module need equally many; {remedy}"
        )
    return type(connector)._resolve_sampler(connector, dataloader, shuffle=shuffle, mode=mode)
