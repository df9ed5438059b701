"""Where the time of a start goes: parts of it that take long are measured, and said while they run.

`start_part` is put around such a part where its code is. The callback `StartTimes` makes a table of them.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from lightning_d9d.log import logger

LONG_S = 10.0
"""Seconds after which a part is worth a message."""
_lock = threading.Lock()
_seconds: Counter[str] = Counter()
_of_thread = threading.local()


@contextmanager
def start_part(name: str, says: bool = True) -> Iterator[None]:
    """Measure what runs inside as a part of the start. Local.

    The time of a part inside of another one is the inner one's alone.

    Args:
        name: Of the part.
        says: Say on the first rank when it takes long, while it runs.
    """
    timer = threading.Timer(LONG_S, _say, [name, LONG_S])
    timer.daemon = True
    if says:
        timer.start()
    outer, _of_thread.inner = getattr(_of_thread, "inner", 0.0), 0.0
    begin = time.perf_counter()
    try:
        yield
    finally:
        elapsed = time.perf_counter() - begin
        if says:
            timer.cancel()
            timer.join()  # so that no thread is there when workers are forked next
        with _lock:
            _seconds[name] += elapsed - _of_thread.inner  # type: ignore[assignment]
        _of_thread.inner = outer + elapsed


def add(name: str, seconds: float, note: str = "") -> None:
    """Count seconds of a part that was measured piece by piece, and say once when they are many. Local.

    Args:
        name: Of the part.
        seconds: Of this piece.
        note: The end of what is said.
    """
    with _lock:
        before = _seconds[name]
        _seconds[name] += seconds  # type: ignore[assignment]
    if before < LONG_S <= before + seconds:
        _say(name, before + seconds, note)


def seconds_of_parts() -> dict[str, float]:
    """Seconds of each part since this process began. Local."""
    with _lock:
        return dict(_seconds)


def _say(name: str, seconds: float, note: str = "") -> None:
    if not (dist.is_initialized() and dist.get_rank()):
        logger.warning("start: %s, %.0f s so far%s", name, seconds, note)
