"""Learning-rate schedules of phases, such as warm-up, stable and decay."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_d9d.errors import ConfigError, did_you_mean

Curve = Literal["linear", "cosine", "polynomial", "exponential"]
"""The curve of a factor from one value to another."""

_LEAST_EXPONENTIAL = 1e-8
"""Lowest start and end of an exponential curve, which would never reach 0."""
_CURVES: dict[str, Callable[[float, float, float, float], float]] = {
    "linear": lambda start, end, done, _: start + (end - start) * done,
    "cosine": lambda start, end, done, _: end + (start - end) * (1 + math.cos(math.pi * done)) / 2,
    "polynomial": lambda start, end, done, power: start + (end - start) * done**power,
    "exponential": lambda start, end, done, _: _exponential(start, end, done),
}


def _exponential(start: float, end: float, done: float) -> float:
    first, last = (math.log(max(value, _LEAST_EXPONENTIAL)) for value in (start, end))
    return math.exp(first + (last - first) * done)


@dataclass(frozen=True)
class Phase:
    """A part of a learning-rate schedule: its factor goes from that of the previous phase to `to`.

    Its end is given by `steps` or by `until`. With neither, it takes the rest of the run.

    Raises:
        ConfigError: A value is out of range, or `steps` and `until` are both given.
    """

    to: float
    """The factor of the learning rate at its end; 1 is the optimizer's own learning rate."""
    steps: int | None = None
    """The number of optimizer steps in the phase."""
    until: float | None = None
    """The end of the phase, from 0 to 1, as a fraction of the optimizer steps of the whole run."""
    curve: Curve = "linear"
    """How the factor changes. An exponential curve from 0 begins at 1e-8 instead."""
    power: float | None = None
    """Exponent of a polynomial curve, 2 by default; above 1 it changes slowly at first."""

    def __post_init__(self) -> None:
        if self.steps is not None and self.until is not None:
            raise ConfigError(f"Phase got steps={self.steps} and until={self.until}, which both set its end; give one")
        if self.to < 0:
            raise ConfigError(f"to={self.to} of Phase must be at least 0; 1 is the optimizer's own learning rate")
        if self.steps is not None and self.steps < 0:
            raise ConfigError(f"steps={self.steps} of Phase must be at least 0")
        if self.until is not None and not 0 <= self.until <= 1:
            raise ConfigError(f"until={self.until} of Phase must be between 0 and 1, a fraction of all steps")
        if self.curve not in _CURVES:
            raise ConfigError(
                f"curve={self.curve!r} of Phase must be one of {', '.join(map(repr, _CURVES))}"
                f"{did_you_mean(self.curve, _CURVES)}"
            )
        if self.power is not None and self.curve != "polynomial":
            raise ConfigError(f"power={self.power} of Phase has no effect on curve={self.curve!r}; leave it out")
        if self.power is not None and self.power <= 0:
            raise ConfigError(f"power={self.power} of Phase must be above 0")


class _Span(NamedTuple):
    """A phase with its place in a run."""

    start: int
    end: int
    before: float
    phase: Phase

    def factor(self, step: int) -> float:
        """Return the factor of the learning rate at a step of the phase."""
        done = (step - self.start) / (self.end - self.start)
        return _CURVES[self.phase.curve](self.before, self.phase.to, done, self.phase.power or 2.0)


def _step_of(until: float | None, total_steps: int) -> int:
    """Return the step at a fraction of a run; `0.29 * 100` is slightly below 29."""
    return math.floor(total_steps * (1.0 if until is None else until) + 1e-9)


def _spans(phases: Sequence[Phase], initial: float, total_steps: int | None) -> Iterator[_Span]:
    """Place phases one after the other.

    Raises:
        ConfigError: Phases do not fit into the run, or its number of steps is needed and unknown.
    """
    cursor, before = 0, initial
    for number, phase in enumerate(phases):
        if phase.steps is not None:
            end = cursor + phase.steps
        elif total_steps is None:
            raise ConfigError(
                f"phase {number} ({phase}) needs the number of steps of the run; set max_steps of the Trainer, "
                "total_steps of the schedule, or steps of each phase"
            )
        else:
            end = _step_of(phase.until, total_steps)
        if end < cursor:
            raise ConfigError(
                f"phase {number} ({phase}) ends at step {end} of {total_steps}, but the phases before take {cursor}; "
                f"set until to at least {cursor}/{total_steps}"
            )
        if total_steps is not None and end > total_steps:
            raise ConfigError(
                f"phase {number} ({phase}) ends at step {end}, but the run has {total_steps} optimizer steps; give "
                "phases fewer steps, or the run more (Trainer.max_steps or max_epochs)"
            )
        yield _Span(cursor, end, before, phase)
        cursor, before = end, phase.to


class PiecewiseLR(LRScheduler):
    """Learning rates in phases, each of which goes from the previous factor to its own.

    It is stepped after each optimizer step. Step n of a phase from step s to step e has the place (n - s) / (e - s) on
    its curve. So the first step of a run has the factor `initial`. The first step of a phase has the factor with which
    the phase before it ends. After the last phase its factor stays.

    Every parameter group keeps its own learning rate, which is multiplied by the factor. State has the number of steps
    and learning rates: phases and the number of steps are those of the resumed run.

    Args:
        optimizer: Optimizer whose learning rates are changed.
        phases: Phases, one after the other.
        initial: The factor of the first step.
        total_steps: Optimizer steps of the whole run. A `D9DModule` with this schedule as `lr_scheduler` knows them.

    Raises:
        ConfigError: There are not any phases, phases take more steps than the run has, or one ends before another
            begins. In `step`: the number of steps is needed and unknown.
    """

    def __init__(
        self, optimizer: Optimizer, phases: Sequence[Phase], initial: float = 0.0, total_steps: int | None = None
    ) -> None:
        if not phases:
            raise ConfigError(f"{type(self).__name__} got no phases; give at least one, such as Phase(to=1.0)")
        if initial < 0:
            raise ConfigError(f"initial={initial} of {type(self).__name__} must be at least 0")
        self.phases = list(phases)
        self.initial = initial
        self.total_steps = total_steps
        is_placed = total_steps is not None or all(phase.steps is not None for phase in phases)
        self._spans = self._placed(total_steps) if is_placed else None
        super().__init__(optimizer)

    def phases_of(self, total_steps: int) -> Sequence[Phase]:
        """Return the phases of a run with this many steps."""
        return self.phases

    def _placed(self, total_steps: int | None) -> list[_Span]:
        phases = self.phases if total_steps is None else self.phases_of(total_steps)
        return list(_spans(phases, self.initial, total_steps))

    def set_total_steps(self, total_steps: int | None) -> None:
        """Set the number of optimizer steps of the whole run; learning rates change at once.

        Args:
            total_steps: Number of steps, including those before a resume. None: the run has no end, so every phase must
                have its steps.

        Raises:
            ConfigError: Phases do not fit into the run, or its number of steps is needed and unknown.
        """
        self._spans = self._placed(total_steps)
        self.total_steps = total_steps
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]

    def factor(self, step: int) -> float:
        """Return the factor of learning rates at a step, which counts from 0.

        Raises:
            ConfigError: The number of steps of the run is needed and unknown.
        """
        if self._spans is None and step <= 0:
            return self.initial
        spans = self._placed(None) if self._spans is None else self._spans
        within = (span for span in spans if span.start <= step < span.end)
        return next((span.factor(step) for span in within), spans[-1].phase.to)

    def get_lr(self) -> list[Any]:  # type: ignore[override]
        """Return the learning rates of the groups at the present step."""
        factor = self.factor(self.last_epoch)
        return [rate * factor for rate in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps and the learning rates."""
        own = {"phases", "initial", "total_steps", "_spans"}
        return {name: value for name, value in super().state_dict().items() if name not in own}


class WarmupStableDecayLR(PiecewiseLR):
    """Learning rates that rise, stay, and fall at the end of the run.

    With `decay_fraction=1` they fall from the end of the warm-up on: the usual cosine schedule is
    `WarmupStableDecayLR(optimizer, warmup_steps=100, decay_fraction=1, curve="cosine")`.

    Args:
        optimizer: Optimizer whose learning rates are changed.
        warmup_steps: Steps of a linear rise from `initial` to the optimizer's own learning rate.
        decay_fraction: Fraction of the run, from 0 to 1, in which they fall at its end.
        curve: Curve of the fall.
        final: Factor at the end.
        initial: Factor of the first step of a warm-up. With 0 that step changes no weights.
        total_steps: Optimizer steps of the whole run; as for `PiecewiseLR`.

    Raises:
        ConfigError: A value is out of range, or the warm-up is longer than the run.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_steps: int = 0,
        decay_fraction: float = 0.1,
        curve: Curve = "linear",
        final: float = 0.0,
        initial: float = 0.0,
        total_steps: int | None = None,
    ) -> None:
        if warmup_steps < 0:
            raise ConfigError(f"warmup_steps={warmup_steps} of WarmupStableDecayLR must be at least 0")
        if not 0 <= decay_fraction <= 1:
            raise ConfigError(f"decay_fraction={decay_fraction} of WarmupStableDecayLR must be between 0 and 1")
        phases = [Phase(1.0, steps=warmup_steps), Phase(1.0, until=1 - decay_fraction), Phase(final, curve=curve)]
        super().__init__(optimizer, phases, initial, total_steps)

    def phases_of(self, total_steps: int) -> Sequence[Phase]:
        """Return the phases of a run; the decay begins no earlier than the warm-up ends."""
        warmup, stable, decay = self.phases
        begins = _step_of(stable.until, total_steps)
        return [warmup, decay] if begins <= (warmup.steps or 0) else [warmup, stable, decay]
