"""Runs the batches of a fit, one after another, for a `D9DModule`. The arithmetic is in `train_step.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_d9d.loop.display import say
from lightning_d9d.loop.progress import LateProgress, warn_of_nonfinite
from lightning_d9d.mesh.agreement import Ranks
from lightning_d9d.mesh.collectives import all_gather_object
from lightning_d9d.strategy.step_in_backward import StepInBackward
from lightning_d9d.strategy.train_step import TrainStep
from lightning_d9d.strategy.training import BatchSettings, Training


class StagedTraining(Training):
    """Runs a `TrainStep` in Lightning's hooks, and logs its results.

    Args:
        train_step: The step.
        progress: Shows the loss one step late; None if the host has it at once.
        skips_nonfinite: As for `Training`.
        check_in_backward: Raises `ConfigError` if parameters cannot be updated inside the backward.
    """

    def __init__(
        self,
        train_step: TrainStep,
        progress: LateProgress | None,
        *,
        skips_nonfinite: bool,
        check_in_backward: Callable[[], None],
    ) -> None:
        self._check_in_backward = check_in_backward
        super().__init__(train_step.gradient_sync, train_step.optimizer_step, skips_nonfinite=skips_nonfinite)
        self.executor = train_step.executor
        self._train_step = train_step
        self._module = train_step.module
        self._progress = progress

    def begin(self, may_defer: Callable[[], bool]) -> None:
        """Decide settings that a checkpoint may have changed: options of the optimizer, callbacks."""
        super().begin(may_defer)
        if self._train_step.in_backward is not None:
            self._begin_in_backward(self._train_step.in_backward)
            return
        defers = may_defer()
        self._train_step.defers = defers if self._train_step.pipeline.mesh is None else all(all_gather_object(defers))

    def _begin_in_backward(self, in_backward: StepInBackward) -> None:
        with Ranks().agreed("the fit cannot begin"):
            in_backward.torn.check_fit()
            self._check_in_backward()
        trainer: Any = self._module.trainer
        if trainer.accumulate_grad_batches > 1 or not self._train_step.splitter.count.is_one:
            say(
                trainer,
                f"step_in_backward: microbatches are accumulated, so {self.gradients.num_accumulated_bytes:,} bytes of "
                "gradients are there before the last one of a step, whose updates free them",
            )

    def finish(self) -> None:
        """Report if the last batches counted nothing."""
        self.optimizer_step.empty.finish()

    def run(self, own: Callable[[], Any], inputs: Sequence[Any], settings: BatchSettings) -> Tensor:
        """Run the schedule of a batch. Its gradients are kept until `backward`."""
        if self._module.pipeline.batch_report.logs_every_norm and not settings.clips_by_norm:
            settings = replace(settings, logs_norm=True)
        self.settings = settings
        if (in_backward := self._train_step.in_backward) is not None:
            in_backward.keeps_norm, in_backward.max_value = settings.logs_norm, settings.max_value
        batch, batch_index = inputs
        loss, metrics = self._train_step.run(
            batch, batch_index, settings.accumulated_batches, self.is_last_batch, settings.plan
        )
        if settings.plan.is_idle:
            return loss
        self._module.log_train_step(loss, metrics, prog_bar=self._progress is None)
        shown = loss.item() if self._progress is None else self._progress.show("train_loss", loss)
        if shown is not None and not self.skips_nonfinite:
            warn_of_nonfinite(shown)
        return loss

    def _backward(self, own: Callable[[], None]) -> None:
        self._train_step.restore(is_last=self.is_last_batch)
        if self.settings.logs_norm and self.is_last_batch:
            self.last_norm = self._train_step.norm(self.gradients.parameters)
            self._module.log("grad_norm", self.last_norm, batch_size=1)
        if self.is_last_batch:
            for name, parameters in self._module.pipeline.batch_report.norm_groups.items():
                self._module.log(f"grad_norm/{name}", self._train_step.norm(parameters), batch_size=1)

    def clip(self, parameters: Iterable[Any], max_norm: float) -> None:
        """Clip gradients by their norm over all ranks, which is logged."""
        self._norm = self.last_norm = self._train_step.clip(parameters, max_norm)
        self._module.log("grad_norm", self._norm, batch_size=1)

    def step(self, optimizer: Optimizer, closure: Callable[[], Any], own: Callable[[], Any], **kwargs: Any) -> Any:
        """Run the closure first, because the schedule runs once. Then the optimizer steps, or skips the step."""
        result = closure()
        if self.is_idle:
            self._train_step.leave_out()
            return result
        self._train_step.step(optimizer, self._norm_for_skipping(), **kwargs)
        return result

    def close(self) -> None:
        """Drop hooks, and the contents of the executor. Local."""
        super().close()
        if self._train_step.in_backward is not None:
            self._train_step.in_backward.torn.close()
        self._train_step.executor.close()
