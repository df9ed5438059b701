"""The memory of a training step on one rank, for settings that a user can change."""

from __future__ import annotations

from dataclasses import dataclass, fields

from lightning_d9d.memory.activations import Activations

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes on one rank at the moment of a step that needs most, by what they are for."""

    weights: int
    gradients: int
    """All that are there at once."""
    states: int | None
    """States of the optimizer; None: unknown."""
    activations: int | None = None
    """None: unknown."""
    beside_gradients: int = 0
    """Activations that are there at once with all gradients. One microbatch has none: gradients take the place of
    activations while the backward goes on."""
    buffers: int = 0
    """Gathered weights, and tokens on their way to experts."""

    @property
    def certain(self) -> int:
        """Weights, gradients and states: what every step needs at its end."""
        return self.weights + self.gradients + (self.states or 0)

    @property
    def total(self) -> int:
        """The sum of what is there at once, `certain` or more; parts that are unknown count 0."""
        moving = max(self.activations or 0, self.gradients + self.beside_gradients)
        return self.weights + (self.states or 0) + moving + self.buffers

    def __str__(self) -> str:
        parts = []
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name != "beside_gradients":
                parts.append(f"{each.name} {'unknown' if value is None else gib(value)}")
        return ", ".join(parts)


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """Settings on which the memory of a step depends."""

    recompute: str = "none"
    num_rows: int | None = None
    """Rows of a microbatch; None: unknown, before the first batch."""
    step_in_backward: bool = False
    eight_bits: bool = False
    """True if optimizer states are to be replaced by those of eight bits."""
    num_ranks: int = 1
    """Over how many times as many ranks weights are sharded."""


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """The memory of a step as a function of its settings."""

    weights: int
    gradients: int
    gradients_in_backward: int
    """Gradients that are there at once if the update is inside of the backward."""
    states: int | None
    eight_bit_states: int | None
    """None: the optimizer is of another kind."""
    gathered: int = 0
    """Buffers of gathered weights."""
    activations: Activations | None = None
    """None: the model does not say."""
    accumulates: bool = False
    """True if the gradients of several microbatches add up, so that none is free before the last one."""
    accumulates_batches: bool = False
    """True if those of several batches do, so that all are there while a batch has all its activations."""

    def of(self, settings: StepSettings) -> RankMemory:
        """Return the memory of a step with these settings."""
        in_backward = settings.step_in_backward and not (self.accumulates or self.accumulates_batches)
        gradients = self.gradients_in_backward if in_backward else self.gradients
        states = self.eight_bit_states if settings.eight_bits else self.states
        kept, buffers = None, self.gathered
        if self.activations is not None and settings.num_rows is not None:
            kept = self.activations.kept(settings.recompute, settings.num_rows)
            buffers += self.activations.dispatch_bytes(settings.num_rows)
        return RankMemory(
            weights=self.weights // settings.num_ranks,
            gradients=gradients // settings.num_ranks,
            states=None if states is None else states // settings.num_ranks,
            activations=None if kept is None else kept.most,
            beside_gradients=0 if kept is None else kept.most if self.accumulates_batches else kept.beside_gradients,
            buffers=buffers,
        )


def gib(num_bytes: int) -> str:
    """Return a number of bytes in the unit that people read."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:.1f} MiB"
