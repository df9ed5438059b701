"""Guards against native threads of process groups that would abort or hang a process, at its exit or in a fork of it.

[Note: exit] A thread of gloo releases the tensors of a collective a moment after the collective is done. Releasing the
last reference to a tensor needs the interpreter. If the interpreter is already ending, CPython (before 3.14) ends the
thread inside C++ code. Then the process dies with "terminate called without an active exception".

[Note: fork] A forked process, such as a dataloader's worker, has the objects of its parent and none of its threads. If
its garbage collector finds a process group among them, the group waits for its threads for ever. A fork of CPython
before 3.12 can hang in a similar way. It waits for the lock of its list of threads if a thread of the parent held it
during the fork. A thread of gloo holds that lock when it enters the interpreter to release a tensor.
"""

from __future__ import annotations

import atexit
import functools
import gc
import os
import time
from pathlib import Path

_TASKS = Path("/proc/self/task")
_NAME = "pt_gloo_runloop"
_RELEASE_SECONDS = 0.001
_WITHOUT_TASKS_SECONDS = 0.1


@functools.cache
def guard_native_threads() -> None:
    """Make this process wait for threads of gloo at its exit and at forks; forked processes do not touch its objects.

    Local. One call covers all groups of the process.
    """
    atexit.register(_wait_until_idle)
    os.register_at_fork(before=_wait_until_idle, after_in_child=gc.freeze)


def _wait_until_idle() -> None:
    """Wait until all threads of gloo are idle, and none waits for the interpreter.

    An idle thread sleeps, and has not run since even after this thread has released the interpreter.
    """
    if not _TASKS.exists():
        time.sleep(_WITHOUT_TASKS_SECONDS)
        return
    before = _threads()
    while True:
        time.sleep(_RELEASE_SECONDS)
        now = _threads()
        if now == before and all(is_asleep for is_asleep, _ in now.values()):
            return
        before = now


def _threads() -> dict[str, tuple[bool, tuple[str, ...]]]:
    """Return for each thread of gloo whether it sleeps, and how often it was put to sleep or interrupted."""
    found = {}
    for task in _TASKS.iterdir():
        try:
            status = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines() if ":\t" in line)
        except OSError:  # the thread has ended
            continue
        if status["Name"] == _NAME:
            switches = tuple(value for name, value in status.items() if name.endswith("_ctxt_switches"))
            found[task.name] = status["State"].startswith("S"), switches
    return found
