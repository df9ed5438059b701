"""Lets data ranks tell each other of their next batch while they compute the one before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_d9d.waits import waiting

END = 2**62
"""Place of a rank whose data have ended."""
NOTHING = END + 1
"""Place of one that has never had a batch."""


@dataclass(frozen=True)
class BatchPlan:
    """The agreement of data ranks on what they run for one batch. Without arguments they agreed on nothing."""

    is_dummy: bool = False
    """This rank has no data for it. It runs a copy of another batch, which counts nothing."""
    num_microbatches: int = 0
    """The number that every rank runs; 0: ranks may differ."""
    num_counting: int | None = None
    """The number of data ranks that have data for it; None for all, 0 where only other replicas have some."""

    @property
    def is_idle(self) -> bool:
        """True if the whole replica has no data for it, and other replicas have some."""
        return self.num_counting == 0


NOTHING_AGREED = BatchPlan()
"""The plan of ranks that agree on nothing."""


@dataclass(frozen=True)
class Agreed:
    """Where the ranks that are furthest behind are, and what they have there."""

    place: int
    num_microbatches: int
    """The most that one of them has."""
    num_ranks: int
    """How many they are."""

    @property
    def has_ended(self) -> bool:
        """True if no rank has data."""
        return self.place >= END


class Agreement:
    """Agrees on one batch after the other, each with a message that is under way while the batch before is computed.

    Ranks `tell` each other the place of their next batch, and `hear` later. Those at the least place use their data in
    the coming step, the others fill it.

    Args:
        group: The data ranks, on a backend for the CPU: nobody waits for a device.
        check: Called with the places of all ranks when they have heard of a place for the first time; may raise.
    """

    def __init__(self, group: dist.ProcessGroup, check: Callable[[list[int]], None]) -> None:
        self.group = group
        self.check = check
        self._place: int | None = None
        self._values: list[Tensor] = []
        self._work: dist.Work | None = None
        self._heard: Agreed | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Agreement:
        """Ranks talk over one; copies of what uses it share it."""
        return self

    def restart(self) -> None:
        """Forget what is under way. Every rank has sent its own, so nobody waits for it."""
        self._place = self._work = self._heard = None

    def tell(self, place: int, num_microbatches: int) -> None:
        """Send the place of this rank's next batch and how many microbatches it makes. Collective, without waiting."""
        own = torch.tensor([place, num_microbatches])
        self._values = [torch.empty_like(own) for _ in range(dist.get_world_size(self.group))]
        self._heard, self._work = None, dist.all_gather(self._values, own, group=self.group, async_op=True)

    def hear(self) -> Agreed:
        """Return what all ranks have sent last. Waits for the message; the same again until the next `tell`."""
        if self._heard is None:
            assert self._work is not None
            with waiting():
                self._work.wait()
            sent: list[tuple[int, int]] = [tuple(value.tolist()) for value in self._values]  # type: ignore[misc]
            place = min(sent)[0]
            here = [num_microbatches for theirs, num_microbatches in sent if theirs == place]
            if place != self._place:
                self.check([theirs for theirs, _ in sent])
            self._place, self._heard = place, Agreed(place, max(here), len(here))
        return self._heard

    def rank_of(self, index: int) -> int:
        """Return the global rank of one of the group."""
        return dist.get_process_group_ranks(self.group)[index]
