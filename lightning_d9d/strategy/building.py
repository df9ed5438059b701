"""Builds a run for `D9DStrategy.setup`: the model on its ranks, the alignment of loaders, and the training."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import lightning as L
import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch import nn
from torch.optim import Optimizer

from lightning_d9d.coordination.ahead import BatchPlan
from lightning_d9d.errors import ConfigError
from lightning_d9d.loop.display import describe_run
from lightning_d9d.loop.interrupt import refuse_saves
from lightning_d9d.loop.logger_runs import BeforeLoggers
from lightning_d9d.loop.none_batches import RefuseNoneBatches
from lightning_d9d.loop.patches import Patches
from lightning_d9d.loop.progress import LateProgress
from lightning_d9d.loop.uneven import Alignment, check_lengths
from lightning_d9d.mesh import Axis, MeshDomains
from lightning_d9d.parallel import ParallelConfig
from lightning_d9d.parallel.fsdp import fully_sharded
from lightning_d9d.schedule import Auto, Choice
from lightning_d9d.strategy.auto import choose
from lightning_d9d.strategy.batches import BatchSplitter
from lightning_d9d.strategy.configuration import check_callbacks, check_degrees_of
from lightning_d9d.strategy.context import RunContext
from lightning_d9d.strategy.described import RunSettings
from lightning_d9d.strategy.effects import Beside, check_effects
from lightning_d9d.strategy.eval_step import EvalStep
from lightning_d9d.strategy.fit_memory import FitMemory
from lightning_d9d.strategy.gradient_sync import GradientSync
from lightning_d9d.strategy.module import D9DModule
from lightning_d9d.strategy.offload import move
from lightning_d9d.strategy.optimizer_step import OptimizerStep, check_parameter_groups, check_steps_once
from lightning_d9d.strategy.peer_forwards import PeerForwards
from lightning_d9d.strategy.precision import check_precision
from lightning_d9d.strategy.rank_model import RankModel
from lightning_d9d.strategy.ranks import JobRanks
from lightning_d9d.strategy.setup_memory import SetupMemory
from lightning_d9d.strategy.sharding import check_sharding, is_sharded, prepare_blocks, shard_blocks
from lightning_d9d.strategy.staged_training import StagedTraining
from lightning_d9d.strategy.staging import Staging
from lightning_d9d.strategy.step_in_backward import StepInBackward, check_step_in_backward
from lightning_d9d.strategy.tied import TiedParameters
from lightning_d9d.strategy.torn import TornWeights
from lightning_d9d.strategy.train_step import TrainStep
from lightning_d9d.strategy.training import PlainTraining, Training
from lightning_d9d.sync.buckets import GradSyncConfig


def check_run(
    settings: Mapping[str, object], defaults: Mapping[str, object], beside: Beside, plugin: Precision
) -> None:
    """Refuse a configuration that cannot work, or a part of it without effect. Collective over all ranks.

    Callbacks that implement the hook are notified that loggers begin next.

    Args:
        settings: The values of `D9DStrategy`'s arguments, by name.
        defaults: The default values of the arguments.
        beside: The Trainer.
        plugin: The precision plugin.

    Raises:
        ConfigError: The configuration cannot work, or a part of it has no effect.
    """
    module, trainer = beside.module, beside.module.trainer
    check_degrees_of(module, beside.mesh)
    check_callbacks(trainer.callbacks, beside.mesh)  # type: ignore[attr-defined]
    check_precision(plugin, is_d9d=isinstance(module, D9DModule))
    check_effects(settings, defaults, beside)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, BeforeLoggers):
            callback.before_loggers(trainer)


def check_loader(loader: object, module: L.LightningModule, ranks: JobRanks, *, is_staged: bool) -> None:
    """Refuse a loader without a batch on some rank. Collective over all ranks.

    Lightning would warn and train on nothing, or skip an evaluation on that rank while others wait at its end.

    Args:
        loader: This rank's.
        module: Module attached to the Trainer that will read the loader.
        ranks: The ranks of the job.
        is_staged: Whether the module is a D9DModule.

    Raises:
        ConfigError: The loader has no batch on some rank, but a D9DModule would train on it, or other ranks evaluate on
            it. Raised on every rank.
    """
    trainer = module.trainer
    trains, is_alone = bool(trainer.training), ranks.world_size == 1
    meets_at_end = not (is_alone or trainer.predicting) or ranks.needs_equal_batches
    if is_staged if trains else meets_at_end:
        what = f"{'training ' if trains else ''}{type(loader).__name__} of {type(module).__name__}"
        check_lengths(loader, what, trains, alone=is_alone)


def place_model(
    model: nn.Module, parallel: ParallelConfig, ranks: JobRanks, names: Callable[[], Mapping[nn.Parameter, str]]
) -> RankModel:
    """Move a module to this rank's device, sharded if configured, and make its copies equal. Collective.

    Args:
        model: A D9DModule with its stages, or a plain module.
        parallel: Distribution of its blocks.
        ranks: The ranks of the job.
        names: Return the names of its parameters.
    """
    mesh = ranks.mesh_of_several
    if not isinstance(model, D9DModule):
        prepare_blocks(model, parallel, mesh)
    if mesh is None or isinstance(model, D9DModule) or parallel.shard_blocks is None:
        move(model, ranks.device, offloads=parallel.offload)
    else:
        shard_blocks(model, mesh, parallel, ranks.device)
    if mesh is not None:
        check_sharding(model, mesh, ranks.stage_group, is_staged=isinstance(model, D9DModule))
    shares_batches = ranks.dp_size < ranks.world_size
    return RankModel(model, names, mesh, ranks.stage_group, ranks.data_group if shares_batches else None)


def alignment(
    ranks: JobRanks,
    splitter: BatchSplitter | None,
    run_dummy: Callable[[Any, BatchPlan], None],
    resumes: Callable[[], bool],
    copy_ahead: Callable[[Any], None] | None,
) -> Alignment:
    """Decide how all data ranks get the same number of batches. Collective over the data ranks of a D9DModule.

    A plain module's loaders are read unchanged, with the states that they had before Lightning read ahead.

    Args:
        ranks: The ranks of the job.
        splitter: Splits batches of a D9DModule; None for a plain module.
        run_dummy: As for `Alignment`.
        resumes: Likewise.
        copy_ahead: Likewise.
    """
    needs_equal_batches = splitter is not None and ranks.needs_equal_batches
    counter = (
        None if splitter is None or not needs_equal_batches or splitter.count.is_one else splitter.num_microbatches
    )
    return Alignment(
        group=None if ranks.num_summed == 1 or splitter is None else ranks.mesh.group(Axis.DP, backend="gloo"),
        in_evaluation=needs_equal_batches,
        num_microbatches=counter,
        run_dummy=run_dummy,
        resumes=resumes,
        copy_ahead=copy_ahead,
        replica=ranks.mesh.replica if ranks.num_replicas > 1 else None,
    )


def run_context_of(
    staging: Staging, ranks: JobRanks, settings: Mapping[str, object], parallel: ParallelConfig, precision: Precision
) -> RunContext:
    """Return the facts that a D9DModule needs before it builds its stages. Local.

    Args:
        staging: This rank's place in the pipeline.
        ranks: The ranks of the job.
        settings: The values of `D9DStrategy`'s arguments, by name.
        parallel: The configuration in effect.
        precision: The Trainer's plugin.
    """
    assert staging.pipeline is not None
    device = torch.device("cpu") if parallel.offload else ranks.device
    memory = SetupMemory(settings, parallel, precision, staging.microbatch_count, ranks.device)
    return RunContext.of(staging.pipeline, device, parallel, ranks.seed, memory)


def choose_for(
    module: L.LightningModule, precision: Precision, device: torch.device, settings: RunSettings, auto: Auto
) -> Choice:
    """Choose a schedule for a D9DModule like `auto.choose`, with the future dtype of its weights.

    Collective over all ranks.
    """
    with precision.module_init_context():
        dtype = torch.get_default_dtype()
    computes_in = torch.bfloat16 if isinstance(precision, MixedPrecision) else dtype
    return choose(
        auto, cast(D9DModule, module), settings, dtype, device, computes_in=computes_in
    )  # others were refused


def describe_gradients(mesh: MeshDomains, gradients: GradientSync, trainer: Any, num_tokens: int) -> str:
    """Describe the mesh, and this rank's part of the model and the gradients. Local.

    Args:
        mesh: The mesh of the run.
        gradients: Buckets of this rank's parameters.
        trainer: Trainer that knows how many batches make a step.
        num_tokens: The tokens of a batch on this rank; 0 if it is unknown.
    """
    tied = [each.name for each in gradients.tied.values()]
    sizes = trainer.accumulate_grad_batches, num_tokens, gradients.num_bucket_bytes
    return describe_run(mesh, gradients.parameters, tied, *sizes)


def training_by_hand(grad_sync: GradSyncConfig, device: torch.device) -> Training:
    """Return the training of a plain module whose steps are left to Lightning, for calls outside of a fit. Local."""
    gradients = GradientSync([], {}, TiedParameters(), None, replace(grad_sync, dtype="auto"))
    return PlainTraining(gradients, OptimizerStep(device), 1, skips_nonfinite=False)


@dataclass(frozen=True)
class TrainingParts:
    """The parts from which a fit is built, besides its module and optimizers."""

    patches: Patches
    ranks: JobRanks
    rank_model: RankModel | None
    evaluation: EvalStep | None
    """A D9DModule's."""
    parallel: ParallelConfig
    grad_sync: GradSyncConfig
    precision: Precision
    skips_nonfinite: bool
    torn: TornWeights | None
    """Records whether a step inside the backward has failed; None if steps come after it."""
    may_replace_peers: bool = False
    """True if all-to-all may replace peer dispatch, because "auto" chose it."""

    def training(self, module: L.LightningModule, optimizers: Sequence[Optimizer]) -> Training:
        """Build the training of a module. Local.

        Args:
            module: A D9DModule or a plain one, attached to a Trainer.
            optimizers: The module's.

        Raises:
            ConfigError: An optimizer does not support this kind of step.
        """
        if self.skips_nonfinite and not module.automatic_optimization:
            raise ConfigError(
                f"skip_nonfinite=True: {type(module).__name__} steps its optimizers itself (automatic_optimization is "
                "False); check the gradients there"
            )
        for optimizer in optimizers:
            if self.skips_nonfinite or isinstance(module, D9DModule):
                check_steps_once(optimizer)
            check_parameter_groups(optimizer)
        steps = OptimizerStep(self.ranks.device)
        if isinstance(module, D9DModule):
            return self._staged(module, steps, optimizers)
        summed_by_module = fully_sharded(module) if is_sharded(module) else None
        gradients = self._gradients({}, summed_by_module=summed_by_module)
        training = PlainTraining(gradients, steps, self.ranks.num_summed, skips_nonfinite=self.skips_nonfinite)
        training.memory = self._memory(module, optimizers, gradients)
        return training

    def _staged(self, module: D9DModule, steps: OptimizerStep, optimizers: Sequence[Optimizer]) -> StagedTraining:
        assert self.evaluation is not None
        if self.ranks.world_size == 1:
            self.patches.insert_callback(RefuseNoneBatches())
        stages, splitter = module.indexed_stages, self.evaluation.splitter
        keeps = self.parallel.keeps_gathered(
            num_stages=self.ranks.size(Axis.PP), is_one_microbatch=splitter.count.is_one
        )
        in_backward = None
        if self.torn is not None:
            self.torn.open(functools.partial(refuse_saves, self.patches, module.trainer))
            in_backward = StepInBackward(optimizers[0], steps, self.torn, self.grad_sync.bucket_bytes)
        gradients = self._gradients(stages, keeps_gathered=keeps, in_backward=in_backward)
        offloads, skips = self.parallel.offload, self.skips_nonfinite
        check = functools.partial(
            check_step_in_backward, module, optimizers, self.precision, offloads=offloads, skips=skips
        )
        memory = self._memory(module, optimizers, gradients, check_in_backward=check, keeps_gathered=keeps)
        executor = module.pipeline.executor(
            module,
            stages,
            self.precision.forward_context,
            overlaps_pairs=self.parallel.overlap_pairs,
            again=self._peers(module, memory),
        )
        train_step = TrainStep(
            module,
            executor,
            splitter,
            gradients,
            steps,
            self.evaluation.sequences,
            memory,
            in_backward,
        )
        progress = None if self.ranks.device.type == "cpu" else LateProgress(self.patches, module.trainer)
        training = StagedTraining(train_step, progress, skips_nonfinite=skips, check_in_backward=check)
        training.memory = memory
        return training

    def _peers(self, module: D9DModule, memory: FitMemory) -> PeerForwards | None:
        if self.parallel.expert_dispatch != "peer":
            return None
        group, is_optional = self.ranks.stage_group, self.may_replace_peers
        return PeerForwards(module, self.ranks.device, group, memory.lacking, is_optional=is_optional)

    def _memory(
        self, module: L.LightningModule, optimizers: Sequence[Optimizer], gradients: GradientSync, **options: Any
    ) -> FitMemory:
        autocasts = isinstance(self.precision, MixedPrecision)
        return FitMemory(
            module,
            optimizers,
            gradients,
            self.parallel,
            self.ranks.device,
            grad_sync=self.grad_sync,
            steps_in_backward=self.torn is not None,
            activation_dtype=torch.bfloat16 if autocasts else self.parallel.dtypes[0],
            may_replace_peers=self.may_replace_peers,
            **options,
        )

    def _gradients(self, stages: Mapping[int, nn.Module], **options: Any) -> GradientSync:
        assert self.rank_model is not None
        model = self.rank_model
        parameters, mesh = list(model.model.parameters()), self.ranks.mesh_of_several
        reduced = self.parallel.dtypes[1]
        return GradientSync(parameters, stages, model.tied, mesh, self.grad_sync, reduce_dtype=reduced, **options)
