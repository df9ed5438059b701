"""Ends ranks that a process has started."""

from __future__ import annotations

import time
from collections.abc import Sequence
from subprocess import Popen, TimeoutExpired


def end_processes(processes: Sequence[Popen], patience_seconds: float) -> None:
    """Wait until processes have ended; kill those that are late, or all if the user does not wait."""
    deadline = time.monotonic() + patience_seconds
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except (TimeoutExpired, KeyboardInterrupt):
            deadline = 0.0
            process.kill()
            process.wait()
