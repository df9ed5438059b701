"""Reports of a batch: the sums of its loss and metrics, in the same order on all ranks."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_d9d.errors import ConfigError
from lightning_d9d.mesh.collectives import all_gather_object
from lightning_d9d.pipeline.totals import BatchTotals
from lightning_d9d.strategy.pipeline import Pipeline


class ReportSchema(NamedTuple):
    """Schema of a batch's totals: loss kind, metric names, dtype."""

    loss_is_mean: bool | None
    metrics: tuple[str, ...]
    """Names, sorted."""
    dtype: torch.dtype
    """The dtype of the loss, at least float32."""

    def __str__(self) -> str:
        return f"{'a mean' if self.loss_is_mean else 'a WeightedLoss'} and the metrics {list(self.metrics)}"


class Reports:
    """Converts the totals of batches of one kind to tensors that ranks add up by position.

    Args:
        kind: Kind of batches: "train", "val", ...
        pipeline: This rank's place in the pipeline. Losses are computed on the ranks of the last stage.
        group: Ranks that add up values of this kind by position; None for this pipeline alone.
    """

    def __init__(self, kind: str, pipeline: Pipeline, group: dist.ProcessGroup | None = None) -> None:
        self.kind = kind
        self.pipeline = pipeline
        self.group = group
        self._schema: ReportSchema | None = None

    def of(self, totals: BatchTotals) -> tuple[ReportSchema, Tensor]:
        """Return the schema, and this rank's value sums and weights.

        Collective over the pipeline and the group for the first batch.

        Args:
            totals: Totals, which are empty except on the last stage; also empty there for a dummy batch.

        Returns:
            The schema, and `[1 + metrics, 2]`, value sums and weights, the loss first. They are float64, in which
            counts of tokens stay exact beyond 2**24. They are 0 on ranks without the last stage, so a sum over the
            pipeline makes them equal.

        Raises:
            ConfigError: The batch reports other values than the first one, or than other ranks.
        """
        ours = None
        if totals.loss is not None:
            dtype = torch.promote_types(totals.loss[0].dtype, torch.float32)
            ours = ReportSchema(totals.loss_is_mean, tuple(sorted(totals.metrics)), dtype)
        if self._schema is None:
            self._schema = _agreed(self.pipeline.share(ours), self.group)
        schema = self._schema
        if ours is None:
            return schema, torch.zeros(1 + len(schema.metrics), 2, dtype=torch.float64, device=self.pipeline.device)
        if ours != schema:
            raise ConfigError(
                f"a {self.kind} batch returned {ours}, but the first one returned {schema}. Return the same names and "
                "the same kind of loss for every microbatch: WeightedLoss(0, 0) if it counts nothing"
            )
        assert totals.loss is not None
        pairs = [totals.loss, *(totals.metrics[name] for name in schema.metrics)]
        return schema, torch.stack([torch.stack([value.double(), weight.double()]) for value, weight in pairs])


def _agreed(schema: ReportSchema | None, group: dist.ProcessGroup | None) -> ReportSchema:
    """Return the schema of the ranks of a group that have had a first batch. At least one has."""
    of_ranks = [schema] if group is None else all_gather_object(schema, group)
    first = next(theirs for theirs in of_ranks if theirs is not None)
    for theirs in of_ranks:
        if theirs not in (first, None):
            raise ConfigError(
                f"the first batch returned {first} on a rank and {theirs} on another. Return the same names on every "
                "rank: WeightedLoss(0, 0) if it counts nothing"
            )
    return first
