"""How long a rank waits for others in all: a sum that is read now and then, without making the host wait."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter

import torch


class WaitClock:
    """Adds up waits that it hears of, as `lightning_d9d.waits.WaitObserver`.

    On the CPU it is the host's time. On CUDA it is that of the stream that computes, between two events.

    Args:
        device: That computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._seconds = 0.0
        self.queued = 0.0
        """How much of these waits was one for a processor as well, after the others had come."""
        self._begin: tuple[float, float] | torch.cuda.Event | None = None
        self._under_way: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def begin_wait(self) -> None:
        """Computation waits for other ranks from here on. Local."""
        if not self._on_cuda:
            self._begin = perf_counter(), seconds_in_queue()
        elif not torch.cuda.is_current_stream_capturing():
            self._begin = new_event()

    def end_wait(self) -> None:
        """Computation goes on. Local."""
        if isinstance(self._begin, tuple):
            begin, queued = self._begin
            self._seconds += perf_counter() - begin
            self.queued += seconds_in_queue() - queued
        elif self._begin is not None:
            self._under_way.append((self._begin, new_event()))
        self._begin = None

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


def new_event() -> torch.cuda.Event:
    """Return an event that the stream which computes passes when it has come here. Local."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
