"""`D9DStrategy`: the hooks that Lightning calls, each short. The step itself is in `train_step.py`.

A hook calls parts with one owner each. `ranks` describes the ranks, and `staging` the places of the stages.
`_checkpoints` saves, loads and knows the place in the data. `_rank_model` synchronises copies. `_training` and
`_evaluation` run batches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import lightning as L
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_d9d.coordination.ahead import BatchPlan
from lightning_d9d.errors import ConfigError, RankError
from lightning_d9d.loop.display import adapt_display, resume_bar, say, silence, silence_hooks
from lightning_d9d.loop.interrupt import Interruption, set_exit_code
from lightning_d9d.loop.launch import check_number_of_ranks, ending_with_launcher
from lightning_d9d.loop.patches import Patches
from lightning_d9d.loop.samplers import adapt_samplers
from lightning_d9d.loop.shutdown import Shutdown, end_children_at_exit, tell_end
from lightning_d9d.loop.uneven import align_loaders, begin_evaluation_step, plan_of
from lightning_d9d.mesh import MeshConfig
from lightning_d9d.mixing import ReplicaMixing, Topology
from lightning_d9d.ops.backend import using_kernels
from lightning_d9d.ops.grouped_gemm import using_grouped_gemm
from lightning_d9d.parallel import ParallelConfig
from lightning_d9d.pipeline.executor import Executor
from lightning_d9d.pipeline.microbatch import MicrobatchCount, num_tokens
from lightning_d9d.schedule import Schedule, resolve_schedule
from lightning_d9d.strategy.batches import BatchSplitter
from lightning_d9d.strategy.building import (
    TrainingParts,
    alignment,
    check_loader,
    check_run,
    choose_for,
    describe_gradients,
    place_model,
    run_context_of,
    training_by_hand,
)
from lightning_d9d.strategy.checkpoints import Checkpoints
from lightning_d9d.strategy.configuration import (
    check_before_joining,
    check_classes,
    check_equal_configuration,
    check_module,
)
from lightning_d9d.strategy.described import RunSettings
from lightning_d9d.strategy.effects import Beside
from lightning_d9d.strategy.eval_step import EvalStep
from lightning_d9d.strategy.loading import load_pretrained
from lightning_d9d.strategy.module import D9DModule
from lightning_d9d.strategy.offload import move
from lightning_d9d.strategy.optimizer_step import OptimizerStep, may_defer_scaling
from lightning_d9d.strategy.pipeline import Pipeline
from lightning_d9d.strategy.precision import check_precision, clip_by, step_context
from lightning_d9d.strategy.rank_model import RankModel
from lightning_d9d.strategy.ranks import JobRanks, TimeoutConfig
from lightning_d9d.strategy.run_state import RunState
from lightning_d9d.strategy.save_hooks import SaveHooks
from lightning_d9d.strategy.saving import CheckpointConfig
from lightning_d9d.strategy.sequence_check import SequenceCheck
from lightning_d9d.strategy.sharding import is_sharded
from lightning_d9d.strategy.staging import Staging, open_groups, with_dtypes
from lightning_d9d.strategy.training import BatchSettings, Training
from lightning_d9d.sync.buckets import GradSyncConfig
from lightning_d9d.sync.norm import clip_gradients_by_value


class D9DStrategy(SaveHooks):
    """Trains any LightningModule as data-parallel replicas, and a `D9DModule` microbatch by microbatch.

    `D9DStrategy()` runs in one process without a process group (a notebook, say), or in as many as the Trainer has
    devices, each with a replica. Plain LightningModules keep Lightning's own order of hooks and get the results of
    DistributedDataParallel: gradients are means over ranks.

    Args:
        mesh: Parallel degrees; by default every rank is a replica. Degrees of pipelines and contexts are for
            D9DModules; plain modules implement the others in `configure_model`.
        schedule: Order of forwards and backwards of a D9DModule's microbatches, and the places of its stages. It is
            "1f1b" (default), another name of `lightning_d9d.schedule.SCHEDULES`, or an object of a class of
            `lightning_d9d.schedule` or your own. `Auto` chooses a schedule, with microbatches and stages.
        microbatch_size: Rows of a microbatch. By default 1 in a pipeline, otherwise a batch is one microbatch.
        num_microbatches: The number of microbatches instead.
        parallel: How the stages of a D9DModule are spread over ranks: when to reshard fully sharded weights, what to
            recompute, and more.
        grad_sync: Dtype and size of the gradient buckets.
        checkpoint: Whether checkpoints are files or directories.
        timeouts: Limits for collectives and for stopping.
        skip_nonfinite: Skip optimizer steps in which the norm of all gradients is not finite, on all ranks together;
            their number is logged as `skipped_steps`. Optimizers other than torch's fused ones then cost a host sync in
            each step. It needs automatic optimization.
        step_in_backward: Update parameters of a D9DModule during its backward, as soon as their gradients are complete,
            and free the gradients. See [Save memory](../how-to/save-memory.md).
        replicate_sync: "all_reduce" sums gradients over the replicas of `MeshConfig.data_parallel_replicate`. Otherwise
            replicas mix their weights with peers, for slow links between them. Then it is a name of
            `lightning_d9d.mixing.TOPOLOGIES`, a `Topology` of your own, or a `ReplicaMixing`.
        process_group_backend: "gloo", "nccl", ...; by default the one for the device.
    """

    strategy_name = "d9d"
    shared_by_copies = (*SaveHooks.shared_by_copies, "_evaluation", "_optimizer_step", "_kernels")

    def __init__(
        self,
        *,
        mesh: MeshConfig | None = None,
        schedule: str | Schedule | None = None,
        microbatch_size: int | None = None,
        num_microbatches: int | None = None,
        parallel: ParallelConfig = ParallelConfig(),
        grad_sync: GradSyncConfig = GradSyncConfig(),
        checkpoint: CheckpointConfig = CheckpointConfig(),
        timeouts: TimeoutConfig = TimeoutConfig(),
        skip_nonfinite: bool = False,
        step_in_backward: bool = False,
        replicate_sync: str | Topology | ReplicaMixing = "all_reduce",
        process_group_backend: str | None = None,
    ) -> None:
        mesh = MeshConfig(data_parallel_replicate=-1) if mesh is None else mesh
        check_classes(mesh=(mesh, MeshConfig), parallel=(parallel, ParallelConfig))
        check_classes(grad_sync=(grad_sync, GradSyncConfig), checkpoint=(checkpoint, CheckpointConfig))
        check_classes(timeouts=(timeouts, TimeoutConfig))
        mixing = ReplicaMixing.of(replicate_sync)
        ranks = JobRanks(mesh, timeouts, process_group_backend, apart=mixing is not None)
        super().__init__(ranks, mixing, Checkpoints(checkpoint, ranks, may_tear=step_in_backward))
        silence()
        self.parallel = parallel
        self.grad_sync = grad_sync
        self.checkpoint_config = checkpoint
        self.skip_nonfinite = skip_nonfinite
        self.step_in_backward = step_in_backward
        self.staging = Staging(resolve_schedule(schedule), microbatch_size, num_microbatches, mesh.pipeline_parallel)
        self._rank_model: RankModel | None = None
        self._training: Training | None = None
        self._evaluation: EvalStep | None = None
        self._optimizer_step: OptimizerStep | None = None
        self.shutdown: Shutdown | None = None
        self._interruption: Interruption | None = None
        self._patches: Patches | None = None
        self._kernels = ExitStack()

    def settings(self) -> dict[str, object]:
        """Return the values on which ranks must agree, by the names of arguments."""
        return {
            "mesh": self.mesh_config,
            "schedule": (type(self.schedule).__name__, vars(self.schedule)),
            "microbatch_size": self.microbatch_count.microbatch_size,
            "num_microbatches": self.microbatch_count.num_microbatches,
            "parallel": self.parallel,
            "grad_sync": self.grad_sync,
            "checkpoint": self.checkpoint_config,
            "timeouts": self.timeouts,
            "skip_nonfinite": self.skip_nonfinite,
            "step_in_backward": self.step_in_backward,
            "replicate_sync": "all_reduce" if self.mixed is None else self.mixed.config,
        }

    # What the parts say

    @property
    def schedule(self) -> Schedule:
        """The order of forwards and backwards of microbatches, as configured."""
        return self.staging.schedule

    @property
    def microbatch_count(self) -> MicrobatchCount:
        """The number of microbatches of a batch."""
        return self.staging.microbatch_count

    @property
    def pipeline(self) -> Pipeline | None:
        """This rank's place in the pipeline; from `setup_environment` to `teardown`."""
        return self.staging.pipeline

    @property
    def splitter(self) -> BatchSplitter | None:
        """Splits batches of a D9DModule, in a run."""
        return None if self._evaluation is None else self._evaluation.splitter

    @property
    def executor(self) -> Executor | None:
        """Runs the training programs of a D9DModule on this rank, during a fit; otherwise None."""
        return None if self._training is None else self._training.executor

    @property
    def num_skipped_steps(self) -> int:
        """Skipped steps of this fit, or the last: nothing counted, or `skip_nonfinite`. It reads the device."""
        return 0 if self._optimizer_step is None else int(self._optimizer_step.skipped)

    @property
    def num_empty_batches(self) -> int:
        """Batches of this fit, or of the last, in which nothing counted on any rank. It reads the device."""
        return 0 if self._optimizer_step is None else self._optimizer_step.empty.num_batches

    @property
    def is_dummy_batch(self) -> bool:
        """True if this rank has no data for the current training batch, which is a copy that counts nothing.

        Hooks from `on_train_batch_start` to `on_train_batch_end` that count samples themselves should read it.
        """
        return self.lightning_module is not None and plan_of(self.lightning_module.trainer.fit_loop).is_dummy

    @property
    def parallel_in_effect(self) -> ParallelConfig:
        """The configuration with the chosen dispatch, and dtypes that follow from precision and `grad_sync`."""
        autocasts = isinstance(self.precision_plugin, MixedPrecision) and isinstance(self.lightning_module, D9DModule)
        return self.staging.in_effect(with_dtypes(self.parallel, self.grad_sync, autocasts=autocasts))

    @property
    def _attached(self) -> L.LightningModule:
        """The module of the next run."""
        if self.lightning_module is None:
            raise ConfigError("D9DStrategy has no module yet; call trainer.fit, validate, test or predict first")
        return self.lightning_module

    @property
    def _fit(self) -> Training:
        """Runs the batches of the fit. Steps by hand, outside of a fit, are left to Lightning."""
        return self._training or training_by_hand(self.grad_sync, self.root_device)

    @property
    def _is_fitting(self) -> bool:
        """True if the Trainer fits, or its last run was a fit; a module that is saved alone has no Trainer."""
        module = self.lightning_module
        return module is not None and module._trainer is not None and module.trainer.state.fn == TrainerFn.FITTING

    # A run begins

    def connect(self, model: L.LightningModule) -> None:
        """Keep the module of the next run. Local."""
        super().connect(model)
        if isinstance(model, D9DModule):
            silence_hooks()

    def setup_environment(self) -> None:
        """Join the process group and find this rank's place in the pipeline. Collective."""
        module, trainer = self._attached, cast(Any, self._attached.trainer)
        assert self.cluster_environment is not None
        check_number_of_ranks(self.cluster_environment, self.num_processes, self.num_nodes)
        check_before_joining(trainer, self.mesh_config, self.world_size)
        self._check_mixing(trainer, module, steps_in_backward=self.step_in_backward)
        super().setup_environment()
        if self.is_distributed:  # one process goes on with its random state, as on Lightning's one-device strategy
            reset_seed()
        if self._patches is not None:
            self._patches.undo()  # this run began inside of another, in a callback say
        patches = self._patches = Patches(trainer)
        self._join(trainer, patches)
        clip_by(patches, self.precision_plugin, self._clip_grad_by_norm, self._clip_grad_by_value)
        adapt_display(patches, trainer)
        adapt_samplers(patches, trainer, self.ranks.dp_size, may_differ=isinstance(module, D9DModule))
        self._kernels.enter_context(using_kernels(self.parallel.kernels))
        self._kernels.enter_context(using_grouped_gemm(self.parallel.grouped_gemm))
        mesh = self.mesh_config.resolve(self.world_size)
        beside = Beside(module, self.mesh_config, mesh, self.parallel, self.schedule)
        check_run(self.settings(), D9DStrategy().settings(), beside, self.precision_plugin)
        several, in_backward = trainer.accumulate_grad_batches > 1, self.step_in_backward
        open_groups(self.ranks, self.parallel_in_effect)
        self.staging.choose_dispatch(module, self.ranks, self.parallel)
        has_stages = isinstance(module, D9DModule) and len(module.stages) > 0
        run = RunSettings(mesh, self.parallel_in_effect, self.grad_sync, in_backward, several)
        select = functools.partial(choose_for, module, self.precision_plugin, self.root_device, run)
        self.staging.begin(self.ranks.mesh_of_several, self.root_device, select, keeps=has_stages)
        self._tell_module()

    def _join(self, trainer: Any, patches: Patches) -> None:
        """Join the other ranks, start the watch, and check that all have the same settings. Collective."""
        assert self.cluster_environment is not None
        self.ranks.device = self.root_device
        self.set_world_ranks()
        with ending_with_launcher():
            self.ranks.join(self.cluster_environment, self.num_nodes)
        if self.is_distributed:
            self.shutdown = Shutdown(patches, trainer, self._checkpoints.saves, self.timeouts)
            with self.shutdown.making_groups():
                self.ranks.spread()
                check_equal_configuration(self.settings(), trainer)

    def _tell_module(self) -> None:
        """Set the module's run context, before it builds its stages. Local."""
        module = self.lightning_module
        if isinstance(module, D9DModule) and self.pipeline is not None:
            given = self.settings(), self.parallel_in_effect, self.precision_plugin
            module.run_context = run_context_of(self.staging, self.ranks, *given)

    @property
    def precision_plugin(self) -> Precision:
        """The Trainer's precision plugin; in a run it clips by this strategy's norm."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        if precision_plugin is not None:
            check_precision(precision_plugin, is_d9d=False)
        self._precision_plugin = precision_plugin

    def setup(self, trainer: L.Trainer) -> None:
        """Move the module to the device, make replicas equal, and build optimizers and gradient buckets. Collective."""
        module, patches = self._attached, self._patches
        assert self.accelerator is not None
        assert self.model is not None
        assert patches is not None
        self.accelerator.setup(trainer)
        check_module(module, self.pipeline, self.microbatch_count)
        load_pretrained(module, self._run_state())
        if self._is_fitting and self._layer_sync is not None:
            self.model = self._layer_sync.apply(self.model)
        self.model = self.precision_plugin.convert_module(self.model)
        self._rank_model = place_model(self.model, self.parallel, self.ranks, lambda: self._run_state().names)
        self._make_replicas_equal()
        if is_sharded(self.model):
            for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
                patches.replace(loop, "inference_mode", False)  # DTensors know no inference tensors
        if isinstance(module, D9DModule) and self.pipeline is not None:
            pads = self.parallel.pad_sequences
            splitter = BatchSplitter(module, self.pipeline, self.microbatch_count, pads_sequences=pads)
            self._evaluation = module.evaluation = EvalStep(module, splitter, SequenceCheck(module))
        hooks = self.run_dummy, self._checkpoints.place.is_to_be_resumed, self.copier_ahead()
        align_loaders(patches, trainer, alignment(self.ranks, self.splitter, *hooks))
        if self._is_fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if self._is_fitting:
            _optimizers_to_device(self.optimizers, self.root_device)
            run = patches, self.ranks, self._rank_model, self._evaluation, self.parallel_in_effect, self.grad_sync
            is_chosen = self.staging.chose_peers
            parts = TrainingParts(*run, self.precision_plugin, self.skip_nonfinite, self._checkpoints.torn, is_chosen)
            training = self._training = parts.training(module, self.optimizers)
            self._optimizer_step = training.optimizer_step
            self._update_gradients()
            self._open_mixing(self._rank_model.tied, self.optimizers)
            self._checkpoints.saves.open(patches, trainer, lambda: training.window_is_open)
            if not self.is_distributed:
                self._interruption = Interruption(patches, trainer, lambda: training.window_is_open)

    def model_to_device(self) -> None:
        """Move the module to this process's device, except weights that stay in the host's memory."""
        assert self.model is not None
        move(self.model, self.root_device, offloads=self.parallel.offload)

    def process_dataloader(self, dataloader: object) -> object:
        """Refuse a loader without a batch on some rank; make a loader without a state resumable. Collective."""
        module, trainer = self._attached, self._attached.trainer
        is_staged = isinstance(module, D9DModule)
        check_loader(dataloader, module, self.ranks, is_staged=is_staged)
        trains = bool(trainer.training)
        self._checkpoints.place.prepare(dataloader, trainer.fit_loop, trains=trains, is_staged=is_staged)
        return dataloader

    # Training

    def on_train_start(self) -> None:
        """Resume at the place of a checkpoint; decide whether the step may scale gradients. Collective."""
        super().on_train_start()
        module, trainer, plugin = self._attached, self._attached.trainer, self.precision_plugin
        is_staged, step = isinstance(module, D9DModule), trainer.global_step
        say_here = functools.partial(say, trainer)
        self._checkpoints.loads.close()
        self._checkpoints.place.resume(trainer.fit_loop, is_staged=is_staged, global_step=step, say=say_here)
        resume_bar(trainer)
        self._begin_mixing()
        self._fit.begin(lambda: may_defer_scaling(module, self.optimizers, self._fit.gradients.parameters, plugin))

    def on_train_end(self) -> None:
        """Wait for the last saves of callbacks. In a window that stays open, save nevertheless."""
        super().on_train_end()
        self._checkpoints.saves.end_training()
        if self._interruption is not None:
            self._interruption.check()
        if self._training is not None:  # a run inside of this one, in a callback say, has dropped it
            self._training.finish()
        self._end_mixing()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Begin a batch; Lightning calls this for batches that are not None."""
        super().on_train_batch_start(batch, batch_idx)
        self._fit.begin_batch(plan_of(self._attached.trainer.fit_loop))
        if self.shutdown is not None:
            self.shutdown.watch.begin_train_step()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run one batch: a D9DModule's schedule, or a plain module's own `training_step`."""
        trainer: Any = self._attached.trainer
        if self.is_distributed and not self.ranks.are_described:
            self.ranks.are_described = True
            say(trainer, describe_gradients(self.mesh, self._fit.gradients, trainer, num_tokens((args, kwargs))))
        self._sync_buffers()
        self._update_gradients()
        own = functools.partial(super().training_step, *args, **kwargs)
        return self._fit.run(own, args, BatchSettings.of(trainer, plan_of(trainer.fit_loop)))

    def _update_gradients(self) -> None:
        """Build the gradient buckets if there are none yet, or if others are needed now. Collective."""
        accumulates = not self.microbatch_count.is_one or self._attached.trainer.accumulate_grad_batches > 1
        self._fit.gradients.update(accumulates=accumulates, window_is_open=self._fit.window_is_open)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Plain modules: backward, then the sum over ranks. D9DModules: put the schedule's gradients in place."""
        module, training = self._attached, self._fit
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(training.counted(closure_loss), module)
        own = functools.partial(self.precision_plugin.backward, closure_loss, module, optimizer, *args, **kwargs)
        training.backward(own)
        if training.is_last_batch and self._rank_model is not None:
            self._rank_model.mark_buffers_stale()
        closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Use Lightning's own for plain modules. For a D9DModule the closure runs first, then `TrainStep.step`."""
        closure = self._mixing_first(optimizer, closure)
        own = functools.partial(super().optimizer_step, optimizer, closure, model, **kwargs)
        wrapped = functools.partial(self.precision_plugin._wrap_closure, self._attached, optimizer, closure)
        result = self._fit.step(optimizer, wrapped, own, **kwargs)
        self._launch_mixing(self._fit.last_norm)
        if self.skip_nonfinite:
            self._attached.log("skipped_steps", self._fit.optimizer_step.skipped.float(), batch_size=1)
        if self.ranks.set_step_timeout() and self.shutdown is not None:
            self.shutdown.watch.set_limit(self.timeouts.step_seconds)
        return result

    def gradient_norm(self) -> Tensor:
        """Return the norm of all gradients as they are between backward and step. Collective over all ranks."""
        return self._fit.gradients.norm()

    @contextmanager
    def block_backward_sync(self) -> Generator[None]:
        """Skip the reduction for batches after which the optimizer does not step, inside the block."""
        with self._fit.inside_of_window():
            yield

    def _clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        clip_gradients_by_value(self.precision_plugin.main_params(optimizer), clip_val)

    def _clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        self._fit.clip(self.precision_plugin.main_params(optimizer), clip_val)

    # Evaluation

    def on_validation_start(self) -> None:
        """Make replicas' buffers equal here, because a rank may have no batch. Collective."""
        self._sync_buffers()
        super().on_validation_start()

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run one batch: of a D9DModule by its stages, or a plain module's own `validation_step`."""
        return self._evaluate("val", super().validation_step, *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a batch of a test, like `validation_step`."""
        return self._evaluate("test", super().test_step, *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a batch of a prediction, like `validation_step`."""
        return self._evaluate("predict", super().predict_step, *args, **kwargs)

    def _evaluate(self, kind: str, own: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        plan, step = begin_evaluation_step(self._attached.trainer._active_loop, batch), self._evaluation
        with self.evaluating():
            if step is None:
                return own(batch, *args, **kwargs)
            with step_context(self.precision_plugin, kind):
                return step.predict(batch, plan) if kind == "predict" else step.evaluate(batch, kind, plan)

    def run_dummy(self, batch: Any, plan: BatchPlan) -> None:
        """Run forwards of a D9DModule's batch without a loss, as where only other ranks have it. Collective."""
        assert self._evaluation is not None
        with self.evaluating(), self.precision_plugin.forward_context():
            self._evaluation.run_dummy(batch, plan)

    @contextmanager
    def evaluating(self) -> Generator[None]:
        """Run the forward of a batch, without a backward, inside the block. Local."""
        if self.shutdown is not None:
            self.shutdown.begin_evaluation_batch()
        if self._interruption is not None:
            self._interruption.check()
        with nullcontext() if self._rank_model is None else self._rank_model.evaluating():
            yield

    def _sync_buffers(self) -> None:
        if self._rank_model is not None:
            self._rank_model.sync_buffers()

    # Checkpoints

    def _run_state(self) -> RunState:
        schedulers = [config.scheduler for config in self.lr_scheduler_configs]
        return RunState.of(self._attached, self.ranks, self.checkpoint_config.mode, self.optimizers, schedulers)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Save Lightning's checkpoint as a file or a directory; see `Checkpoints.save`. Collective."""
        self._sync_buffers()
        content = {**checkpoint, **self.staging.saved}  # hooks and callbacks have seen Lightning's own
        trainer = self._attached.trainer if self._is_fitting else None
        with self._saving_mean(content, filepath, is_deferred=self._checkpoints.saves.is_inside_of_window):
            self._checkpoints.save(content, filepath, storage_options, self._run_state(), self.checkpoint_io, trainer)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Use Lightning's own; `save_checkpoint` converts it to parameter names."""
        state = self._run_state()
        return {} if state.is_directory or state.is_spread else super().optimizer_state(optimizer)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a file, or open a directory and read the weights into their tensors; see `Checkpoints.load`. Collective.

        Raises:
            RankError: A rank has failed. A tuner restores its saved state nevertheless.
        """
        if self.shutdown is not None and self.shutdown.watch.failure is not None:
            raise RankError(str(self.shutdown.watch.failure))  # that rank will not come to a collective
        module, io, fits = self.lightning_module, self.checkpoint_io, self._is_fitting
        return self._checkpoints.load(checkpoint_path, weights_only, io, module, self._prepare_to_load, fits=fits)

    def _prepare_to_load(self, checkpoint: Mapping[str, Any], names: Collection[str]) -> None:
        """Build the stages that `Auto` chose in the saved run; load weights that the checkpoint lacks. Collective."""
        module = self.lightning_module
        if module is None:  # a file is read for its own sake
            return
        if isinstance(module, D9DModule) and self.staging.resume(checkpoint) is not None:
            self._tell_module()
            module.stages = nn.ModuleList()
            with self.precision_plugin.module_init_context():
                module.configure_model()
        load_pretrained(module, self._run_state(), unless_in=names)
        self._opened_mixing(checkpoint)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights into the module; see `Loads.give_weights`. Collective in a pipeline."""
        self._checkpoints.loads.give_weights(self._attached, checkpoint["state_dict"], self._run_state(), strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the states of optimizers; see `Loads.give_optimizers`. Collective if ranks hold parts."""
        refuses = isinstance(self.lightning_module, D9DModule)
        schedulers = [config.scheduler for config in self.lr_scheduler_configs]
        self._checkpoints.loads.give_optimizers(checkpoint, self._run_state(), schedulers, refuses_other_number=refuses)

    # A run ends

    def on_exception(self, exception: BaseException) -> None:
        """Report the error to other ranks, end ranks launched here, and log how to resume the fit."""
        super().on_exception(exception)
        set_exit_code(exception)
        if (knows_memory := self._training or getattr(self.lightning_module, "run_context", None)) is not None:
            knows_memory.note(exception)
        if self.shutdown is not None:
            self.shutdown.watch.report(exception)  # where a tuner had put the Trainer's callbacks away
        else:
            end_children_at_exit(self.launcher, self.global_rank, self.timeouts.shutdown_seconds)
        if self._is_fitting:
            tell_end(exception, self._attached.trainer.global_step, self._checkpoints.saves.last, self.shutdown)

    def teardown(self) -> None:
        """Drop buckets and hooks, so that a notebook can fit again. Collective unless a rank failed.

        The process group stays for the next run: ranks that join again could receive leftover messages of the old
        group.
        """
        try:
            module, trainer = self.lightning_module, getattr(self.lightning_module, "_trainer", None)
            if self._layer_sync is not None and module is not None and self._is_fitting:
                self.model = self._layer_sync.revert(module)
            parts = (self._training, self._rank_model, self.staging, self._kernels, self._checkpoints.loads)
            for part in filter(None, parts):
                part.close()
            self._training = self._rank_model = self._evaluation = self._interruption = None
            if isinstance(module, D9DModule):
                module.run_context = module.evaluation = None
            self._checkpoints.place.release(None if trainer is None else trainer.fit_loop)
            self._checkpoints.saves.close(raises=trainer is None or not trainer.interrupted)
            super().teardown()
            self.ranks.close()
        finally:
            patches, self._patches = self._patches, None
            if patches is not None:
                patches.undo()
            shutdown, self.shutdown = self.shutdown, None
            if shutdown is not None:
                shutdown.close()


# For the one thing that Lightning asks it: whether it trains `torch.compile(module)`.
SingleDeviceStrategy.register(D9DStrategy)
