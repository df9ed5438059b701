"""Runs a program: a loop over forward and backward actions of the microbatches of one batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from lightning_d9d.errors import ConfigError, ScheduleError
from lightning_d9d.pipeline.types import StageInputs, WeightedLoss
from lightning_d9d.schedule import Action, Backward, Forward


class MicrobatchHooks(Protocol):
    """What the executor asks of a module; `D9DModule` documents each hook."""

    def microbatch_inputs(self, microbatch: Any) -> StageInputs:
        """Keyword arguments of the stages."""
        ...

    def microbatch_loss(self, output: Any, microbatch: Any) -> Tensor | WeightedLoss:
        """A scalar mean, or a sum with its weight."""
        ...

    def microbatch_metrics(self, output: Any, microbatch: Any) -> Mapping[str, Tensor | WeightedLoss]:
        """More scalars, without gradient."""
        ...


@dataclass
class BatchTotals:
    """Sums over the microbatches of one batch on this rank: name -> (sum of values, sum of weights), detached."""

    loss: tuple[Tensor, Tensor] | None = None
    metrics: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    loss_is_mean: bool | None = None

    def add_loss(self, loss: WeightedLoss, is_mean: bool) -> None:
        """Add one microbatch's loss."""
        if self.loss_is_mean not in (None, is_mean):
            raise ConfigError("microbatch_loss returned a Tensor for some microbatches and a WeightedLoss for others")
        self.loss = _add(self.loss, loss)
        self.loss_is_mean = is_mean

    def add_metrics(self, metrics: Mapping[str, Tensor | WeightedLoss], rows: int) -> None:
        """Add one microbatch's metrics; means weigh `rows`."""
        for name, value in metrics.items():
            self.metrics[name] = _add(self.metrics.get(name), as_weighted(value, rows, f"microbatch_metrics[{name!r}]"))


def _add(total: tuple[Tensor, Tensor] | None, part: WeightedLoss) -> tuple[Tensor, Tensor]:
    value, weight = part.value_sum.detach(), part.weight.detach()
    return (value, weight) if total is None else (total[0] + value, total[1] + weight)


def weighted_mean(value_sum: Tensor, weight: Tensor) -> Tensor:
    """value_sum / weight, and a sum of nothing (weight 0) as it is, without asking the host."""
    return value_sum / torch.where(weight == 0, 1.0, weight)


def as_weighted(value: Tensor | WeightedLoss, rows: int, name: str) -> WeightedLoss:
    """A mean over `rows` rows as a sum with that weight; a `WeightedLoss` as it is.

    Raises:
        ConfigError: The value is neither, or not a scalar.
    """
    if isinstance(value, Tensor) and value.numel() == 1:
        return WeightedLoss(value.reshape(()) * rows, torch.full((), float(rows), device=value.device))
    if isinstance(value, WeightedLoss) and value.value_sum.numel() == 1 and value.weight.numel() == 1:
        return WeightedLoss(value.value_sum.reshape(()), value.weight.reshape(()))
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
    raise ConfigError(
        f"{name} returned {type(value).__name__}{shape}; return a scalar Tensor (a mean over the microbatch) or "
        "WeightedLoss(value_sum, weight) of two scalars"
    )


class Executor:
    """Runs programs over the stages this rank holds.

    `forward_context` opens the precision context (autocast) around each forward and its loss; backwards run outside.
    """

    def __init__(
        self, stages: nn.ModuleList, hooks: MicrobatchHooks, forward_context: Callable[[], AbstractContextManager]
    ) -> None:
        self.stages = stages
        self.hooks = hooks
        self.forward_context = forward_context

    def run(
        self,
        actions: Sequence[Action],
        microbatches: Sequence[Any],
        rows: Sequence[int],
        scale: Callable[[BatchTotals], Tensor | float],
        before_last_backward: Callable[[], None],
    ) -> BatchTotals:
        """Run one stage's program, leaving gradients in `.grad`.

        Args:
            actions: Forward and backward actions on the microbatches.
            microbatches: What `split_batch` made of the batch.
            rows: Rows of each microbatch, the weight of a loss that is a mean.
            scale: Gives the factor on a value sum before its backward, from the totals so far.
            before_last_backward: Called once, before the backward after which no gradient of this batch arrives.
        """
        totals = BatchTotals()
        losses: dict[int, Tensor] = {}
        num_backwards = sum(isinstance(action, Backward) for action in actions)
        for action in actions:
            if not isinstance(action, Forward | Backward):
                raise ScheduleError(f"{action} cannot be run yet; choose a schedule of forwards and full backwards")
            m = action.microbatch
            with record_function(str(action)):
                if isinstance(action, Forward):
                    with self.forward_context():
                        losses[m] = self.forward(microbatches[m], rows[m], totals)
                else:
                    num_backwards -= 1
                    if num_backwards == 0:
                        before_last_backward()
                    (losses.pop(m) * scale(totals)).backward()
        return totals

    def forward(self, microbatch: Any, rows: int, totals: BatchTotals) -> Tensor:
        """Forward and loss of one microbatch, added to `totals`. Returns the value sum with its graph."""
        output = self.output(microbatch)
        loss = self.hooks.microbatch_loss(output, microbatch)
        weighted = as_weighted(loss, rows, "microbatch_loss")
        totals.add_loss(weighted, is_mean=isinstance(loss, Tensor))
        with torch.no_grad():
            totals.add_metrics(self.hooks.microbatch_metrics(output, microbatch), rows)
        return weighted.value_sum

    def forward_only(self, microbatches: Sequence[Any], rows: Sequence[int]) -> BatchTotals:
        """Forward and loss of each microbatch."""
        totals = BatchTotals()
        for microbatch, num in zip(microbatches, rows, strict=True):
            self.forward(microbatch, num, totals)
        return totals

    def output(self, microbatch: Any) -> Any:
        """The last stage's output for one microbatch."""
        inputs = self.hooks.microbatch_inputs(microbatch)
        if not isinstance(inputs, StageInputs):
            raise ConfigError(
                f"microbatch_inputs returned {type(inputs).__name__}; return StageInputs(first={{...}}, shared={{...}})"
            )
        return self.stages[0](**inputs.first, **inputs.shared)
