"""Puts the mean of all replicas in place of each replica's own values, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_d9d.mesh.collectives import broadcast_tensors
from lightning_d9d.mesh.sharding import local
from lightning_d9d.mixing.flat import Batches, Flat, flat_buffers, norm_of
from lightning_d9d.waits import waiting


class ReplicaMean:
    """Puts the mean of all replicas in place of tensors, and restores their own values.

    Args:
        group: The ranks at this rank's place in all replicas.
        bucket_bytes: Size limit of a message.
    """

    def __init__(self, group: dist.ProcessGroup, bucket_bytes: int) -> None:
        self.group = group
        self._bucket_bytes = bucket_bytes
        self._own: list[tuple[Tensor, Tensor]] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ReplicaMean:
        """Return this object: there is one for a run, which copies of its Trainer share."""
        return self

    @property
    def is_in_place(self) -> bool:
        """True while tensors have the mean and their own values are kept."""
        return self._own is not None

    @torch.no_grad()
    def take(
        self, batches: Batches, rest: Batches = (), others: Sequence[Tensor] = (), *, keeps: bool = True
    ) -> Tensor | None:
        """Overwrite tensors by their mean over replicas. Collective over all replicas.

        Sums are computed in float32 or wider; the mean of bfloat16 tensors is rounded to nearest.

        Args:
            batches: Floating-point tensors that may share messages, equal at the same places of all replicas.
            rest: Further tensors, whose distance does not count.
            others: Tensors for which the first replica's values are used, because they have no mean.
            keeps: Whether own values are kept for `revert`: another copy of them in memory.

        Returns:
            The squared distance of this rank's own values from the mean: float64, a scalar. None without tensors.
        """
        assert not self.is_in_place
        own: list[tuple[Tensor, Tensor]] = []
        squares: list[Tensor] = []
        measured, further = (flat_buffers(each, self._bucket_bytes) for each in (batches, rest))
        for flat in (*measured, *further):
            own += [(tensor, tensor.detach().clone()) for tensor in flat.tensors] if keeps else []
            squares.append(self._overwrite(flat))
        squares = squares[: len(measured)]
        own += [(tensor, local(tensor).detach().clone()) for tensor in others] if keeps else []
        broadcast_tensors(map(local, others), self.group, dist.get_process_group_ranks(self.group)[0])
        self._own = own if keeps else None
        return torch.stack([each.to(squares[0].device) for each in squares]).sum() if squares else None

    @torch.no_grad()
    def revert(self) -> None:
        """Restore this replica's own values. Local; does nothing if none are kept."""
        own, self._own = self._own, None
        for tensor, value in own or ():
            local(tensor).copy_(value)

    def _overwrite(self, flat: Flat) -> Tensor:
        values = flat.fill()
        with waiting():
            dist.all_reduce(values, group=self.group)
        values.div_(self.group.size())
        parts, tensors = flat.parts, flat.tensors
        distance = norm_of(torch._foreach_sub(parts, flat.widened()))
        torch._foreach_copy_(tensors, parts)
        return distance
