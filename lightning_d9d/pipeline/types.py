"""Types that a module and the strategy exchange: a stage, its inputs, and a loss with its weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn


@dataclass(frozen=True)
class StageInfo:
    """One stage of a model that is split into `num_stages` consecutive stages."""

    index: int
    num_stages: int
    layers: range | None = None
    """The layers of the stage by their index in the whole model; None: the module splits the model, not the strategy.
    """

    @property
    def is_first(self) -> bool:
        """True if this stage receives the microbatch itself (token ids), not another stage's output."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """True if this stage's output goes to `microbatch_loss`."""
        return self.index == self.num_stages - 1


@dataclass(frozen=True)
class StageInputs:
    """Keyword arguments for the forward of the stages, taken from one microbatch.

    `first` goes to the first stage only (later ones receive the previous stage's output), `shared` to every stage.
    """

    first: Mapping[str, Any]
    shared: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class WeightedLoss:
    """A loss given as a sum and the weight to divide it by, such as the number of tokens that count.

    Gradients become those of sum(value_sum) / sum(weight) over every microbatch, rank and accumulation step, so a token
    has the same weight on every rank. Both are scalar tensors; `weight` needs no gradient and may be zero. A number is
    converted to a tensor. Floats of any dtype are summed in at least float32. Under mixed precision `microbatch_loss`
    runs in autocast on any mesh; there `torch.nn.functional.cross_entropy` sums in float32 too.
    """

    value_sum: Tensor
    weight: Tensor


@runtime_checkable
class CountsTokens(Protocol):
    """A module inside a stage that counts the tokens it sees, such as `lightning_d9d.modules.ExpertBalance`.

    Its non-persistent buffers have this rank's counts: other ranks never overwrite them.
    """

    counts_tokens: bool
    """The stage sets it to False around the forwards of dummy microbatches."""


def shared_buffers(module: nn.Module) -> list[Tensor]:
    """Return the buffers of a module that replicas share: all except counts. See `CountsTokens`."""
    counts = {
        buffer
        for part in module.modules()
        if part._non_persistent_buffers_set and isinstance(part, CountsTokens)
        for name, buffer in part.named_buffers(recurse=False)
        if name in part._non_persistent_buffers_set
    }
    return [buffer for buffer in module.buffers() if buffer not in counts]
