"""How long this rank waits for others inside of a step: the time between two points around each wait.

On the CPU it is the host's time. On CUDA it is that of the stream that computes, between two events.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter

import torch


class WaitClock:
    """Adds up waits while it is `open`."""

    def __init__(self) -> None:
        self._num_users = 0
        self._seconds = 0.0
        self.queued = 0.0
        """How much of these waits was one for a processor as well, after the others had come."""
        self._under_way: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def open(self) -> Iterator[None]:
        """Measure until the end of the body."""
        self._num_users += 1
        try:
            yield
        finally:
            self._num_users -= 1
            self._under_way.clear()

    @contextmanager
    def waiting(self, device: torch.device) -> Iterator[None]:
        """Open around a wait for other ranks; costs nothing unless somebody measures."""
        if not self._num_users or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            yield
        elif device.type == "cuda":
            ends = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            ends[0].record()
            yield
            ends[1].record()
            self._under_way.append(ends)
        else:
            begin, queued = perf_counter(), seconds_in_queue()
            yield
            self._seconds += perf_counter() - begin
            self.queued += seconds_in_queue() - queued

    @property
    def seconds(self) -> float:
        """All waits so far that are known to have ended. Does not wait for the device."""
        while self._under_way and self._under_way[0][1].query():
            begin, end = self._under_way.pop(0)
            self._seconds += begin.elapsed_time(end) / 1000
        return self._seconds


def seconds_in_queue() -> float:
    """Return how long this thread has waited for a processor; 0 where the system does not say. Local."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


clock = WaitClock()
"""The one of this process: its waits are those of one thread that trains."""
