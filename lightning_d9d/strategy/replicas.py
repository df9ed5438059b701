"""Keeps initial values, buffers and metrics of replicas of a module in common, besides gradients."""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

from lightning_d9d.mesh.collectives import broadcast_tensors
from lightning_d9d.pipeline.types import shared_buffers
from lightning_d9d.strategy.sharding import make_replicas_equal


class Replicas:
    """Keeps the copies of a module equal over ranks.

    Args:
        module: This rank's module.
        group: The ranks that hold the same stages; None for all.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None) -> None:
        self.module = module
        self.group = group
        self._grouped_metrics: list[Metric] = []
        self._has_buffers = len(shared_buffers(module)) > 0
        self._buffers_are_stale = False

    def make_equal(self) -> None:
        """Overwrite parameters and buffers with those of the first replica. Collective."""
        tensors = [*self.module.parameters(), *shared_buffers(self.module)]
        self._broadcast(tensors)
        make_replicas_equal(tensors)

    def mark_buffers_stale(self) -> None:
        """Record that a step was taken: buffers such as running means then differ. Local."""
        self._buffers_are_stale = self._has_buffers

    def sync_buffers(self) -> None:
        """Overwrite buffers with those of rank 0 if a step was taken, as in DDP. Collective."""
        if self._buffers_are_stale:
            self._broadcast(shared_buffers(self.module))  # of now: a module may have assigned a new tensor
            self._buffers_are_stale = False

    def group_metrics(self, data_ranks: dist.ProcessGroup | None) -> None:
        """Make torchmetrics sum only over data ranks: others read the same samples, which must not count twice.

        Local.
        """
        for metric in self.module.modules():
            if isinstance(metric, Metric) and metric.process_group is None:
                metric.process_group = data_ranks
                self._grouped_metrics.append(metric)

    def close(self) -> None:
        """Restore the metrics. Local."""
        while self._grouped_metrics:
            self._grouped_metrics.pop().process_group = None

    def _broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite tensors that are not sharded by the first rank's. Collective."""
        first = 0 if self.group is None else dist.get_process_group_ranks(self.group)[0]
        broadcast_tensors((tensor for tensor in tensors if not isinstance(tensor, DTensor)), self.group, first)

    def __deepcopy__(self, memo: object) -> Replicas:
        """Return this object: copies of a Trainer share it."""
        return self
