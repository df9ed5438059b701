"""The part of `D9DStrategy` that sees to equal numbers of batches on all data ranks; `uneven.py` has the loaders."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import lightning as L

from lightning_d9d.coordination.ahead import BatchPlan
from lightning_d9d.loop.display import adapt_display, resume_bar, silence, silence_hooks
from lightning_d9d.loop.uneven import (
    Alignment,
    align_loaders,
    begin_evaluation_step,
    check_lengths,
    leave_samplers,
    plan_of,
)
from lightning_d9d.pipeline.microbatch import MicrobatchCount
from lightning_d9d.strategy.batches import BatchSplitter
from lightning_d9d.strategy.checkpoints import CheckpointedStrategy
from lightning_d9d.strategy.eval_step import EvalStep
from lightning_d9d.strategy.module import D9DModule


class AlignedStrategy(CheckpointedStrategy):
    """Aligns loaders of D9DModules, and corrects what Lightning shows of a run.

    Args:
        options: For `CheckpointedStrategy`.
    """

    microbatch_count: MicrobatchCount
    """How many microbatches a batch makes; the subclass sets it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        silence()
        self.splitter: BatchSplitter | None = None
        """What splits batches of a D9DModule, in a run."""
        self._eval_step: EvalStep | None = None

    def connect(self, model: L.LightningModule) -> None:
        """Take the module that is going to run. Local."""
        super().connect(model)
        if isinstance(model, D9DModule):
            silence_hooks()

    def setup_environment(self) -> None:
        """Join the other ranks. Loaders keep their own order where all ranks read the same. Collective."""
        super().setup_environment()
        assert self.lightning_module is not None
        adapt_display(self.patches, self.lightning_module.trainer)
        if self.world_size > 1 and self.mesh.dp_size == 1:
            leave_samplers(self.patches, self.lightning_module.trainer)

    @property
    def needs_equal_batches(self) -> bool:
        """Whether forwards and backwards of a D9DModule may be collective over data ranks.

        Each then runs as many microbatches as the others, also in evaluation. Equal on all ranks.
        """
        return self.world_size > 1 and any(self.mesh.sizes[axis] > 1 for axis in ("dp_cp_shard", "ep_shard"))

    @property
    def is_dummy_batch(self) -> bool:
        """Whether this rank has no data for the current training batch, which is a copy that counts nothing.

        For hooks from `on_train_batch_start` to `on_train_batch_end` that count samples themselves.
        """
        return self.lightning_module is not None and plan_of(self.lightning_module.trainer.fit_loop).is_dummy

    def align_loaders(self, trainer: L.Trainer) -> None:
        """Let data ranks of a D9DModule have the same number of batches in this run. Collective.

        A plain module's loaders are read as they are, with the states that they had before Lightning read ahead.
        """
        module = self.lightning_module
        is_d9d = isinstance(module, D9DModule)
        is_alone = self.world_size == 1 or self.mesh.dp_size == 1 or not is_d9d
        counts = is_d9d and self.needs_equal_batches and not self.microbatch_count.is_one
        alignment = Alignment(
            group=None if is_alone else self.mesh.group("dp", backend="gloo"),
            in_evaluation=is_d9d and self.needs_equal_batches,
            num_microbatches=self._num_microbatches_of if counts else None,
            run_dummy=self._run_dummy,
            resumes=self.has_place_to_take,
        )
        align_loaders(self.patches, trainer, alignment)

    def on_train_start(self) -> None:
        """Go on where a checkpoint was saved, and show it."""
        super().on_train_start()
        assert self.lightning_module is not None
        resume_bar(self.lightning_module.trainer)

    def process_dataloader(self, dataloader: object) -> object:
        """Refuse a loader without a batch on some rank. Collective.

        Lightning would warn and train on nothing, or leave an evaluation out on that rank while others wait at its end.

        Raises:
            ConfigError: A D9DModule is to train on a loader that has no batch on some rank, or an evaluation of several
                ranks has one on some of them only; on every rank.
        """
        module = self.lightning_module
        assert module is not None
        trainer, is_d9d = module.trainer, isinstance(module, D9DModule)
        meets_at_end = (self.world_size > 1 and not trainer.predicting) or self.needs_equal_batches
        if is_d9d if trainer.training else meets_at_end:
            what = f"{'training ' if trainer.training else ''}{type(dataloader).__name__} of {type(module).__name__}"
            check_lengths(dataloader, what, trainer.training, alone=self.world_size == 1)
        return super().process_dataloader(dataloader)

    def _num_microbatches_of(self, batch: Any) -> int:
        assert self.splitter is not None
        return self.splitter.num_microbatches(batch)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """One batch: of a D9DModule by its stages, or a plain module's own `validation_step`."""
        return self._evaluate("val", super().validation_step, *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """As `validation_step`."""
        return self._evaluate("test", super().test_step, *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """As `validation_step`."""
        return self._evaluate("predict", super().predict_step, *args, **kwargs)

    def _evaluate(self, kind: str, of_lightning: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        plan, step = begin_evaluation_step(self.lightning_module.trainer._active_loop, batch), self._eval_step
        with self.evaluation_batch():
            if step is None:
                return of_lightning(batch, *args, **kwargs)
            plugin = self.precision_plugin
            contexts = {
                "val": plugin.val_step_context,
                "test": plugin.test_step_context,
                "predict": plugin.predict_step_context,
            }
            with contexts[kind]():
                return step.predict(batch, plan) if kind == "predict" else step.evaluate(batch, kind, plan)

    @contextmanager
    def evaluation_batch(self) -> Generator[None]:
        """For the step of a batch of validation, test or prediction."""
        if self._shutdown is not None:
            self._shutdown.begin_evaluation_batch()
        if self._interruption is not None:
            self._interruption.check()
        yield

    def _run_dummy(self, batch: Any, plan: BatchPlan) -> None:
        """Forwards of a batch of evaluation that other ranks run alone."""
        assert self._eval_step is not None
        with self.evaluation_batch(), self.precision_plugin.forward_context():
            self._eval_step.run_dummy(batch, plan)
