"""Splits the batches that a `D9DModule` trains on or evaluates into microbatches."""

from __future__ import annotations

from typing import Any

from lightning_d9d.coordination.ahead import NOTHING_AGREED, BatchPlan
from lightning_d9d.errors import ConfigError
from lightning_d9d.parallel.tokens import own_chunks
from lightning_d9d.pipeline.executor import SplitBatch
from lightning_d9d.pipeline.microbatch import MicrobatchCount
from lightning_d9d.strategy.module import D9DModule
from lightning_d9d.strategy.pipeline import Pipeline


class BatchSplitter:
    """Splits batches into microbatches of this rank's tokens.

    Args:
        module: Module whose hooks prepare and split batches.
        pipeline: This rank's place in the pipeline. Its schedule may support only some numbers of microbatches.
        count: Number of microbatches of a batch.
        pads_sequences: Padding of sequences to a length that the ranks can share.
    """

    def __init__(self, module: D9DModule, pipeline: Pipeline, count: MicrobatchCount, *, pads_sequences: bool) -> None:
        self.module = module
        self.pipeline = pipeline
        self.count = count
        self.padding = module.sequence_padding if pads_sequences else None

    def split(
        self, batch: Any, plan: BatchPlan = NOTHING_AGREED, *, check: bool = False, trains: bool = False
    ) -> SplitBatch:
        """Split a batch. Local.

        Dummies, copies of the last microbatch, fill the batch up to the number that the ranks agreed on.

        Args:
            batch: Batch of this rank's dataloader.
            plan: The agreement of data ranks about it. A dummy batch makes only dummies.
            check: Whether to raise unless it divides evenly, as the first training batch must.
            trains: Whether to add dummies up to a number that the schedule supports.

        Raises:
            ConfigError: The batch does not divide evenly, or makes more microbatches than the ranks agreed on.
            ScheduleError: The schedule does not support that number of microbatches.
        """
        microbatches = self._microbatches(self.module.prepare_batch(batch), check)
        microbatches = [
            own_chunks(each, self.module.sequence_dims, self.pipeline.tokens, self.padding) for each in microbatches
        ]
        num_counted = 0 if plan.is_dummy else len(microbatches)
        if 0 < plan.num_microbatches < num_counted:
            raise ConfigError(
                f"a batch makes {num_counted} microbatches, but when it was read no rank had more than "
                f"{plan.num_microbatches}. Do not change its number of rows in on_before_batch_transfer, "
                "transfer_batch_to_device or on_after_batch_transfer"
            )
        wanted = max(num_counted, plan.num_microbatches, 1)
        if trains and (not check or wanted > num_counted):
            wanted = self.pipeline.num_taken(wanted)
        filled = [*microbatches[:num_counted], *microbatches[-1:] * (wanted - num_counted)]
        return SplitBatch(filled, [self.module.rows_of(each) for each in filled], wanted - num_counted)

    def num_microbatches(self, batch: Any) -> int:
        """Return the number of microbatches of a batch, without dummies."""
        return len(self._microbatches(batch, check=False))

    def _microbatches(self, batch: Any, check: bool) -> list[Any]:
        module, count = self.module, self.count
        if count.is_one:
            return [batch]
        if type(module).split_batch is not D9DModule.split_batch and count.num_microbatches is not None:
            return module.split_batch(
                batch, count.num_microbatches
            )  # its own form of batch, its own rule for short ones
        rows = module.count_rows(batch)
        if check:
            count.check(rows)
        return module.split_batch(batch, count.of(rows))
