"""Runs the batches of a fit, one after another, for a plain module; `staged_training.py` has the other kind.

Lightning's hooks come in this order: `run`, `backward`, clipping, and `step`, whose closure has run the others.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_d9d.coordination.ahead import NOTHING_AGREED, BatchPlan
from lightning_d9d.pipeline.executor import Executor
from lightning_d9d.strategy.fit_memory import FitMemory
from lightning_d9d.strategy.gradient_sync import GradientSync
from lightning_d9d.strategy.optimizer_step import OptimizerStep
from lightning_d9d.strategy.window import cast_gradients
from lightning_d9d.sync.norm import clip_gradients_by_norm


@dataclass(frozen=True, kw_only=True)
class BatchSettings:
    """The Trainer's settings for a training batch."""

    accumulated_batches: int = 1
    """The number of batches of a full window."""
    clips_values: bool = False
    """True if gradients are clipped one by one, which hides infinite ones from the norm."""
    max_value: float | None = None
    """The limit of gradients that are clipped one by one; None if they are not."""
    logs_norm: bool = False
    """True if the norm of the gradients is logged without clipping by it."""
    clips_by_norm: bool = False
    """True if gradients are clipped by their norm, which is then logged."""
    plan: BatchPlan = NOTHING_AGREED
    """The agreement of data ranks about the batch."""

    @classmethod
    def of(cls, trainer: Any, plan: BatchPlan) -> BatchSettings:
        """Read the settings from a Trainer that is about to run the batch."""
        clips_values = trainer.gradient_clip_algorithm == "value"
        clips_by_norm = bool(trainer.gradient_clip_val) and not clips_values
        every = trainer.log_every_n_steps  # 0: never
        return cls(
            accumulated_batches=trainer.accumulate_grad_batches,
            clips_values=clips_values,
            max_value=trainer.gradient_clip_val if clips_values else None,
            clips_by_norm=clips_by_norm,
            logs_norm=not clips_by_norm and every > 0 and (trainer.global_step + 1) % every == 0,
            plan=plan,
        )


class Training(ABC):
    """Runs batches and steps optimizers. Every method is collective over the ranks that share gradients.

    Args:
        gradients: Sums gradients over ranks.
        optimizer_step: Steps or skips.
        skips_nonfinite: Whether steps are skipped if the norm of all gradients is not finite.
    """

    executor: Executor | None = None
    """Runs the training programs of a D9DModule; None for a plain module."""
    memory: FitMemory | None = None
    """Knows the memory that steps need on the rank; None outside of a fit."""

    def __init__(self, gradients: GradientSync, optimizer_step: OptimizerStep, *, skips_nonfinite: bool) -> None:
        self.gradients = gradients
        self.optimizer_step = optimizer_step
        self.skips_nonfinite = skips_nonfinite
        self.settings = BatchSettings()
        """The settings of the batch that is trained on."""
        self.is_last_batch = True
        """True if the optimizer steps after this batch: gradients are summed over ranks then."""
        self.window_is_open = False
        """True if there are gradients of batches for which no step was taken."""
        self.is_idle = False
        """True if only other replicas have data for the batches of the window: no step is taken."""
        self._norm: Tensor | None = None
        """The norm of the gradients before they were clipped."""
        self.last_norm: Tensor | None = None
        """The same, of the last step in which it was computed."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Training:
        """Return this object: hooks and groups belong to one run, and copies of its Trainer share them."""
        return self

    @contextmanager
    def inside_of_window(self) -> Generator[None]:
        """Keep gradients on the rank, for batches after which the optimizer does not step, inside the block."""
        self.is_last_batch = False
        try:
            yield
        finally:
            self.is_last_batch = True

    def begin(self, may_defer: Callable[[], bool]) -> None:
        """Begin to train, perhaps from a checkpoint.

        Args:
            may_defer: Whether the optimizer can take division and clipping as a factor, without visible effect.

        Raises:
            ConfigError: Parameters cannot be updated inside the backward, or a step cannot fit into the memory.
            StateError: The weights are torn after a failure of an earlier fit.
        """
        del may_defer
        if self.memory is not None:
            self.memory.check()

    def note(self, error: BaseException) -> None:
        """Add the contents of the memory to an error, if it ran out. Local."""
        if self.memory is not None:
            self.memory.note(error)

    def finish(self) -> None:
        """Report the remaining facts at the end of a fit."""
        return

    def begin_batch(self, plan: BatchPlan) -> None:
        """Note what data ranks agreed on for the batch that comes. Local."""
        self.is_idle = plan.is_idle and (self.is_idle or not self.window_is_open)

    def counted(self, loss: Tensor) -> Tensor:
        """Return the loss of a plain module as it counts. Local."""
        return loss * 0.0 if self.settings.plan.is_idle else loss

    @abstractmethod
    def run(self, own: Callable[[], Any], inputs: Sequence[Any], settings: BatchSettings) -> Any:
        """Run the training step of a batch, and return the result for Lightning.

        Args:
            own: Lightning's training step, for plain modules.
            inputs: The positional arguments of the step.
            settings: The Trainer's settings for the batch.
        """

    def backward(self, own: Callable[[], None]) -> None:
        """Leave the gradients of the batch on the parameters; after a window's last batch they are summed over ranks.

        Args:
            own: Lightning's backward, for plain modules.
        """
        self._backward(own)
        if self.skips_nonfinite and self.settings.clips_values and self.is_last_batch:
            self._norm = self.last_norm = self.gradients.norm()
        self.window_is_open = not self.is_last_batch

    @abstractmethod
    def _backward(self, own: Callable[[], None]) -> None: ...

    @abstractmethod
    def clip(self, parameters: Iterable[Any], max_norm: float) -> None:
        """Clip gradients by their norm over all ranks."""

    @abstractmethod
    def step(self, optimizer: Optimizer, closure: Callable[[], Any], own: Callable[[], Any], **kwargs: Any) -> Any:
        """Run the closure and step the optimizer, or skip the step. Return the result of the closure.

        Args:
            optimizer: Any.
            closure: Runs the batch, backward and clipping.
            own: Lightning's own step with this closure, for plain modules.
            kwargs: For `optimizer.step`.
        """

    def _norm_for_skipping(self) -> Tensor | None:
        """Return the norm that must be finite; None if steps are never skipped."""
        norm, self._norm = self._norm, None
        if not self.skips_nonfinite:
            return None
        return self.gradients.norm() if norm is None else norm

    def close(self) -> None:
        """Drop hooks. Local."""
        self.gradients.close()


class PlainTraining(Training):
    """Keeps Lightning's own order of hooks, and sums gradients while its backward runs.

    Args:
        gradients: Sums gradients over ranks.
        optimizer_step: Steps or skips.
        num_data_ranks: The data ranks over which gradients are means.
        skips_nonfinite: As for `Training`.
    """

    def __init__(
        self, gradients: GradientSync, optimizer_step: OptimizerStep, num_data_ranks: int, *, skips_nonfinite: bool
    ) -> None:
        super().__init__(gradients, optimizer_step, skips_nonfinite=skips_nonfinite)
        self._num_data_ranks = num_data_ranks

    def run(self, own: Callable[[], Any], inputs: Sequence[Any], settings: BatchSettings) -> Any:
        """Run the module's own `training_step`."""
        self.settings = settings
        return own()

    def _backward(self, own: Callable[[], None]) -> None:
        buckets = self.gradients.buckets if self.is_last_batch else None
        if buckets is not None:
            buckets.start()
        own()
        if buckets is not None:
            buckets.finish(divisor=self._num_data_ranks)

    def clip(self, parameters: Iterable[Any], max_norm: float) -> None:
        """Clip gradients by their norm."""
        self._norm = self.last_norm = clip_gradients_by_norm(parameters, max_norm)

    def step(self, optimizer: Optimizer, closure: Callable[[], Any], own: Callable[[], Any], **kwargs: Any) -> Any:
        """Step like Lightning, unless gradients have another dtype or steps may be skipped."""
        if self.is_idle:
            return closure()
        if self.skips_nonfinite:
            result = closure()
            norm = self._norm_for_skipping()
            assert norm is not None
            cast_gradients(self.gradients.parameters, optimizer)
            self.optimizer_step(optimizer, ~norm.isfinite(), **kwargs)
            return result
        if self.gradients.config.dtype == "auto":
            return own()
        return optimizer.step(closure=functools.partial(self._run_and_cast, optimizer, closure), **kwargs)

    def _run_and_cast(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
        result = closure()
        cast_gradients(self.gradients.parameters, optimizer)
        return result
