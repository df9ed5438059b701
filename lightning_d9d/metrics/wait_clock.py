"""Measures the total time for which a rank waits for others, without making the host wait."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path
from time import perf_counter, thread_time

import torch

_MOST_READINGS = 4
_MOST_BYTES = 100
_opened = threading.local()


class WaitClock:
    """Adds up the waits that it is notified of, as a `lightning_d9d.waits.WaitObserver`.

    On the CPU it measures the host's time. On CUDA it measures the time of the compute stream, between two events.

    Args:
        device: The device that computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._seconds = 0.0
        self.queued = 0.0
        """How much of these waits was one for a processor as well, after the others had come."""
        self.used = 0.0
        """How much of a processor this thread has used in them."""
        self._begin: tuple[float, float, float] | torch.cuda.Event | None = None
        self._under_way: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def begin_wait(self) -> None:
        """Begin a wait of the computation for other ranks. Local."""
        if not self._on_cuda:
            self._begin = (*moment(), thread_time())
        elif not torch.cuda.is_current_stream_capturing():
            self._begin = new_event()

    def end_wait(self) -> None:
        """End a wait: computation continues. Local."""
        if isinstance(self._begin, tuple):
            (begin, queued_before, used_before), (end, queued), used = self._begin, moment(), thread_time()
            self.used += used - used_before
            self._seconds += end - begin
            self.queued += queued - queued_before
        elif self._begin is not None:
            self._under_way.append((self._begin, new_event()))
        self._begin = None

    @property
    def seconds(self) -> float:
        """The seconds of all waits that are known to have ended. It does not wait for the device."""
        while self._under_way and self._under_way[0][1].query():
            begin, end = self._under_way.pop(0)
            self._seconds += begin.elapsed_time(end) / 1000
        return self._seconds


def moment() -> tuple[float, float]:
    """Return the current time, and how long this thread has waited for a processor until now, in seconds. Local.

    Both are read at one moment. Other programs often get the processor between two readings, and that time would be
    counted twice or not at all.
    """
    now, queued = 0.0, _seconds_in_queue()
    for _ in range(_MOST_READINGS):
        now, before = perf_counter(), queued
        queued = _seconds_in_queue()
        if queued == before:
            break
    return now, queued


def _seconds_in_queue() -> float:
    """Return 0 if the system does not tell."""
    thread = threading.get_native_id()
    if getattr(_opened, "thread", None) != thread:  # a new one, or the copy of one in a forked process
        _opened.thread = thread
        _opened.file = None
        with suppress(OSError):
            _opened.file = Path("/proc/thread-self/schedstat").open("rb", buffering=0)  # noqa: SIM115  # it stays open
    if _opened.file is None:
        return 0.0
    try:
        return int(os.pread(_opened.file.fileno(), _MOST_BYTES, 0).split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def new_event() -> torch.cuda.Event:
    """Return an event recorded at the current point of the compute stream. Local."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
