"""The places of a run's stages: from the user's schedule, or chosen by `Auto`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch.trainer.states import TrainerFn

from lightning_d9d.errors import ConfigError, printable
from lightning_d9d.loop.display import say
from lightning_d9d.mesh import Axis, MeshDomains
from lightning_d9d.ops.peer_buffers import place_of
from lightning_d9d.parallel import ParallelConfig
from lightning_d9d.parallel.dispatch_choice import DispatchChoice, agreed_dispatch, refusal
from lightning_d9d.parallel.expert import are_units
from lightning_d9d.pipeline.microbatch import MicrobatchCount
from lightning_d9d.schedule import Auto, Choice, Schedule
from lightning_d9d.strategy.auto import CHOICE, saved_choice
from lightning_d9d.strategy.module import D9DModule
from lightning_d9d.strategy.pipeline import Pipeline
from lightning_d9d.strategy.ranks import JobRanks
from lightning_d9d.sync.buckets import GradSyncConfig


def open_groups(ranks: JobRanks, parallel: ParallelConfig) -> None:
    """Make groups while all ranks are here, even for ranks whose stages do not use them. Collective.

    Args:
        ranks: The ranks of the job.
        parallel: The configuration in effect.
    """
    size, mesh = ranks.size, ranks.mesh_of_several
    if mesh is not None and size(Axis.CP) * size(Axis.TP) > 1:
        mesh.group(Axis.DP, Axis.CP, Axis.TP)
        mesh.group(Axis.DP_REPLICATE, Axis.CP_REPLICATE)
    if mesh is not None and size(Axis.EP_SHARD) > 1:
        mesh.group(Axis.EP_SHARD, lane="moe")
        if are_units(mesh, parallel):
            _ = mesh.expert_weights


def with_dtypes(parallel: ParallelConfig, grad_sync: GradSyncConfig, *, autocasts: bool) -> ParallelConfig:
    """Return the configuration with the dtypes that follow from precision and gradient sync.

    Args:
        parallel: The user's configuration, whose dtypes take precedence.
        grad_sync: The dtype of gradients.
        autocasts: Whether fully sharded weights are gathered in the dtype to which autocast would cast them.
    """
    gathered, reduced = parallel.gather_dtype, parallel.reduce_dtype
    if gathered is None and autocasts:
        gathered = "bfloat16"
    if reduced is None and grad_sync.dtype != "auto":
        reduced = grad_sync.dtype
    return replace(parallel, gather_dtype=gathered, reduce_dtype=reduced)


class Staging:
    """This rank's place in the pipeline, and the number of microbatches of a batch.

    Args:
        schedule: The user's schedule; `Auto` chooses one.
        microbatch_size: Rows of a microbatch; None if not given.
        num_microbatches: The number of microbatches; None if not given.
        pipeline_parallel: The degree of the pipeline. In a pipeline a microbatch has one row if neither is given.

    Raises:
        ConfigError: Microbatches are given although `Auto` chooses them.
    """

    def __init__(
        self, schedule: Schedule, microbatch_size: int | None, num_microbatches: int | None, pipeline_parallel: int
    ) -> None:
        is_given = (microbatch_size, num_microbatches) != (None, None)
        if isinstance(schedule, Auto) and is_given:
            raise ConfigError(
                f"microbatch_size={microbatch_size}, num_microbatches={num_microbatches} cannot be set with "
                "schedule=Auto(...), which chooses them; leave both out"
            )
        if not is_given and pipeline_parallel > 1:
            microbatch_size = 1
        self.schedule = schedule
        self.microbatch_count = MicrobatchCount(microbatch_size, num_microbatches)
        self.pipeline: Pipeline | None = None
        self.choice: Choice | None = None
        """The choice of `Auto`, for this run or the one before."""
        self.dispatch: DispatchChoice | None = None
        """The choice of `expert_dispatch="auto"` for this run; None if there is nothing to choose."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Staging:
        """Return this object: groups of ranks belong to one run, and copies of its Trainer share them."""
        return self

    def begin(
        self, mesh: MeshDomains | None, device: torch.device, choose: Callable[[Auto], Choice], *, keeps: bool
    ) -> Pipeline:
        """Return the pipeline of a new run. Collective over all ranks.

        Args:
            mesh: Mesh of several ranks; None for one process.
            device: This process's.
            choose: Chooses a schedule for `Auto`.
            keeps: Whether the module has the stages of an earlier choice, perhaps a checkpoint's, which stays.
        """
        earlier, self.choice = self.choice, None
        if not isinstance(self.schedule, Auto):
            self.pipeline = Pipeline(self.schedule, mesh, device)
            return self.pipeline
        choice = earlier if earlier is not None and keeps else choose(self.schedule)
        return self._take(self.schedule, choice, mesh, device)

    def resume(self, checkpoint: Mapping[str, Any]) -> Pipeline | None:
        """Restore the choice of `Auto` from a checkpoint. Collective over all ranks.

        Returns:
            The pipeline, if it is a different one: the stages must be built again.
        """
        pipeline = self.pipeline
        if self.choice is None or pipeline is None or not isinstance(self.schedule, Auto):
            return None
        saved = saved_choice(checkpoint, pipeline.num_ranks)
        if saved is None or saved == self.choice:
            return None
        rank_zero_info(printable(f"resuming with the schedule of the checkpoint:\n{saved}"))
        return self._take(self.schedule, saved, pipeline.mesh, pipeline.device)

    def choose_dispatch(self, module: L.LightningModule, ranks: JobRanks, parallel: ParallelConfig) -> None:
        """Choose for `expert_dispatch="auto"` how tokens reach experts on other ranks, and log it. Collective.

        Args:
            module: A module that is attached to a Trainer.
            ranks: The ranks of the job, with the groups of experts.
            parallel: The user's configuration.
        """
        self.dispatch = None
        is_free = parallel.expert_dispatch == "auto" and isinstance(module, D9DModule)
        if ranks.mesh_of_several is None or not is_free or ranks.size(Axis.EP_SHARD) == 1:
            return
        trainer: Any = module.trainer
        group = ranks.mesh.group(Axis.EP_SHARD, lane="moe")
        self.dispatch = agreed_dispatch(group, place_of(ranks.device), refusal(parallel))
        if trainer.state.fn == TrainerFn.FITTING:
            say(trainer, str(self.dispatch))

    @property
    def chose_peers(self) -> bool:
        """True if "auto" took peer dispatch, which all-to-all may replace."""
        return self.dispatch is not None and self.dispatch.kind == "peer"

    def in_effect(self, parallel: ParallelConfig) -> ParallelConfig:
        """Return the configuration with the chosen dispatch. Local."""
        return parallel if self.dispatch is None else replace(parallel, expert_dispatch=self.dispatch.kind)

    @property
    def saved(self) -> dict[str, Any]:
        """The entries for a checkpoint."""
        return {} if self.choice is None else {CHOICE: self.choice.to_dict()}

    def close(self) -> None:
        """Forget the pipeline and the dispatch, and remember the choice of `Auto`. Local."""
        self.pipeline = self.dispatch = None

    def _take(self, auto: Auto, choice: Choice, mesh: MeshDomains | None, device: torch.device) -> Pipeline:
        self.choice = choice
        self.microbatch_count = MicrobatchCount(choice.microbatch_size, None, rows_expected=auto.batch_size)
        self.pipeline = Pipeline(choice.schedule, mesh, device, choice.layers_of_stage)
        return self.pipeline
