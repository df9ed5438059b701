"""Loss and metrics of a batch, added up over its microbatches as sums with weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_d9d.errors import ConfigError
from lightning_d9d.pipeline.types import WeightedLoss


@dataclass
class BatchTotals:
    """Sums over the microbatches of one batch on this rank: name -> (sum of values, sum of weights), detached."""

    loss: tuple[Tensor, Tensor] | None = None
    metrics: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    loss_is_mean: bool | None = None

    def add_loss(self, loss: WeightedLoss, is_mean: bool, counts: bool = True) -> None:
        """Add one microbatch's loss; a dummy microbatch only determines the kind of loss."""
        if self.loss_is_mean not in (None, is_mean):
            raise ConfigError("microbatch_loss returned a Tensor for some microbatches and a WeightedLoss for others")
        self.loss_is_mean = is_mean
        if counts:
            self.loss = _add(self.loss, loss)

    def add_metrics(self, metrics: Mapping[str, Tensor | WeightedLoss], rows: int | None) -> None:
        """Add one microbatch's metrics; a mean has the weight `rows`."""
        for name, value in metrics.items():
            self.metrics[name] = _add(self.metrics.get(name), as_weighted(value, rows, f"microbatch_metrics[{name!r}]"))


def _add(total: tuple[Tensor, Tensor] | None, part: WeightedLoss) -> tuple[Tensor, Tensor]:
    value, weight = part.value_sum.detach(), part.weight.detach()
    return (value, weight) if total is None else (total[0] + value, total[1] + weight)


def weighted_mean(value_sum: Tensor, weight: Tensor) -> Tensor:
    """Return value_sum / weight, or value_sum for a weight of 0, without waiting on the host."""
    return value_sum / torch.where(weight == 0, 1.0, weight)


def _wide(value: Tensor) -> Tensor:
    """Convert to a scalar whose dtype is wide enough for sums over microbatches."""
    value = value.reshape(()) if value.dim() else value
    return value.to(torch.promote_types(value.dtype, torch.float32)) if value.is_floating_point() else value


def as_weighted(value: Tensor | WeightedLoss, rows: int | None, name: str) -> WeightedLoss:
    """Convert a mean over `rows` rows to a sum with that weight; keep a `WeightedLoss`. Floats get at least float32.

    Raises:
        ConfigError: The value is neither, is not a scalar, or is a mean over rows that cannot be counted.
    """
    if isinstance(value, Tensor) and value.numel() == 1:
        if rows is None:
            raise ConfigError(
                f"{name} returned a mean over a microbatch without rows, so its weight is unknown: the "
                "microbatch's tensors do not share a first size. Return WeightedLoss(value_sum, weight)"
            )
        return WeightedLoss(_wide(value) * rows, torch.full((), float(rows), device=value.device))
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
    if isinstance(value, WeightedLoss):
        total, weight = value.value_sum, value.weight
        if isinstance(total, Tensor) and isinstance(weight, bool | int | float):
            weight = torch.full((), float(weight), device=total.device)
        if isinstance(total, Tensor) and isinstance(weight, Tensor) and total.numel() == 1 and weight.numel() == 1:
            return WeightedLoss(_wide(total), _wide(weight))
        shape = f" of {type(total).__name__} and {type(weight).__name__}"
    raise ConfigError(
        f"{name} returned {type(value).__name__}{shape}; return a scalar Tensor (a mean over the microbatch) or "
        "WeightedLoss(value_sum, weight) of two scalars"
    )
