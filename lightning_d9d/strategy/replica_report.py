"""Numbers of replicas that mix: exchanged at a step that logs, and logged at the next such step."""

from __future__ import annotations

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_d9d.metrics.wait_clock import WaitClock
from lightning_d9d.strategy.ranks import JobRanks
from lightning_d9d.waits import waiting

_LOSSES = ("train_loss", "loss")
_NAMES = ("loss", "norm", "distance_to_centre", "distance_to_edge", "edge_wait_seconds")


class ReplicaReport:
    """Logs the mean and the maximum over replicas, late, so that no replica waits for another.

    Args:
        ranks: The ranks of the job.
        group: The ranks at this rank's place in all replicas.
        clock: Clock of waits for edges.
    """

    def __init__(self, ranks: JobRanks, group: dist.ProcessGroup, clock: WaitClock) -> None:
        self._ranks = ranks
        self._group = group
        self._clock = clock
        self._seconds = 0.0
        self._are_known: list[bool] = []
        """For each of `_NAMES`, whether its number was known at the last exchange."""
        self._sums: Tensor | None = None
        self._most: Tensor | None = None
        self._works: list[dist.Work] = []
        self.centre: Tensor | None = None
        """The distance of this replica to the mean of all, when that was taken last: logged with the next report."""

    def exchange(self, module: L.LightningModule, squared_distance: Tensor | None, norm: Tensor | None) -> None:
        """Log the numbers of the last exchange, and begin to exchange those of this step.

        Collective over replicas, without waiting.

        Args:
            module: Logs.
            squared_distance: Distance of this rank from the mean of the edge.
            norm: The norm of the replica's gradients; None if it is unknown.
        """
        self._log(module)
        metrics = module.trainer.callback_metrics
        loss = next((metrics[name] for name in _LOSSES if name in metrics), None)
        seconds = self._clock.seconds
        wait, self._seconds = seconds - self._seconds, seconds
        device = self._ranks.device
        nothing = torch.full((), torch.nan, dtype=torch.float64, device=device)
        distance = None if squared_distance is None else self.whole(squared_distance.to(device)).sqrt()
        own = (loss, norm, self.centre, distance, torch.full_like(nothing, wait))
        self._are_known = [each is not None for each in own]
        values = torch.stack([nothing if each is None else each.detach().to(device, torch.float64) for each in own])
        self._sums, self._most = values.clone(), values.nan_to_num(nan=-torch.inf)
        works = (
            dist.all_reduce(self._sums, group=self._group, async_op=True),
            dist.all_reduce(self._most, dist.ReduceOp.MAX, group=self._group, async_op=True),
        )
        self._works = [work for work in works if work is not None]

    def whole(self, squared: Tensor) -> Tensor:
        """Return the sum of squares over the ranks of this replica. Collective over these."""
        mesh = self._ranks.mesh_of_several
        if mesh is not None:
            squared = squared.clone()
            with waiting():
                dist.all_reduce(squared, group=mesh.everyone)
        return squared

    def end(self) -> None:
        """Wait for the pending exchange. Collective over replicas."""
        for work in self._works:
            work.wait()
        self._works = []

    def _log(self, module: L.LightningModule) -> None:
        if not self._works or self._sums is None or self._most is None:
            return
        with waiting():
            self.end()
        means, most = self._sums / self._group.size(), self._most
        for index, (name, is_known) in enumerate(zip(_NAMES, self._are_known, strict=True)):
            if is_known:
                module.log(f"replicas/{name}_mean", means[index].float(), batch_size=1)
                module.log(f"replicas/{name}_most", most[index].float(), batch_size=1)
