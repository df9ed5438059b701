"""Measures the parts of a start that take long, and logs them while they run.

Each such part is wrapped in `start_part` where its code is. The callback `StartTimes` prints them as a table.
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
"""Seconds after which a part is logged."""
_lock = threading.Lock()
_seconds: Counter[str] = Counter()
_of_thread = threading.local()


@contextmanager
def start_part(name: str, says: bool = True) -> Iterator[None]:
    """Measure the code inside as a part of the start. Local.

    The time of a part inside of another counts only for the inner one.

    Args:
        name: Name of the part.
        says: Whether to log on the first rank that it takes long, while it runs.
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
    """Add seconds of a part that is measured in pieces, and log once if they are many. Local.

    Args:
        name: Name of the part.
        seconds: Seconds of this piece.
        note: The end of the message.
    """
    with _lock:
        before = _seconds[name]
        _seconds[name] += seconds  # type: ignore[assignment]
    if before < LONG_S <= before + seconds:
        _say(name, before + seconds, note)


def seconds_of_parts() -> dict[str, float]:
    """Return the seconds of each part since this process began. Local."""
    with _lock:
        return dict(_seconds)


def _say(name: str, seconds: float, note: str = "") -> None:
    if not (dist.is_initialized() and dist.get_rank()):
        logger.warning("start: %s, %.0f s so far%s", name, seconds, note)
