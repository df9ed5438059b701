"""Data ranks exchange facts about their next batch while they compute the current one."""

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
"""Place of a rank that has never had a batch."""


@dataclass(frozen=True)
class BatchPlan:
    """The agreement of data ranks on how to run one batch. Without arguments, nothing was agreed."""

    is_dummy: bool = False
    """True if this rank has no data for the batch. It then runs a copy of another batch, which counts nothing."""
    num_microbatches: int = 0
    """The number that every rank runs; 0 means that ranks may differ."""
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
    """The place of the ranks that are furthest behind, and the facts about their batch there."""

    place: int
    num_microbatches: int
    """The largest number on any of these ranks."""
    num_ranks: int
    """The number of these ranks."""

    @property
    def has_ended(self) -> bool:
        """True if no rank has data."""
        return self.place >= END


class Agreement:
    """Agrees on one batch after another; each message is sent while the batch before is computed.

    A rank sends the place of its next batch with `tell`, and gets those of all ranks from `hear` later. Ranks at the
    lowest place use their data in the next step; the others fill it with dummy batches.

    Args:
        group: The data ranks, on a backend for the CPU, so that no rank waits for a device.
        check: Called with the places of all ranks when they have received a place for the first time; may raise.
    """

    def __init__(self, group: dist.ProcessGroup, check: Callable[[list[int]], None]) -> None:
        self.group = group
        self.check = check
        self._place: int | None = None
        self._values: list[Tensor] = []
        self._work: dist.Work | None = None
        self._heard: Agreed | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Agreement:
        """Return this object: ranks communicate through it, so copies of its users share it."""
        return self

    def restart(self) -> None:
        """Forget pending messages. Every rank has sent its own, so no rank waits for this one."""
        self._place = self._work = self._heard = None

    def tell(self, place: int, num_microbatches: int) -> None:
        """Send the place of this rank's next batch and the number of its microbatches. Collective, without waiting."""
        own = torch.tensor([place, num_microbatches])
        self._values = [torch.empty_like(own) for _ in range(dist.get_world_size(self.group))]
        self._heard, self._work = None, dist.all_gather(self._values, own, group=self.group, async_op=True)

    def hear(self) -> Agreed:
        """Return the latest messages of all ranks.

        It waits for the messages, and returns the same result until the next `tell`.
        """
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
        """Return the global rank of a rank in the group."""
        return dist.get_process_group_ranks(self.group)[index]
