"""One batch of validation, test or prediction of a `D9DModule`: forwards only, no gradients."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lightning_d9d.parallel.tokens import sequence_length
from lightning_d9d.pipeline.totals import weighted_mean
from lightning_d9d.strategy.sequence_parts import check_parts_of_sequences

if TYPE_CHECKING:
    from lightning_d9d.strategy.module import D9DModule


def evaluate(module: D9DModule, batch: Any, prefix: str) -> dict[str, Tensor]:
    """Run a batch and log `<prefix>_loss` and the metrics. Collective over the ranks that share it.

    Lightning sums each logged value times its weight over batches and ranks and divides by the summed weights at the
    end of the epoch, so the result is exact however tokens are spread.

    Returns:
        "loss", the batch's mean on this data rank, "weight", what it was divided by, and the metrics.
    """
    pipeline = module.pipeline
    pipeline.check_same(prefix, batch)
    cut = module.cut(batch)
    check_parts_of_sequences(module, cut.microbatches[0])
    with module.schedule_running():
        totals = module.executor(nullcontext).evaluate(pipeline.forward_only(len(cut.microbatches)), cut)
    reported, sums = pipeline.report(prefix, totals)
    values, weights = pipeline.sum_of_batch(sums).unbind(1)
    means = weighted_mean(values, weights).to(reported.dtype)
    result = {"weight": weights[0]}
    for name, mean, weight in zip(("loss", *reported.metrics), means, weights, strict=True):
        result[name] = mean
        module.log(
            f"{prefix}_{name}",
            mean,
            on_step=False,
            on_epoch=True,
            prog_bar=name == "loss",
            sync_dist=True,
            batch_size=weight,  # type: ignore[arg-type]  # Lightning only multiplies by it; a tensor spares a host sync
        )
    return result


def predict(module: D9DModule, batch: Any, share: bool = True) -> Any:
    """`predict_output` of a batch; parts of several microbatches are joined along dim 0.

    Collective over the ranks that share the batch.

    Args:
        module: Whose stages run.
        batch: The same on every rank of the pipeline.
        share: Send the result from the last stage to all ranks; otherwise the others get None.
    """
    module.pipeline.check_same("predict", batch)
    with module.without_loss():
        parts = [_join_chunks(module, part, batch) for part in _outputs(module, batch)]
    whole = None if not parts else parts[0] if len(parts) == 1 else tree_map(_join, *parts)
    return module.pipeline.share_tree(whole) if share else whole


def _join_chunks(module: D9DModule, output: Any, batch: Any) -> Any:
    """The predictions for whole sequences, without padding."""
    dim, tokens = module.prediction_dim, module.pipeline.tokens
    if dim is None or tokens.multiple == 1 or not module.sequence_dims:
        return output
    length = sequence_length(batch, module.sequence_dims)
    return tree_map(lambda t: tokens.join(t, dim).narrow(dim, 0, length) if isinstance(t, Tensor) else t, output)


def run_filler(module: D9DModule, batch: Any) -> None:
    """Forwards of a batch for other ranks' sake, without a result. Collective over the pipeline and the data ranks."""
    _outputs(module, batch)


def _outputs(module: D9DModule, batch: Any) -> list[Any]:
    """Of each microbatch that counts, on the last stage's ranks."""
    cut = module.cut(batch)
    check_parts_of_sequences(module, cut.microbatches[0])
    with module.schedule_running():
        actions = module.pipeline.forward_only(len(cut.microbatches))
        return module.executor(nullcontext).outputs(actions, cut, module.predict_output)


def _join(*parts: Any) -> Any:
    return torch.cat(parts) if isinstance(parts[0], Tensor) and parts[0].ndim > 0 else list(parts)
