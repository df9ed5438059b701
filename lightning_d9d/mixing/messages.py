"""The messages of a round: tensors exchanged by two replicas, or summed over more.

Two replicas send each other their tensors as they are, so no bit is lost and nothing is copied. The received tensors
are mixed in by one pass over memory. On one host `pushes.py` may move them in place of `send`. Three or more replicas
sum copies in float32 or wider.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_d9d.mesh.seeds import derived
from lightning_d9d.mixing.flat import Flat, norm_of
from lightning_d9d.ops.momentum import descend_


class Message(ABC):
    """Tensors of one bucket, and what the other replicas of an edge have at their places."""

    def __init__(self, flat: Flat) -> None:
        self.flat = flat
        self._works: list[dist.Work] = []

    @abstractmethod
    def send(self, group: dist.ProcessGroup) -> None:
        """Begin to send and receive. Collective over the group, without waiting."""

    def settle(self) -> None:  # noqa: B027  # copies of tensors may leave at any time
        """Wait until the tensors have left, so that they may change. Local."""

    def wait(self) -> None:
        """Wait until all is received. Local."""
        works, self._works = self._works, []
        for work in works:
            work.wait()

    @abstractmethod
    def squared_distance(self, size: int) -> Tensor:
        """Return the squared distance of own values to the mean of `size` replicas: float64, a scalar. Local."""

    @abstractmethod
    def sums_of_others(self) -> list[Tensor]:
        """Return the sum of the other replicas' values for each tensor, in float32 or wider. Local, at most once."""

    @abstractmethod
    def mix(self, own: float, others: float, number: int) -> None:
        """Replace each tensor by `own` times itself and `others` times the sum of the other replicas. Local.

        Args:
            own: Weight of this replica's values.
            others: Weight of each other replica's values.
            number: Number of the round, from which random numbers follow.
        """


class Exchanged(Message):
    """Two replicas send each other their tensors. The buffer has the tensors' dtype."""

    def send(self, group: dist.ProcessGroup) -> None:
        """Send each tensor to the other rank of the group, and receive its own."""
        partner = 1 - dist.get_rank(group)
        own = [tensor.detach().contiguous() for tensor in self.flat.tensors]
        messages = [dist.P2POp(dist.isend, tensor, group=group, group_peer=partner) for tensor in own]
        messages += [dist.P2POp(dist.irecv, part, group=group, group_peer=partner) for part in self.flat.parts]
        self._works = dist.batch_isend_irecv(messages)

    def settle(self) -> None:
        """Wait for both: a send ends with the receive."""
        self.wait()

    def squared_distance(self, size: int) -> Tensor:
        """Return that to the mean of both."""
        differences = torch._foreach_sub(self.sums_of_others(), [each.detach() for each in self.flat.tensors])
        return norm_of(differences) / size**2

    def sums_of_others(self) -> list[Tensor]:
        """Return the values of the only other replica."""
        return [part.to(self.flat.sum_dtype) for part in self.flat.parts]

    def mix(self, own: float, others: float, number: int) -> None:
        """Mix in one pass where tensors are bfloat16, which is rounded stochastically."""
        tensors, parts = self.flat.tensors, self.flat.parts
        if self.flat.dtype == torch.bfloat16:
            for index, (tensor, part) in enumerate(zip(tensors, parts, strict=True)):
                descend_(tensor, part, own, -others, derived("mixing", number, index, list(tensor.shape)))
            return
        mixed = torch._foreach_mul([tensor.to(self.flat.sum_dtype) for tensor in tensors], own)
        torch._foreach_add_(mixed, self.sums_of_others(), alpha=others)
        torch._foreach_copy_(tensors, mixed)


class Summed(Message):
    """All replicas of an edge sum copies of their tensors, in float32 or wider."""

    def __init__(self, flat: Flat) -> None:
        super().__init__(flat)
        self._has_own = True

    def send(self, group: dist.ProcessGroup) -> None:
        """Copy the tensors, and sum the copies over the group."""
        self._has_own = True
        work = dist.all_reduce(self.flat.fill(), group=group, async_op=True)
        assert work is not None
        self._works = [work]

    def squared_distance(self, size: int) -> Tensor:
        """Return that to the mean, before `sums_of_others`."""
        means = torch._foreach_mul(self.flat.parts, 1 / size)
        torch._foreach_sub_(means, self.flat.widened())
        return norm_of(means)

    def sums_of_others(self) -> list[Tensor]:
        """Subtract own values from the sums."""
        torch._foreach_sub_(self.flat.parts, self.flat.widened())
        self._has_own = False
        return self.flat.parts

    def mix(self, own: float, others: float, number: int) -> None:
        """Mix in the buffer, and write that to the tensors."""
        own -= others if self._has_own else 0.0
        self.flat.values.mul_(others)
        if own:
            torch._foreach_add_(self.flat.parts, self.flat.widened(), alpha=own)
        self.flat.write(number)
