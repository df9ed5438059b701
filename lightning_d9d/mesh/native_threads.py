"""Native threads of process groups, where they would end or stop a process: at its exit, and in one forked from it.

[Note: exit] A thread of gloo lets go of the tensors of a collective a moment after that is done. Letting go of the last
reference to one needs the interpreter. Where that is already ending, CPython (before 3.14) ends the thread inside C++
code, and the process dies with "terminate called without an active exception".

[Note: fork] A forked process, a dataloader's worker say, has the objects of its parent and none of its threads. If its
garbage collector finds a process group among them, the group waits for its threads for ever. So does a forked CPython
before 3.12 for a lock around its list of threads, where a thread of the parent had it: one of gloo, which enters the
interpreter to let go of a tensor.
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
    """Let this process wait for threads of gloo at its exit and at forks, and what is forked leave its objects alone.

    Local. For all groups of the process; once is enough.
    """
    atexit.register(_wait_until_idle)
    os.register_at_fork(before=_wait_until_idle, after_in_child=gc.freeze)


def _wait_until_idle() -> None:
    """Wait until no thread of gloo has anything to do or waits for the interpreter.

    Such a thread sleeps, and still does without having run after this one has let go of the interpreter.
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
    """Whether each thread of gloo sleeps, and how often it was put to sleep or interrupted."""
    found = {}
    for task in _TASKS.iterdir():
        try:
            status = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines() if ":\t" in line)
        except OSError:  # it has ended
            continue
        if status["Name"] == _NAME:
            switches = tuple(value for name, value in status.items() if name.endswith("_ctxt_switches"))
            found[task.name] = status["State"].startswith("S"), switches
    return found
