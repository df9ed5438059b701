"""One batch of validation, test or prediction of a `D9DModule`: like `train_step.py`, but without gradients."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lightning_d9d.coordination.ahead import NOTHING_AGREED, BatchPlan
from lightning_d9d.log import logger
from lightning_d9d.parallel.tokens import sequence_length
from lightning_d9d.pipeline.executor import SplitBatch
from lightning_d9d.pipeline.host_copy import HostCopy
from lightning_d9d.pipeline.totals import weighted_mean
from lightning_d9d.strategy.batches import BatchSplitter
from lightning_d9d.strategy.empty import CAUSE
from lightning_d9d.strategy.module import D9DModule
from lightning_d9d.strategy.reports import Reports
from lightning_d9d.strategy.same_batches import SameBatches
from lightning_d9d.strategy.sequence_check import SequenceCheck


class EvalStep:
    """Runs batches forwards only. Lightning has already opened the precision context.

    Args:
        module: The module with its stages built and on their device.
        splitter: Splits batches.
        sequences: Checks in the first batch that stages support parts of sequences.
    """

    def __init__(self, module: D9DModule, splitter: BatchSplitter, sequences: SequenceCheck) -> None:
        self.module = module
        self.splitter = splitter
        self.sequences = sequences
        self.pipeline = module.pipeline
        self.executor = self.pipeline.executor(module, module.indexed_stages, nullcontext)
        self._reports: dict[str, Reports] = {}
        self._same_batches = SameBatches(self.pipeline.readers)
        self._empty = torch.zeros((), dtype=torch.bool, device=self.pipeline.device)
        self._empty_copy = HostCopy()
        self._has_said_empty = False

    def evaluate(self, batch: Any, prefix: str, plan: BatchPlan = NOTHING_AGREED) -> dict[str, Tensor]:
        """Run a batch and log `<prefix>_loss` and the metrics. Collective over the ranks that share it.

        Args:
            batch: The batch; the same on every rank of the pipeline.
            prefix: Kind of evaluation: "val" or "test".
            plan: Agreement of the data ranks about this batch.

        Returns:
            "loss", the batch's mean on this data rank, "weight", its divisor, and the metrics.
        """
        self._same_batches.check(prefix, batch)
        split = self._split(batch, plan)
        with self.module.schedule_running():
            totals = self.executor.evaluate(self.pipeline.forward_only(len(split.microbatches)), split)
        reports = self._reports.setdefault(prefix, Reports(prefix, self.pipeline))
        schema, sums = reports.of(totals)
        values, weights = self.pipeline.sum_of_batch(sums).unbind(1)
        self._look_at_weight(prefix, weights[0])
        means = weighted_mean(values, weights).to(schema.dtype)
        return self.module.log_eval_step(prefix, ("loss", *schema.metrics), means, weights)

    def predict(self, batch: Any, plan: BatchPlan = NOTHING_AGREED, *, share: bool | None = None) -> Any:
        """Run a batch and return the module's `predict_output`. Collective over the ranks that share the batch.

        Args:
            batch: The batch; the same on every rank of the pipeline.
            plan: Agreement of the data ranks about this batch.
            share: Whether to send the result from the last stage to all ranks; otherwise the others get None. By
                default the module's `share_predictions` decides.

        Returns:
            The outputs of all microbatches, joined along dim 0.
        """
        self._same_batches.check("predict", batch)
        with self.module.without_loss():
            parts = [self._join_chunks(part, batch) for part in self._outputs(batch, plan)]
        whole = None if not parts else parts[0] if len(parts) == 1 else tree_map(_join, *parts)
        share = self.module.share_predictions if share is None else share
        return self.pipeline.share_tree(whole) if share else whole

    def run_dummy(self, batch: Any, plan: BatchPlan) -> None:
        """Run forwards of a batch for other ranks that need them. Collective over the pipeline and the data ranks."""
        with self.module.without_loss():
            self._outputs(batch, plan)

    def _look_at_weight(self, prefix: str, weight: Tensor) -> None:
        """Report once that a batch counted nothing; on an accelerator some batches late. Local."""
        if self._has_said_empty or self.pipeline.rank > 0:
            return
        self._empty |= weight == 0
        was_empty = self._empty_copy.exchange(self._empty)
        if was_empty is not None and was_empty:
            self._has_said_empty = True
            logger.warning(
                "a batch of %s has nothing that counts: %s. Where all batches of an evaluation are so, %s_loss is nan",
                *(prefix, CAUSE, prefix),
            )

    def _split(self, batch: Any, plan: BatchPlan) -> SplitBatch:
        split = self.splitter.split(batch, plan)
        self.sequences.check(split.microbatches[0])
        return split

    def _outputs(self, batch: Any, plan: BatchPlan) -> list[Any]:
        """Return the outputs of the microbatches that count, on the ranks of the last stage."""
        split = self._split(batch, plan)
        with self.module.schedule_running():
            actions = self.pipeline.forward_only(len(split.microbatches))
            return self.executor.outputs(actions, split, self.module.predict_output)

    def _join_chunks(self, output: Any, batch: Any) -> Any:
        """Return the predictions for whole sequences, without padding."""
        module, tokens = self.module, self.pipeline.tokens
        dim = module.prediction_dim
        if dim is None or tokens.multiple == 1 or not module.sequence_dims:
            return output
        length = sequence_length(batch, module.sequence_dims)
        return tree_map(lambda t: tokens.join(t, dim).narrow(dim, 0, length) if isinstance(t, Tensor) else t, output)


def _join(*parts: Any) -> Any:
    return torch.cat(parts) if isinstance(parts[0], Tensor) and parts[0].ndim > 0 else list(parts)
