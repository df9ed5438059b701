"""`D9DModule`: a LightningModule that defines stages, the inputs of a microbatch and its loss."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import lightning as L
import torch
from lightning.pytorch.core.saving import _load_state
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_d9d.checkpoint import MODEL, is_directory, open_directory
from lightning_d9d.errors import ConfigError
from lightning_d9d.log import logger
from lightning_d9d.mesh import Axis, MeshConfig, MeshDomains
from lightning_d9d.mesh.agreement import first_of
from lightning_d9d.optim import ParameterGroup
from lightning_d9d.optim.settings import LRSchedulerFactory, NamedParameters, OptimizerFactory
from lightning_d9d.parallel import ParallelConfig, parallelize
from lightning_d9d.parallel.context import check_context
from lightning_d9d.parallel.tensor import split_for_heads
from lightning_d9d.peft import PeftMethod
from lightning_d9d.peft.inject import apply_plan
from lightning_d9d.pipeline.executor import loss_of, stage_inputs
from lightning_d9d.pipeline.initial_weights import materialize, recorded_values, share_equal_names, take_tensors
from lightning_d9d.pipeline.recorded_values import RecordedValue, Recording
from lightning_d9d.pipeline.rows import BatchRows
from lightning_d9d.pipeline.totals import BatchTotals, weighted_mean
from lightning_d9d.pipeline.types import StageInfo, StageInputs, WeightedLoss
from lightning_d9d.schedule import ModelCosts
from lightning_d9d.strategy.checkpoint_files import check_file, never_runs_code, unreadable
from lightning_d9d.strategy.context import Evaluation, RunContext
from lightning_d9d.strategy.metric_updates import no_metric_updated
from lightning_d9d.strategy.optimizers import OptimizedModule, first_names, named_parameters, ordered_names
from lightning_d9d.strategy.pipeline import Pipeline
from lightning_d9d.strategy.saved_arguments import NEVER_IMPORTS
from lightning_d9d.strategy.sharding import differing, is_sharded, spread_with, stage_places
from lightning_d9d.strategy.stage_names import add_stage_prefix, drop_stage_prefix, parameter_names
from lightning_d9d.strategy.trained_only import add_frozen, check_model


class D9DModule(OptimizedModule):
    """A model that `D9DStrategy` can split into stages and microbatches.

    Implement `configure_stage`, `microbatch_inputs` and `microbatch_loss`. The optimizer is a setting, or comes from
    `configure_optimizers` as usual.
    Training, validation, test and prediction follow; `train_loss`, `val_loss`, `test_loss` and the metrics are logged.
    The same module runs under Lightning's own strategies, where all stages are built on the device.

    Checkpoints use the parameter names of the stages, without a stage number. `self.stages` are this rank's stages.

    A name that several stages have is one parameter (tied embeddings). It starts equal, its gradients are summed over
    the stages, the norm counts it once, and it is saved once.

    Args:
        optimizer: Makes the optimizer; like the other arguments, as for `use_optimizer`.
        lr_scheduler: Makes its learning-rate schedule.
        parameter_groups: Parameters with a separate learning rate or weight decay.
    """

    share_predictions: bool = True
    """If True, `predict` returns the same on every rank. Otherwise ranks without the last stage get None."""

    sequence_dims: ClassVar[Mapping[str, int]] = {}
    """The dim of tokens in the tensors of a batch, by name. Context parallelism shards these tensors, and tensor
    parallelism must be able to share them. Microbatch hooks get the tokens of this rank."""

    sequence_padding: ClassVar[Mapping[str, int]] = {}
    """The number that pads sequences with `ParallelConfig.pad_sequences`, by name; 0 for other names. Padding must not
    count: give labels the number that the loss ignores."""

    prediction_dim: int | None = None
    """The dim of tokens in the result of `predict_output`, along which the parts of all ranks are joined. None: the
    result has no such dim, and each rank keeps its own."""

    def __init__(
        self,
        optimizer: OptimizerFactory | None = None,
        lr_scheduler: LRSchedulerFactory | None = None,
        parameter_groups: list[ParameterGroup] | None = None,
    ) -> None:
        super().__init__()
        self.use_optimizer(optimizer, lr_scheduler, parameter_groups)
        self.stages = nn.ModuleList()
        self._built: list[StageInfo] = []
        self._spread = (MeshConfig(), ParallelConfig())
        self._rows = BatchRows()
        self._parameter_order: list[str] | None = None
        self.is_whole = False  # True for what `whole_on_meta` returns
        self.names_of_stages: list[list[str]] = []
        """The names of the parameters of this rank's stages as `configure_stage` built them."""
        self.run_context: RunContext | None = None
        """The strategy's; None outside of a run and under Lightning's own strategies."""
        self.evaluation: Evaluation | None = None
        """The function by which `D9DStrategy` runs batches of validation, test and prediction, during a run."""
        self.peft: PeftMethod | None = None  # set by `set_peft`; None trains all parameters
        self.has_adapters = False  # as `lightning_d9d.peft.inject.BuildsStages` says
        self._in_schedule = False
        self._without_loss = False
        self.awaits_pretrained = False
        """True from the time that stages are built until `load_pretrained` has been called, or need not be."""
        self._step_hook: RemovableHandle | None = None
        self.register_state_dict_post_hook(drop_stage_prefix)
        self.register_load_state_dict_pre_hook(add_stage_prefix)

    # What a model implements

    def configure_stage(self, stage: StageInfo) -> nn.Module:
        """Build one stage. It runs under `torch.device("meta")`: tensors have shapes, but no values to read.

        Names must be global: a layer keeps its index in the whole model. Values that are set here (`nn.init`,
        `self.apply(_init_weights)`) are kept. Other parameters and buffers get values from their submodule's
        `reset_parameters()`, as in torch's layers, or `initial_values()`. The stage is called with the keyword
        arguments of `microbatch_inputs`.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement configure_stage(stage) -> nn.Module")

    def parallelize_stage(self, stage: nn.Module, mesh: MeshDomains | None, parallel: ParallelConfig) -> None:
        """Change a stage in place before it gets storage: recompute or compile blocks, shard parameters.

        By default it calls `lightning_d9d.parallel.parallelize`, with the entries of the stage's `ModuleList`s and
        `ModuleDict`s or the modules of the classes `parallel.shard_blocks` as blocks.

        Args:
            stage: Result of `configure_stage`, still on the meta device.
            mesh: The strategy's mesh domains; None for one process.
            parallel: The strategy's parallel configuration.
        """
        parallelize(stage, mesh, parallel)

    def microbatch_inputs(self, microbatch: Any) -> StageInputs:
        """Return the stages' keyword arguments from one microbatch."""
        raise NotImplementedError(f"{type(self).__name__} must implement microbatch_inputs(microbatch) -> StageInputs")

    def microbatch_loss(self, output: Any, microbatch: Any) -> Tensor | WeightedLoss:
        """Return the loss of the last stage's output: a scalar mean, or a `WeightedLoss` for exact weights (tokens)."""
        raise NotImplementedError(f"{type(self).__name__} must implement microbatch_loss(output, microbatch)")

    def prepare_batch(self, batch: Any) -> Any:
        """Return the batch, on the device, in the form for microbatch hooks; by default unchanged.

        It is called once, before the batch is split. Sequences are whole here, and every rank that shares a batch has
        all of it. The number of rows must stay the same.
        """
        return batch

    def split_batch(self, batch: Any, num_microbatches: int) -> list[Any]:
        """Split a batch into at most `num_microbatches` microbatches.

        By default tensors are split along dim 0, and so are lists with one entry for each row. Ambiguous lists are
        refused.
        """
        return self._rows.split(batch, num_microbatches)

    def microbatch_weight(self, microbatch: Any) -> Tensor | None:
        """Return the weight of `microbatch_loss` if it is known before the forward: it saves a pass over gradients."""
        return None

    def microbatch_metrics(self, output: Any, microbatch: Any) -> Mapping[str, Tensor | WeightedLoss]:
        """Return scalars to log beside the loss: means over the microbatch or `WeightedLoss` sums. Without gradient.

        They are reduced over microbatches and ranks after the schedule and logged as `train_<name>`, `val_<name>`, ...
        """
        return {}

    def predict_output(self, output: Any) -> Any:
        """Return the prediction for the last stage's output of one microbatch."""
        return output

    def on_after_optimizer_step(self, skipped: Tensor | None) -> None:
        """Called on all ranks after each optimizer step, before callbacks see the end of the batch.

        Args:
            skipped: True if the step was skipped (no token had any weight, or see `D9DStrategy.skip_nonfinite`). It is
                a bool on the device, equal on all ranks, to be read there without waiting. None: not skipped.
                Lightning's own strategies do not call this after a step that their loss scaler skipped.
        """

    def model_costs(self, sequence_length: int, bytes_per_element: int) -> ModelCosts | None:
        """Return the layers' costs for `schedule=Auto(...)`, before stages exist. None: unknown.

        Args:
            sequence_length: Tokens of a row.
            bytes_per_element: Bytes of an element of weights and activations.
        """
        return None

    # What follows from it

    def configure_model(self) -> None:
        """Build this rank's stages once: on the meta device, then with storage and initial weights on the device.

        A module that has run, or was loaded, is rebuilt if this run has other stages or spreads them differently. New
        stages reuse existing tensors if this rank has all of them: whole, or as DTensors of equal layout.

        Raises:
            ConfigError: This rank lacks some of these tensors.
        """
        self.check_overrides()
        self._rows = BatchRows()  # other data may have other lists
        infos = self.pipeline.stages
        if len(self.stages) > 0:
            if self._built and self._must_change(infos):
                self._build_again(infos)
            elif self.pipeline.mesh is not None:
                split_for_heads(self.stages, self.pipeline.mesh)
            return
        context = self.context
        for stage, recorded in self._on_meta(infos):
            self._warn_of_lost(materialize(stage, context.device, context.seed_of_job, recorded))
            self.stages.append(stage)
        self._built, self._spread = infos, self._spread_now
        share_equal_names(self.stages)
        self.on_stages_built()
        self.awaits_pretrained = True
        if not context.loads_pretrained:
            self.load_pretrained_once()

    def load_pretrained_once(self) -> None:
        """Call `load_pretrained` unless it was called since the stages were built."""
        if self.awaits_pretrained:
            self.awaits_pretrained = False
            self.load_pretrained()

    def whole_on_meta(self) -> Self:
        """Return a copy with the stages of the whole model, on the meta device and not spread over ranks. Local."""
        if self.is_whole:
            return self
        apart = self._whole_without_peft()
        self._adapt(apart.stages, apart.stages[0])
        apart.is_whole = True
        return apart

    def _whole_without_peft(self) -> Self:
        apart = object.__new__(type(self))  # what configure_stage sets lands there
        apart.__dict__.update(self.__dict__)
        for kind in ("_parameters", "_buffers", "_modules"):
            apart.__dict__[kind] = dict(self.__dict__[kind])
        with torch.device("meta"):
            apart.stages = nn.ModuleList([apart.configure_stage(StageInfo(0, 1))])
        return apart

    def set_peft(self, method: PeftMethod) -> None:
        """Call `lightning_d9d.peft.inject` with this module.

        Raises:
            ConfigError: The stages are already built, or there is already a method.
        """
        if len(self.stages) > 0 or self.peft is not None:
            state = "a method already" if self.peft is not None else "its stages already"
            raise ConfigError(f"inject: {type(self).__name__} has {state}; call it once, in __init__()")
        self.peft = method

    def _adapt(self, stages: Iterable[nn.Module], whole: nn.Module) -> None:
        """Apply `set_peft` to stages of a whole model on the meta device."""
        if self.peft is not None:
            plan = self.peft.plan(whole)
            self.has_adapters = bool(plan.adapters)
            for stage in stages:
                apply_plan(stage, plan)

    def parameter_order(self) -> list[str]:
        """Return the names of all stages' parameters, in the order of one process that has all of them. Local."""
        self._parameter_order = self._parameter_order or ordered_names(self.whole_on_meta())
        return self._parameter_order

    def named_for_optimizer(self) -> NamedParameters:
        """Return parameters by global names; embeddings are found in the whole model, because stages may share them."""
        whole = self.whole_on_meta()
        self._parameter_order = ordered_names(whole)
        own = {name: parameter for parameter, name in first_names(self.state_dict(keep_vars=True)).items()}
        return named_parameters(own, whole.stages[0], self._parameter_order)

    @property
    def _spread_now(self) -> tuple[MeshConfig, ParallelConfig]:
        """The mesh and the parallel settings that spread this run's stages."""
        mesh = MeshConfig() if self.pipeline.mesh is None else self.pipeline.mesh.config
        return spread_with(mesh, self.context.parallel)

    def _must_change(self, infos: list[StageInfo]) -> bool:
        if stage_places(self._built) != stage_places(infos):
            return True
        is_spread = is_sharded(self.stages) or self._spread[0] != MeshConfig()
        return self._spread != self._spread_now and (is_spread or not self.context.is_stock)

    def _on_meta(self, infos: Iterable[StageInfo]) -> list[tuple[nn.Module, dict[str, RecordedValue]]]:
        """Build the stages; return them and the values that their tensors were given, by name."""
        stages, values = [], []
        for info in infos:
            with torch.device("meta"), Recording() as recording:
                stages.append(self.configure_stage(info))
            values.append(recorded_values(recording, stages[-1]))
        if self.peft is not None:
            self._adapt(stages, self._whole_without_peft().stages[0])
        self.names_of_stages = [parameter_names(stage) for stage in stages]
        if self.pipeline.mesh is not None:
            split_for_heads(stages, self.pipeline.mesh)
        for stage in stages:
            self.parallelize_stage(stage, self.pipeline.mesh, self.context.parallel)
            if self.pipeline.tokens.sequence.size > 1:
                check_context(stage)
        self.context.check_memory(self, stages)
        return list(zip(stages, values, strict=True))

    def _warn_of_lost(self, names: list[str]) -> None:
        mesh = self.pipeline.mesh
        if names and (mesh is None or not any(place for axis, place in mesh.coordinates.items() if axis != Axis.PP)):
            logger.warning(
                "%s.parallelize_stage has exchanged %s, so what configure_stage gave them is lost; give it in "
                "reset_parameters() of their submodules, or in on_stages_built()",
                *(type(self).__name__, first_of(names)),
            )

    def _build_again(self, infos: list[StageInfo]) -> None:
        stages = nn.ModuleList(stage for stage, _ in self._on_meta(infos))
        if missing := take_tensors(stages, self.stages):
            before, now = differing(self._spread, self._spread_now)
            if stage_places(self._built) != stage_places(infos):
                before, now = [f"the stages {self._built}", *before], [f"{infos} on this rank", *now]
            raise ConfigError(
                f"{type(self).__name__} holds the weights for {', '.join(before)} of an earlier run. This run has "
                f"{', '.join(now)}, and cannot build {first_of(missing)} from them. Give it a new module, and a "
                "checkpoint of the earlier run as ckpt_path"
            )
        for stage in stages:
            stage.to(self.context.device)
        self.stages, self._built, self._spread = stages, infos, self._spread_now

    @property
    def context(self) -> RunContext:
        """The context of this module's run: the strategy's, or that of a stock strategy's one process."""
        if self.run_context is not None:
            return self.run_context
        return RunContext.stock(torch.device("cpu") if self._trainer is None else self.trainer.strategy.root_device)

    @property
    def pipeline(self) -> Pipeline:
        """This rank's place in the pipeline. Under a stock strategy it is alone, with one stage."""
        return self.context.pipeline

    @property
    def seed_of_weights(self) -> int | None:
        """The seed that determines initial weights; None if `load_pretrained` may load others."""
        if type(self).load_pretrained is not D9DModule.load_pretrained and getattr(self, "pretrained", "") is not None:
            return None
        return self.context.seed_of_job

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Check adapters' scales, and add what `CheckpointConfig.trainable_only` left out; overrides must call it."""
        check_model(checkpoint, self, self.seed_of_weights, "the checkpoint")
        add_frozen(checkpoint, self)

    @property
    def indexed_stages(self) -> dict[int, nn.Module]:
        """This rank's stages by index in the whole model."""
        return dict(zip((info.index for info in self.pipeline.stages), self.stages, strict=True))

    @classmethod
    def load_from_checkpoint(
        cls,
        checkpoint_path: Any,
        map_location: Any = None,
        hparams_file: Any = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Self:
        """Load like Lightning, from a file or a directory; a directory is read whole, to the CPU. Not collective.

        The object is always of this class, even if the checkpoint names another. Nothing that it names is imported.
        Dataclasses, enums and tuples that the command line saved are built as `__init__` is annotated. Other objects
        must be passed.

        Args:
            checkpoint_path: A file or a checkpoint directory.
            map_location: For files.
            hparams_file: For files.
            strict: Whether all names must be the same in the module and the checkpoint; by default the module decides.
            weights_only: For files: False lets them run code and name classes. A directory never does.
            kwargs: Arguments of `__init__`, which override the saved ones.

        Raises:
            StateError: A saved argument does not fit, or is an object that must be passed.
        """
        if not isinstance(checkpoint_path, str | Path) or not is_directory(checkpoint_path):
            if isinstance(checkpoint_path, str | Path) and Path(checkpoint_path).is_dir():
                raise unreadable(checkpoint_path, IsADirectoryError())
            weights_only = never_runs_code(checkpoint_path, weights_only)
            check_file(checkpoint_path, weights_only)
            kwargs |= {} if weights_only is False else NEVER_IMPORTS
            return super().load_from_checkpoint(
                checkpoint_path, map_location, hparams_file, strict, weights_only, **kwargs
            )
        checkpoint = open_directory(checkpoint_path, alone=True)
        weights = checkpoint.read(MODEL)
        values = {**checkpoint.values, "state_dict": {n.removeprefix(MODEL): w for n, w in weights.items()}}
        values[cls.CHECKPOINT_HYPER_PARAMS_KEY] = {**values.get(cls.CHECKPOINT_HYPER_PARAMS_KEY, {}), **kwargs}
        return cast(Self, _load_state(cls, values, strict=strict, **kwargs, **NEVER_IMPORTS))

    def on_stages_built(self) -> None:
        """Called once after the stages have their initial weights: before those of a checkpoint are loaded."""

    def load_pretrained(self) -> None:
        """Called once on all ranks after `on_stages_built`; load pretrained weights here.

        Under `D9DStrategy` it is skipped in a run that begins with a checkpoint (`ckpt_path`) of all parameters.
        """

    def check_overrides(self) -> None:
        """Raise `ConfigError` if a method was overridden that would never run."""
        for name, remedy in (
            ("training_step", "the loss goes into microbatch_loss, extra values into microbatch_metrics"),
            ("validation_step", "the loss goes into microbatch_loss, extra values into microbatch_metrics"),
            ("test_step", "the loss goes into microbatch_loss, extra values into microbatch_metrics"),
            ("predict_step", "use predict_output"),
            ("backward", "gradients come from the schedule; use the hook on_after_backward"),
        ):
            base = getattr(L.LightningModule if name == "backward" else D9DModule, name)
            if getattr(type(self), name) is not base:
                raise ConfigError(
                    f"{type(self).__name__}.{name} is overridden, but a D9DModule does not run it: {remedy}"
                )
        if self._compiler_ctx is not None:
            raise ConfigError(
                f"torch.compile({type(self).__name__}) compiles steps that a D9DModule does not run; use "
                "D9DStrategy(parallel=ParallelConfig(compile=True)), which compiles its blocks"
            )
        if not self.automatic_optimization:
            raise ConfigError(
                f"{type(self).__name__}.automatic_optimization is False; a D9DModule is optimized automatically. Use a "
                "plain LightningModule for manual optimization"
            )

    def forward(self, batch: Any) -> Any:
        """Return the output of the whole model for a batch, in the form for `microbatch_loss`; with gradients.

        The whole module must be in this process: after `load_from_checkpoint`, a run without pipeline, context and
        tensor parallelism, or `configure_model()`. The batch must be on the module's device, and is not split.
        Collective over the ranks that shard the weights, if any do.

        Raises:
            ConfigError: The stages are not built yet, or this rank has a part of them, or of the sequences.
        """
        name = type(self).__name__
        if len(self.stages) == 0:
            raise ConfigError(
                f"the stages of {name} are built when a Trainer starts; call configure_model() to build them earlier"
            )
        mesh = self._spread[0]
        shares_sequences = mesh.tensor_parallel * mesh.context_parallel_shard * mesh.context_parallel_replicate > 1
        if self._built[0].num_stages > 1 or shares_sequences:
            raise ConfigError(
                f"this rank has a part of {name} or of its sequences: use Trainer.predict on all ranks, or "
                f"{name}.load_from_checkpoint in one process"
            )
        with self.without_loss():
            return self._output_of(self.prepare_batch(batch))

    def _output_of(self, batch: Any) -> Any:
        inputs = stage_inputs(self, batch)
        return self.stages[0](**inputs.first, **inputs.shared)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Run one batch under a stock strategy; `D9DStrategy` runs `train_step.TrainStep` instead."""
        self._watch_optimizer()
        totals = BatchTotals()
        batch = self.prepare_batch(batch)
        with self.schedule_running():
            output = self._output_of(batch)
            value_sum = loss_of(self, output, batch, self.rows_of(batch), totals)
        assert totals.loss is not None
        loss = weighted_mean(value_sum, totals.loss[1])
        metrics = {name: weighted_mean(*pair) for name, pair in totals.metrics.items()}
        self.log_train_step(loss.detach(), metrics)
        return loss

    def _watch_optimizer(self) -> None:
        """Watch the optimizer under a stock strategy; again with each batch, because each fit has its own."""
        if self._step_hook is not None:
            self._step_hook.remove()
        for optimizer in self.trainer.optimizers:  # one, or none
            self._step_hook = optimizer.register_step_post_hook(lambda *_: self.on_after_optimizer_step(None))

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Tensor]:
        """Run one batch and log `val_loss`. `D9DStrategy` calls `evaluation` directly."""
        return self._evaluate(batch, "val")

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Tensor]:
        """Evaluate a batch like `validation_step`, and log `test_loss`."""
        return self._evaluate(batch, "test")

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        """Run a batch like `validation_step`, and return its `predict_output`."""
        if self.evaluation is not None:
            return self.evaluation.predict(batch)
        return self.predict_output(self._output_of(self.prepare_batch(batch)))

    def _evaluate(self, batch: Any, prefix: str) -> dict[str, Tensor]:
        if self.evaluation is not None:
            return self.evaluation.evaluate(batch, prefix)
        totals, batch = BatchTotals(), self.prepare_batch(batch)
        with self.schedule_running():
            loss_of(self, self._output_of(batch), batch, self.rows_of(batch), totals)
        assert totals.loss is not None
        pairs = {"loss": totals.loss, **dict(sorted(totals.metrics.items()))}
        values, weights = (torch.stack([pair[i].double() for pair in pairs.values()]) for i in (0, 1))
        dtype = torch.promote_types(totals.loss[0].dtype, torch.float32)
        return self.log_eval_step(prefix, pairs, weighted_mean(values, weights).to(dtype), weights)

    # For the steps

    @property
    def makes_loss(self) -> bool:
        """True if `microbatch_loss` is called for the current batch, which then needs labels, for example."""
        return not (self._without_loss or self._trainer is None or self.trainer.predicting)

    @contextmanager
    def without_loss(self) -> Generator[None]:
        """Make `makes_loss` False inside the block."""
        before, self._without_loss = self._without_loss, True
        try:
            yield
        finally:
            self._without_loss = before

    def count_rows(self, batch: Any) -> int:
        """Count the rows of a batch that will be split by rows.

        Raises:
            ConfigError: Its tensors have no common number of rows.
        """
        return self._rows.count(batch)

    def rows_of(self, microbatch: Any) -> int | None:
        """Return the rows of a microbatch, the weight of a mean; None without rows, as for packed sequences."""
        try:
            return self._rows.count(microbatch, strict=False)
        except ConfigError:
            return None

    @contextmanager
    def schedule_running(self) -> Generator[None]:
        """Refuse `self.log` inside the block: microbatch hooks run at different moments on different ranks.

        Raises:
            ConfigError: A torchmetrics metric was updated in a hook that runs only on the ranks of the last stage.
        """
        with no_metric_updated(self) if self.pipeline.group is not None else nullcontext():
            self._in_schedule = True
            try:
                yield
            finally:
                self._in_schedule = False

    def log_train_step(self, loss: Tensor, metrics: Mapping[str, Tensor], prog_bar: bool = True) -> None:
        """Log values that are already equal on every rank."""
        self.log("train_loss", loss, prog_bar=prog_bar, batch_size=1)
        for name, value in metrics.items():
            self.log(f"train_{name}", value, batch_size=1)

    def log_eval_step(self, prefix: str, names: Iterable[str], means: Tensor, weights: Tensor) -> dict[str, Tensor]:
        """Log the loss and the metrics of a batch of evaluation.

        Lightning sums each value times its weight over batches and ranks, and divides by the summed weights at the end
        of the epoch. So the result is exact for any distribution of tokens.

        Returns:
            The means by name, the loss first, and "weight", the divisor of the loss.
        """
        result = {"weight": weights[0]}
        for name, mean, weight in zip(names, means, weights, strict=True):
            result[name] = mean
            self.log(
                f"{prefix}_{name}",
                mean,
                on_step=False,
                on_epoch=True,
                prog_bar=name == "loss",
                sync_dist=True,
                batch_size=weight,  # type: ignore[arg-type]  # Lightning only multiplies by it; a tensor spares a sync
            )
        return result

    def log(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Log like Lightning, but not inside microbatch hooks, where ranks are at different points of the schedule.

        Raises:
            ConfigError: Called inside a microbatch hook.
        """
        if self._in_schedule:
            raise ConfigError(
                f"self.log({name!r}, ...) inside a microbatch hook: return the value from microbatch_metrics instead, "
                "which is reduced over microbatches and ranks and logged once a batch"
            )
        super().log(name, *args, **kwargs)
