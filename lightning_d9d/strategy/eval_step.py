"""One batch of validation, test or prediction of a `D9DModule`: forwards only, no gradients."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lightning_d9d.pipeline.executor import Executor, weighted_mean

if TYPE_CHECKING:
    from lightning_d9d.strategy.module import D9DModule


def evaluate(module: D9DModule, batch: Any, prefix: str) -> dict[str, Tensor]:
    """Run a batch and log `<prefix>_loss` and the metrics.

    Lightning sums each logged value times its weight over batches and ranks and divides by the summed weights at the
    end of the epoch, so the result is exact however tokens are spread.

    Returns:
        "loss", the batch's mean on this rank, "weight", what it was divided by, and the metrics.
    """
    microbatches = module.microbatches(batch)
    with module.schedule_running():
        totals = Executor(module.stages, module, nullcontext).forward_only(
            microbatches, [module.rows_of(m) for m in microbatches]
        )
    assert totals.loss is not None
    result = {"weight": totals.loss[1]}
    for name, (value, weight) in {"loss": totals.loss, **totals.metrics}.items():
        result[name] = weighted_mean(value, weight)
        module.log(
            f"{prefix}_{name}",
            result[name],
            on_step=False,
            on_epoch=True,
            prog_bar=name == "loss",
            sync_dist=True,
            batch_size=weight,  # type: ignore[arg-type]  # Lightning only multiplies by it; a tensor spares a host sync
        )
    return result


def predict(module: D9DModule, batch: Any) -> Any:
    """`predict_output` of a batch; parts from several microbatches are joined along dim 0."""
    executor = Executor(module.stages, module, nullcontext)
    with module.schedule_running():
        parts = [module.predict_output(executor.output(m)) for m in module.microbatches(batch)]
    return parts[0] if len(parts) == 1 else tree_map(_join, *parts)


def _join(*parts: Any) -> Any:
    return torch.cat(parts) if isinstance(parts[0], Tensor) and parts[0].ndim > 0 else list(parts)
