"""`D9DStrategy`: the hooks Lightning calls, each short. The step itself is in `train_step.py`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from lightning_d9d.errors import ConfigError
from lightning_d9d.mesh import MeshConfig, MeshDomains
from lightning_d9d.mesh.collectives import all_gather_object
from lightning_d9d.ops.backend import using_kernels
from lightning_d9d.ops.grouped_gemm import using_grouped_gemm
from lightning_d9d.parallel import ParallelConfig
from lightning_d9d.parallel.data import FullySharded
from lightning_d9d.parallel.expert import are_units
from lightning_d9d.parallel.fsdp import forget_forward, fully_sharded, reset
from lightning_d9d.parallel.graphs import release_graphs
from lightning_d9d.parallel.plan import axes_left, sharding_kind
from lightning_d9d.pipeline.executor import Executor
from lightning_d9d.pipeline.microbatch import MicrobatchCount, num_tokens
from lightning_d9d.schedule import Auto, Choice, Schedule, resolve_schedule
from lightning_d9d.strategy.aligned import AlignedStrategy
from lightning_d9d.strategy.auto import CHOICE, choose, saved_choice
from lightning_d9d.strategy.batches import BatchSplitter
from lightning_d9d.strategy.checkpoints import CheckpointConfig
from lightning_d9d.strategy.configuration import check_callbacks, check_classes, check_degrees_of
from lightning_d9d.strategy.context import RunContext
from lightning_d9d.strategy.data_parallel import DataParallelStages
from lightning_d9d.strategy.display import describe_run, say
from lightning_d9d.strategy.effects import Beside, check_effects
from lightning_d9d.strategy.eval_step import EvalStep
from lightning_d9d.strategy.module import D9DModule
from lightning_d9d.strategy.offload import move
from lightning_d9d.strategy.optimizer_step import (
    OptimizerStep,
    check_layouts,
    check_steps_once,
    leaves_gradients_alone,
    takes_scalars,
)
from lightning_d9d.strategy.pipeline import Pipeline
from lightning_d9d.strategy.precision import check_precision
from lightning_d9d.strategy.progress import LateProgress, warn_of_nonfinite
from lightning_d9d.strategy.ranks import TimeoutConfig
from lightning_d9d.strategy.replicas import Replicas
from lightning_d9d.strategy.sequence_parts import SequenceCheck
from lightning_d9d.strategy.sharding import (
    check_layout,
    is_sharded,
    not_yet_summed,
    prepare_blocks,
    shard_blocks,
)
from lightning_d9d.strategy.tied import TiedParameters
from lightning_d9d.strategy.train_step import TrainStep
from lightning_d9d.strategy.uneven import plan_of
from lightning_d9d.strategy.window import cast_gradients
from lightning_d9d.sync.buckets import GradientBuckets, GradSyncConfig
from lightning_d9d.sync.norm import clip_gradients_by_norm, clip_gradients_by_value

_SCALAR_DTYPES = {torch.float32, torch.bfloat16}
"""Sums over many tokens overflow in float16, and a float32 factor would round float64 gradients."""


class D9DStrategy(AlignedStrategy):
    """Trains any LightningModule as data-parallel replicas, and a `D9DModule` microbatch by microbatch.

    `D9DStrategy()` runs in one process without a process group (a notebook, say), or in as many as the Trainer has
    devices, each with a replica. Plain LightningModules keep Lightning's own order of hooks and get the results of
    DistributedDataParallel: gradients are means over ranks.

    Args:
        mesh: Parallel degrees; by default every rank is a replica. Those of pipelines and contexts are for D9DModules;
            plain modules take their part of the others in `configure_model`.
        schedule: Order of forwards and backwards of a D9DModule's microbatches, and where its stages are: "1f1b"
            (default), another name of `lightning_d9d.schedule.SCHEDULES`, or an object of a class of
            `lightning_d9d.schedule` or your own. `Auto` chooses one, with microbatches and stages.
        microbatch_size: Rows of a microbatch. By default 1 in a pipeline, else a batch is one microbatch.
        num_microbatches: The number of microbatches instead.
        parallel: How the stages of a D9DModule are spread over ranks: when to let go of fully sharded weights, what to
            recompute, and more.
        grad_sync: Dtype and size of the gradient buckets.
        checkpoint: Whether checkpoints are files or directories.
        timeouts: Limits for collectives and for stopping.
        skip_nonfinite: Leave out optimizer steps where the norm of all gradients is not finite, on all ranks together;
            their number is logged as `skipped_steps`. Optimizers other than torch's fused ones cost a host sync a step
            then. Needs automatic optimization.
        process_group_backend: "gloo", "nccl", ...; by default the one for the device.
    """

    strategy_name = "d9d"
    shared_by_copies = (
        *AlignedStrategy.shared_by_copies,
        *("pipeline", "_tied", "_buckets", "_sharded", "_train_step", "_optimizer_step", "_units", "_kernels"),
        *("splitter", "_eval_step", "_replicas"),
    )

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
        process_group_backend: str | None = None,
    ) -> None:
        check_classes(
            mesh=(MeshConfig() if mesh is None else mesh, MeshConfig),
            parallel=(parallel, ParallelConfig),
            grad_sync=(grad_sync, GradSyncConfig),
            checkpoint=(checkpoint, CheckpointConfig),
            timeouts=(timeouts, TimeoutConfig),
        )
        super().__init__(checkpoint, mesh=mesh, timeouts=timeouts, process_group_backend=process_group_backend)
        self.schedule = resolve_schedule(schedule)
        if isinstance(self.schedule, Auto) and (microbatch_size, num_microbatches) != (None, None):
            raise ConfigError(
                f"microbatch_size={microbatch_size}, num_microbatches={num_microbatches} beside schedule=Auto(...), "
                "which chooses it; leave both out"
            )
        if (microbatch_size, num_microbatches) == (None, None) and self.mesh_config.pipeline_parallel > 1:
            microbatch_size = 1
        self.microbatch_count = MicrobatchCount(microbatch_size, num_microbatches)
        self.parallel = parallel
        self.grad_sync = grad_sync
        self.skip_nonfinite = skip_nonfinite
        self.pipeline: Pipeline | None = None
        """Where this rank is in the pipeline; from `setup_environment` to `teardown`."""
        self._choice: Choice | None = None
        self._tied = TiedParameters()
        self._late_progress: LateProgress | None = None
        self._parameters: list[nn.Parameter] = []
        self._replicas: Replicas | None = None
        self._buckets: GradientBuckets | None = None
        self._sharded: dict[int, FullySharded] = {}
        self._bucket_needs: tuple[bool, list[bool]] | None = None
        self._train_step: TrainStep | None = None
        self._optimizer_step: OptimizerStep | None = None
        self._norm: Tensor | None = None
        self._units: list[FSDPModule] = []
        self._is_described = False
        self._sync_gradients = True
        self._window_is_open = False
        self._buffers_are_stale = False
        self._kernels = ExitStack()

    def settings(self) -> dict[str, object]:
        """What ranks must agree on, by the names of arguments."""
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
        }

    # Setting up and tearing down

    def setup_environment(self) -> None:
        """Join the process group and find this rank's place in the pipeline. Collective."""
        super().setup_environment()
        self._kernels.enter_context(using_kernels(self.parallel.kernels))
        self._kernels.enter_context(using_grouped_gemm(self.parallel.grouped_gemm))
        assert self.lightning_module is not None
        check_degrees_of(self.lightning_module, self.mesh_config)
        check_callbacks(cast(Any, self.lightning_module.trainer).callbacks, self.mesh_config)
        check_precision(self.precision_plugin, is_d9d=isinstance(self.lightning_module, D9DModule))
        degrees = self.mesh_config.resolve(self.world_size)
        beside = Beside(self.lightning_module, self.mesh_config, degrees, self.parallel)
        check_effects(self.settings(), D9DStrategy().settings(), beside)
        self._open_groups()
        earlier, self._choice = self._choice, None
        if not isinstance(self.schedule, Auto):
            self._take_pipeline(Pipeline(self.schedule, self._mesh_of_ranks, self.root_device))
            return
        module = cast(D9DModule, self.lightning_module)  # or its schedule was refused
        if earlier is not None and len(module.stages) > 0:
            self._take(earlier)  # perhaps a checkpoint's
        else:
            num_ranks = self.mesh.sizes["pp"] if self.world_size > 1 else 1
            with self.precision_plugin.module_init_context():
                dtype = torch.get_default_dtype()
            self._take(choose(self.schedule, module, num_ranks, dtype, self.root_device, self.parallel.compile))

    @property
    def _mesh_of_ranks(self) -> MeshDomains | None:
        return self.mesh if self.world_size > 1 else None

    def _open_groups(self) -> None:
        """Make groups while all ranks are here, some of whose stages may have no use for one. Collective."""
        if self.world_size > 1 and self.mesh.sizes["cp"] * self.mesh.sizes["tp"] > 1:
            self.mesh.group("dp", "cp", "tp")
            self.mesh.group("dp_replicate", "cp_replicate")
        if self.world_size > 1 and self.mesh.sizes["ep_shard"] > 1:
            self.mesh.group("ep_shard", lane="moe")
            if are_units(self.mesh, self.parallel_in_effect):
                _ = self.mesh.expert_weights

    @property
    def _gathers_narrow(self) -> bool:
        """Whether fully sharded weights are gathered in the dtype that autocast would cast them to."""
        return isinstance(self.precision_plugin, MixedPrecision) and isinstance(self.lightning_module, D9DModule)

    @property
    def parallel_in_effect(self) -> ParallelConfig:
        """The configuration with the dtypes that follow from precision and `grad_sync`."""
        gathered, reduced = self.parallel.gather_dtype, self.parallel.reduce_dtype
        if gathered is None and self._gathers_narrow:
            gathered = "bfloat16"
        if reduced is None and self.grad_sync.dtype != "auto":
            reduced = self.grad_sync.dtype
        return replace(self.parallel, gather_dtype=gathered, reduce_dtype=reduced)

    def _take(self, choice: Choice) -> None:
        """Run with what `Auto` has chosen. Collective."""
        self._choice = choice
        assert isinstance(self.schedule, Auto)
        self.microbatch_count = MicrobatchCount(choice.microbatch_size, None, rows_expected=self.schedule.batch_size)
        self._take_pipeline(Pipeline(choice.schedule, self._mesh_of_ranks, self.root_device, choice.layers_of_stage))

    def _take_pipeline(self, pipeline: Pipeline) -> None:
        """Run in this pipeline: the module hears of it before it builds its stages."""
        self.pipeline = pipeline
        module = self.lightning_module
        if isinstance(module, D9DModule):
            module.run_context = RunContext(
                pipeline=pipeline,
                parallel=self.parallel_in_effect,
                device=torch.device("cpu") if self.parallel.offload else self.root_device,
                seed=self.seed,
                loads_pretrained=True,
            )
            pads = self.parallel.pad_sequences
            self.splitter = BatchSplitter(module, pipeline, self.microbatch_count, pads_sequences=pads)

    def go_on_as(self, checkpoint: Mapping[str, Any]) -> None:
        """Take what `Auto` had chosen when the checkpoint was saved, and build those stages. Collective."""
        module = self.lightning_module
        if self._choice is None or self.pipeline is None or not isinstance(module, D9DModule):
            return
        saved = saved_choice(checkpoint, self.pipeline.num_ranks)
        if saved is not None and saved != self._choice:
            rank_zero_info(f"going on with the schedule of the checkpoint:\n{saved}")
            self._take(saved)
            module.stages = nn.ModuleList()
            with self.precision_plugin.module_init_context():
                module.configure_model()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """As the base class, with what `Auto` has chosen. Collective."""
        if self._choice is not None:
            checkpoint = {**checkpoint, CHOICE: self._choice.to_dict()}
        self._sync_buffers()
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @property
    def precision_plugin(self) -> Precision:
        """The Trainer's precision plugin; it clips by this strategy's norm."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        if precision_plugin is not None:
            check_precision(precision_plugin, is_d9d=False)
            if type(precision_plugin).clip_grad_by_norm is Precision.clip_grad_by_norm:
                precision_plugin.clip_grad_by_norm = self._clip_grad_by_norm
            if type(precision_plugin).clip_grad_by_value is Precision.clip_grad_by_value:
                precision_plugin.clip_grad_by_value = self._clip_grad_by_value
            if type(precision_plugin) is MixedPrecision:  # refuses fused optimizers, which matter to a loss scaler only
                precision_plugin.clip_gradients = functools.partial(Precision.clip_gradients, precision_plugin)
        self._precision_plugin = precision_plugin

    def setup(self, trainer: L.Trainer) -> None:
        """Move the module to the device, make replicas equal, and build optimizers and gradient buckets. Collective."""
        assert self.accelerator is not None
        assert self.lightning_module is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        self._check_module(self.lightning_module)
        self.load_pretrained()
        if self._is_fitting and self._layer_sync is not None:
            self.model = self._layer_sync.apply(self.model)
        self.model = self.precision_plugin.convert_module(self.model)
        if not isinstance(self.model, D9DModule):
            prepare_blocks(self.model, self.parallel, self._mesh_of_ranks)
        if isinstance(self.model, D9DModule) or self.parallel.shard_blocks is None or self.world_size == 1:
            self.model_to_device()
        else:
            shard_blocks(self.model, self.mesh, self.parallel, self.root_device)
        if self.world_size > 1:
            check_layout(self.model, self.mesh, self.stage_group)
            self._replicas = Replicas(self.model, self.stage_group)
            self._replicas.make_equal()
            self._find_tied()
            if self.mesh.dp_size < self.world_size:
                self._replicas.group_metrics(self.group)
        self._units = [unit for unit in self.model.modules() if isinstance(unit, FSDPModule)]
        if is_sharded(self.model):
            for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
                loop.inference_mode = False  # DTensors know no inference tensors
        if isinstance(self.model, D9DModule):
            assert self.splitter is not None
            self._eval_step = self.model.evaluation = EvalStep(self.model, self.splitter, SequenceCheck(self.model))
        self.align_loaders(trainer)
        if self._is_fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if self._is_fitting:
            _optimizers_to_device(self.optimizers, self.root_device)
            self._setup_gradients(self.lightning_module)
            self.open_saver(lambda: self._window_is_open)

    def _find_tied(self) -> None:
        """Find the parameters that several ranks of the pipeline hold, by their names. They start equal. Collective."""
        assert self.pipeline is not None
        assert self.model is not None
        units = fully_sharded(self.model)
        self._tied = TiedParameters.find(
            self._parameter_names(), lambda parameter: axes_left(sharding_kind(parameter, units)), self._mesh_of_ranks
        )
        self._tied.make_equal()

    def model_to_device(self) -> None:
        """Move the module to this process's device, but for weights that stay in the host's memory."""
        assert self.model is not None
        move(self.model, self.root_device, offloads=self.parallel.offload)

    def teardown(self) -> None:
        """Drop buckets and hooks, so that a notebook can fit again. Collective unless a rank failed.

        The process group stays for the next run: ranks that join anew could meet what is left of the old group.
        """
        try:
            module = self.lightning_module
            if self._layer_sync is not None and module is not None and module.trainer.state.fn == TrainerFn.FITTING:
                self.model = self._layer_sync.revert(module)
            self._drop_gradients()
            if self.model is not None:
                release_graphs(self.model)
            self._kernels.close()
            self.release_loaders()
            self.close_saver()
            super().teardown()
            self.close_mesh()
        finally:
            shutdown, self._shutdown = self._shutdown, None
            if shutdown is not None:
                shutdown.close()

    def _drop_gradients(self) -> None:
        if self._buckets is not None:
            self._buckets.remove()
        for stage in self._sharded.values():
            stage.close()
        self._sharded = {}
        if self._train_step is not None:
            self._train_step.executor.close()
        self._buckets = self._train_step = self._bucket_needs = self._late_progress = None
        for parameter in self._parameters:
            if parameter.grad is not None and parameter.grad.dtype != parameter.dtype:
                parameter.grad = None  # of a window that was broken off; a module that moves cannot take it along
        self._parameters, self._units = [], []
        self.pipeline, self._tied = None, TiedParameters()
        self.splitter = self._eval_step = None
        if isinstance(self.lightning_module, D9DModule):
            self.lightning_module.run_context = self.lightning_module.evaluation = None
        replicas, self._replicas = self._replicas, None
        if replicas is not None:
            replicas.close()
        self._window_is_open = False

    def _check_module(self, module: L.LightningModule) -> None:
        if isinstance(module, D9DModule):
            module.check_overrides()
            if len(module.stages) == 0:
                raise ConfigError(
                    f"{type(module).__name__} has no stages: its configure_model must call super().configure_model()"
                )
            assert self.pipeline is not None
            self.pipeline.check_stages(module.indexed_stages)
            if self.is_pipelined:
                self.parameters_of_pipeline = module.parameter_order()
        elif not self.microbatch_count.is_one:
            raise ConfigError(
                f"microbatch_size={self.microbatch_count.microbatch_size}, num_microbatches="
                f"{self.microbatch_count.num_microbatches}: {type(module).__name__} is a plain LightningModule, whose "
                "training_step takes whole batches; use accumulate_grad_batches, or make it a D9DModule"
            )

    def _setup_gradients(self, module: L.LightningModule) -> None:
        assert self.model is not None
        self._parameters = list(self.model.parameters())
        self._optimizer_step = OptimizerStep(self.root_device)
        if self.skip_nonfinite and not module.automatic_optimization:
            raise ConfigError(
                f"skip_nonfinite=True: {type(module).__name__} steps its optimizers itself (automatic_optimization is "
                "False); check the gradients there"
            )
        for optimizer in self.optimizers:
            if self.skip_nonfinite or isinstance(module, D9DModule):
                check_steps_once(optimizer)
            check_layouts(optimizer)
        if isinstance(module, D9DModule):
            assert self._eval_step is not None
            self._train_step = TrainStep(
                module,
                module.pipeline.executor(module, module.indexed_stages, self.precision_plugin.forward_context),
                self._eval_step.splitter,
                self._optimizer_step,
                self._tied,
                self._eval_step.sequences,
            )
            reduces_each = self.grad_sync.reduce == "every_microbatch"
            self._sharded = {
                index: FullySharded(stage, keeps=self._keeps_gathered, reduces_each=reduces_each)
                for index, stage in module.indexed_stages.items()
                if fully_sharded(stage)
            }
            if self.root_device.type != "cpu":
                self._late_progress = LateProgress(module.trainer)
        self._update_buckets()

    @property
    def _defers_scaling(self) -> bool:
        """Whether the optimizer can take division and clipping as a factor, without anybody noticing."""
        assert self.lightning_module is not None
        return (
            all(takes_scalars(each) and not each._optimizer_step_pre_hooks for each in self.optimizers)
            and {parameter.dtype for parameter in self._parameters} <= _SCALAR_DTYPES
            and type(self.precision_plugin).clip_grad_by_norm is Precision.clip_grad_by_norm
            and leaves_gradients_alone(self.lightning_module)
        )

    def _update_buckets(self) -> None:
        """Build the buckets, and again where a callback froze or unfroze layers or began to accumulate batches."""
        module = self.lightning_module
        assert module is not None
        accumulates = not self.microbatch_count.is_one or module.trainer.accumulate_grad_batches > 1
        if self.world_size == 1 and not accumulates:
            return
        needs_gradient = [p.requires_grad for p in self._parameters]
        if self._window_is_open and self._bucket_needs is not None:  # a layer just frozen has a gradient to be summed
            needs_gradient = [now or before for now, before in zip(needs_gradient, self._bucket_needs[1], strict=True)]
        needs = (accumulates, needs_gradient)
        if needs == self._bucket_needs:
            return
        self._bucket_needs = needs
        if self._buckets is not None:
            self._buckets.remove()
            self._buckets = None
        trained = list(itertools.compress(self._parameters, needs_gradient))
        stages: dict[int, nn.Module] = {}
        if isinstance(module, D9DModule):
            stages = module.indexed_stages
        elif self.world_size > 1 and is_sharded(module):
            trained = not_yet_summed(trained, self.mesh, fully_sharded(module))
        data_parallel = DataParallelStages.build(
            trained,
            stages,
            self._tied,
            self._mesh_of_ranks,
            self.grad_sync,
            at_least=torch.float32 if isinstance(module, D9DModule) else None,
            accumulates=accumulates,
            sharded=self._sharded,
        )
        self._buckets = data_parallel.buckets
        if self._train_step is not None:
            self._train_step.data_parallel = data_parallel if data_parallel.has_work else None

    @property
    def _keeps_gathered(self) -> bool:
        """Whether fully sharded stages are kept over a batch."""
        if self.parallel.reshard_after_forward == "auto":
            return self.is_pipelined or not self.microbatch_count.is_one
        return not self.parallel.reshard_after_forward

    # Steps

    def on_train_start(self) -> None:
        """Decide on what a checkpoint may have changed, too: options of the optimizer, callbacks. Collective."""
        super().on_train_start()
        if self._train_step is not None:
            defers = self._defers_scaling
            self._train_step.defers = all(all_gather_object(defers)) if self.world_size > 1 else defers

    def on_train_end(self) -> None:
        """Say what counted nothing in the last batches."""
        super().on_train_end()
        if self._train_step is not None:
            self._train_step.optimizer_step.empty.finish()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Lightning calls it for batches that are not None."""
        super().on_train_batch_start(batch, batch_idx)
        if self._shutdown is not None:
            self._shutdown.watch.begin_train_step()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """One batch: a D9DModule's schedule, or a plain module's own `training_step`."""
        self._prepare_batch(args, kwargs)
        if self._train_step is None:
            return super().training_step(*args, **kwargs)
        module, trainer = self._train_step.module, self._train_step.module.trainer
        batch, batch_index = args
        plan = plan_of(trainer.fit_loop)
        loss, metrics = self._train_step.run(
            batch, batch_index, trainer.accumulate_grad_batches, self._sync_gradients, plan
        )
        module.log_train_step(loss, metrics, prog_bar=self._late_progress is None)
        shown = loss.item() if self._late_progress is None else self._late_progress.show("train_loss", loss)
        if shown is not None and not self.skip_nonfinite:
            warn_of_nonfinite(shown)
        return loss

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Plain modules: backward, then the sum over ranks. D9DModules: put the schedule's gradients in place."""
        assert self.lightning_module is not None
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        if self._train_step is not None:
            self._train_step.restore(is_last=self._sync_gradients)
            self._log_gradient_norm()
        else:
            buckets = self._buckets if self._sync_gradients else None
            if buckets is not None:
                buckets.start()
            self.precision_plugin.backward(closure_loss, self.lightning_module, optimizer, *args, **kwargs)
            if buckets is not None:
                buckets.finish(divisor=self.mesh.dp_size if self.world_size > 1 else 1)
        clips_values = self.lightning_module.trainer.gradient_clip_algorithm == "value"
        if self.skip_nonfinite and clips_values and self._sync_gradients:
            self._norm = self._gradient_norm()  # clipping by value hides what is infinite
        if self._replicas is not None and self._sync_gradients:
            self._replicas.mark_buffers_stale()
        self._window_is_open = not self._sync_gradients
        closure_loss = self.precision_plugin.post_backward(closure_loss, self.lightning_module)
        self.post_backward(closure_loss)
        return closure_loss

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Lightning's own for plain modules. For a D9DModule the closure runs first, then `TrainStep.step`."""
        if self._train_step is None and self.grad_sync.dtype == "auto" and not self.skip_nonfinite:
            result = super().optimizer_step(optimizer, closure, model, **kwargs)
        else:
            assert self.lightning_module is not None
            closure = functools.partial(self.precision_plugin._wrap_closure, self.lightning_module, optimizer, closure)
            if self._train_step is None and not self.skip_nonfinite:
                result = optimizer.step(closure=functools.partial(self._run_and_cast, optimizer, closure), **kwargs)
            else:
                result = self._run_and_step(optimizer, closure, **kwargs)
        self.set_step_timeout()
        return result

    def _run_and_cast(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
        result = closure()
        cast_gradients(self._parameters, optimizer)
        return result

    def _run_and_step(self, optimizer: Optimizer, closure: Callable[[], Any], **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        assert self._optimizer_step is not None
        result = closure()
        norm, self._norm = self._norm, None
        if not self.skip_nonfinite:
            norm = None
        elif norm is None:
            norm = self._gradient_norm()
        if self._train_step is not None:
            self._train_step.step(optimizer, norm, **kwargs)
        else:
            assert norm is not None
            cast_gradients(self._parameters, optimizer)
            self._optimizer_step(optimizer, ~norm.isfinite(), **kwargs)
        if self.skip_nonfinite:
            self.lightning_module.log("skipped_steps", self._optimizer_step.skipped.float(), batch_size=1)
        return result

    @contextmanager
    def block_backward_sync(self) -> Generator[None]:
        """Open around batches after which the optimizer does not step: their gradients stay on the rank."""
        self._sync_gradients = False
        try:
            yield
        finally:
            self._sync_gradients = True

    def on_validation_start(self) -> None:
        """Make replicas' buffers equal: here, as a rank may have no batch. Collective."""
        super().on_validation_start()
        self._sync_buffers()

    @property
    def executor(self) -> Executor | None:
        """What runs the training programs of a D9DModule on this rank, during a fit; else None."""
        return None if self._train_step is None else self._train_step.executor

    @property
    def num_skipped_steps(self) -> int:
        """Optimizer steps left out in this fit, or the last: nothing counted, or `skip_nonfinite`. Reads the device."""
        return 0 if self._optimizer_step is None else int(self._optimizer_step.skipped)

    @property
    def num_empty_batches(self) -> int:
        """Batches of this fit, or of the last, in which no rank had anything that counts. Reads the device."""
        return 0 if self._optimizer_step is None else self._optimizer_step.empty.num_batches

    def _prepare_batch(self, *inputs: Any) -> None:
        if not self._is_described and self.world_size > 1:
            self._is_described = True
            assert self.lightning_module is not None
            trainer = self.lightning_module.trainer
            num_tokens_a_step = num_tokens(inputs) * trainer.accumulate_grad_batches * self.mesh.dp_size
            num_bytes = 0 if self._buckets is None else self._buckets.num_bytes
            say(trainer, describe_run(self.mesh, self._parameters, self._tied, num_tokens_a_step, num_bytes))
        self._sync_buffers()
        self._update_buckets()

    @contextmanager
    def evaluation_batch(self) -> Generator[None]:
        """For the step of a batch of validation, test or prediction."""
        try:
            with super().evaluation_batch():
                yield
        except BaseException:
            reset(self._units)
            raise
        forget_forward(self._units)  # of stages that are kept, and of the parts of others that are their own unit

    def _sync_buffers(self) -> None:
        if self._replicas is not None:
            self._replicas.sync_buffers()

    def _gradient_norm(self) -> Tensor:
        return self._tied.norm(self._parameters)

    def _log_gradient_norm(self) -> None:
        assert self._train_step is not None
        module = self._train_step.module
        trainer = module.trainer
        clips = bool(trainer.gradient_clip_val) and trainer.gradient_clip_algorithm != "value"
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if not clips and self._sync_gradients and (trainer.global_step + 1) % every == 0:
            module.log("grad_norm", self._train_step.norm(module.parameters()), batch_size=1)

    def _clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        clip_gradients_by_value(self.precision_plugin.main_params(optimizer), clip_val)

    def _clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        parameters = self.precision_plugin.main_params(optimizer)
        if self._train_step is None:
            self._norm = clip_gradients_by_norm(parameters, clip_val)
        else:
            self._norm = self._train_step.clip(cast(Any, parameters), clip_val)
            self._train_step.module.log("grad_norm", self._norm, batch_size=1)


# For the one thing that Lightning asks it: whether it trains `torch.compile(module)`.
SingleDeviceStrategy.register(D9DStrategy)
