"""`EarlyStop` makes ranks end a fit together, although `Trainer.should_stop` may be set on any of them, at any time.

Lightning reads the flag at points that all ranks pass in the same order. A rank that finds the flag set at such a point
writes the key "early_stop/N" and waits. A watchdog that finds this key publishes how many points its rank has passed.
Then its main thread waits at its next point. All ranks end at the point after the last one that any rank has passed. If
all ranks set the flag at the same point, they end at that point, as under Lightning.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch.distributed as dist

from lightning_d9d.coordination.messages import is_count, value_of


class EarlyStop:
    """The agreement of one rank in one run. `is_here` is for the thread that trains, `agree` for the watchdog.

    Args:
        store: Prefix of the keys, the same on every rank.
        rank: Global rank.
        world_size: Number of ranks.
        changed: Guards the state that both threads change, and signals changes.
        wake: Makes the watchdog poll at once.
        has_failed: Returns whether a rank has failed, so that waiting is useless.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        changed: threading.Condition,
        wake: Callable[[], None],
        has_failed: Callable[[], bool],
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._changed = changed
        self._wake = wake
        self._has_failed = has_failed
        self._num_stops = self._num_points = 0
        self._wants = self._waits = self._has_stopped = False
        self._stops_at: int | None = None

    def is_here(self, wants: bool) -> bool:
        """Return whether all ranks end training at this point. Collective, but waits only if some rank wants to end.

        Args:
            wants: Whether this rank wants to end. Once all have stopped, they stay stopped until this is False.
        """
        with self._changed:
            self._has_stopped &= wants
            if self._has_stopped:
                return True
            if wants and not self._wants:
                self._wants = self._waits = True
                self._wake()
            self._changed.wait_for(lambda: not self.is_open or self._has_failed())
            self._num_points += 1
            if self._num_points != self._stops_at:
                return False
            self._num_stops += 1
            self._has_stopped, self._wants, self._waits, self._stops_at = True, False, False, None
            return True

    @property
    def is_open(self) -> bool:
        """True if some rank wants to end and the common point is not known yet."""
        return self._waits and self._stops_at is None

    def agree(self) -> None:
        """Read the store, and publish the values that other ranks need.

        Raises:
            ForeignValueError: A value in the store was not written by a rank.
        """
        if self._stops_at is not None:
            return
        key = f"early_stop/{self._num_stops}"
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
            stops_at = self._count_under(f"{key}/at")
            with self._changed:
                self._stops_at = stops_at
                self._changed.notify_all()

    def _count_under(self, key: str) -> int:
        return value_of(key, self._store.get(key), is_count)
