"""Scales losses before backward, so that gradients do not need a separate pass.

The total weight of a window may be known before its first backward: the window is one batch, and the module has
`microbatch_weight`. Then losses that are sums are divided by it. Losses that are means count each batch equally.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_d9d.coordination.ahead import BatchPlan
from lightning_d9d.pipeline.executor import LossScale, SplitBatch, naming_batch
from lightning_d9d.strategy.module import D9DModule
from lightning_d9d.strategy.window import inverse
from lightning_d9d.waits import waiting


class LossScaling:
    """Finds the scale of the losses of a batch.

    Args:
        module: Module that may know the weights of microbatches.
        group: The ranks over which tokens are split; None for one process.
        divides_means: Whether losses that are means are divided by the number of ranks now, instead of their gradients
            later.
    """

    def __init__(self, module: D9DModule, group: dist.ProcessGroup | None, *, divides_means: bool = False) -> None:
        self._module = module
        self._divides_means = divides_means
        self._group = group
        self._num_ranks = 1 if group is None else dist.get_world_size(group)
        self._num_chunks = module.pipeline.tokens.sequence.size
        """Ranks that share the tokens of a sequence."""

    def known_weight(self, split: SplitBatch) -> Tensor | None:
        """Return the weight of the batch over all ranks, if the module knows it before the forward. Collective."""
        weights = []
        for microbatch in split.microbatches:
            with naming_batch(self._module.microbatch_weight, microbatch):
                weight = self._module.microbatch_weight(microbatch)
            weights += [] if weight is None else [weight]
        if len(weights) < len(split.microbatches):
            return None
        total = torch.stack([weight.detach().double().reshape(()) for weight in weights])[: split.num_counted].sum()
        if self._group is not None:
            with waiting():
                dist.all_reduce(total, group=self._group)
        return total

    def scale(
        self, split: SplitBatch, accumulated_batches: int, plan: BatchPlan, total_weight: Tensor | None
    ) -> LossScale:
        """Return the scale for both kinds of loss. `TrainStep.restore` applies the remaining division. Local.

        Args:
            split: The batch.
            accumulated_batches: Number of batches of a full window.
            plan: Agreement of the data ranks about the batch: for means, the ranks that have data count.
            total_weight: Divisor of sums that is known now; None if it is known later.
        """
        num_counting = (plan.num_counting or self._num_ranks // self._num_chunks) * self._num_chunks
        num_rows = sum(filter(None, split.rows[: split.num_counted]))
        ranks = 1 if self._divides_means else self._num_ranks
        return LossScale(
            of_mean=ranks / (num_counting * max(num_rows, 1) * accumulated_batches),
            of_sum=1.0 if total_weight is None else inverse(total_weight),
        )
