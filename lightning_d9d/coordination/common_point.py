"""`CommonPoint` makes ranks act at the same point of a fit, although any of them may want to, at any time.

Ranks end a fit so, for which `Trainer.should_stop` may be set on any rank. They also validate so after a time, as their
clocks differ. All ranks pass the points in the same order. A rank that wants to act at a point writes the key "NAME/N"
and waits. A watchdog that finds this key publishes how many points its rank has passed. Then its main thread waits at
its next point. All ranks act at the point after the last one that any rank has passed. If all ranks want to act at the
same point, they act there, as under Lightning.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch.distributed as dist

from lightning_d9d.coordination.messages import is_count, value_of

EARLY_STOP, VALIDATION = "early_stop", "validation"
"""The names of points: to end a fit, and to validate after a time."""


class CommonPoint:
    """The agreement of one rank in one run. `is_here` is for the thread that trains, `agree` for the watchdog.

    Args:
        name: First part of the keys.
        store: Prefix of the keys, the same on every rank.
        rank: Global rank.
        world_size: Number of ranks.
        changed: Guards the state that both threads change, and signals changes.
        wake: Makes the watchdog poll at once.
        has_failed: Returns whether a rank has failed, so that waiting is useless.
        stays: If True, ranks that have acted do so at each further point, until they do not want to.
    """

    def __init__(
        self,
        name: str,
        store: dist.Store,
        rank: int,
        world_size: int,
        changed: threading.Condition,
        wake: Callable[[], None],
        has_failed: Callable[[], bool],
        *,
        stays: bool,
    ) -> None:
        self._name = name
        self._stays = stays
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._changed = changed
        self._wake = wake
        self._has_failed = has_failed
        self._num_acts = self._num_points = 0
        self._wants = self._waits = self._has_acted = False
        self._acts_at: int | None = None

    def is_here(self, wants: bool) -> bool:
        """Return whether all ranks act at this point. Collective, but waits only if some rank wants to act.

        Args:
            wants: Whether this rank wants to act.
        """
        with self._changed:
            self._has_acted &= wants
            if self._has_acted:
                return True
            if wants and not self._wants:
                self._wants = self._waits = True
                self._wake()
            self._changed.wait_for(lambda: not self.is_open or self._has_failed())
            self._num_points += 1
            if self._num_points != self._acts_at:
                return False
            self._num_acts += 1
            self._has_acted, self._wants, self._waits, self._acts_at = self._stays, False, False, None
            return True

    @property
    def is_open(self) -> bool:
        """True if some rank wants to act and the common point is not known yet."""
        return self._waits and self._acts_at is None

    def agree(self) -> None:
        """Read the store, and publish the values that other ranks need.

        Raises:
            ForeignValueError: A value in the store was not written by a rank.
        """
        if self._acts_at is not None:
            return
        key = f"{self._name}/{self._num_acts}"
        if self._wants:
            self._store.set(key, "")
        elif not self._store.check([key]):
            return
        with self._changed:
            self._waits = True
            num_passed = self._num_points
        self._store.set(f"{key}/{self._rank}", str(num_passed))
        of_ranks = [f"{key}/{rank}" for rank in range(self._world_size)]
        if self._rank == 0 and self._store.check(of_ranks):
            self._store.set(f"{key}/at", str(1 + max(map(self._count_under, of_ranks))))
        if self._store.check([f"{key}/at"]):
            acts_at = self._count_under(f"{key}/at")
            with self._changed:
                self._acts_at = acts_at
                self._changed.notify_all()

    def _count_under(self, key: str) -> int:
        return value_of(key, self._store.get(key), is_count)
