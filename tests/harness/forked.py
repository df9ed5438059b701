"""Actions in a forked process: killed at a chosen moment, held there, or with a small file system of its own."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

KILLED = 9
_NEW_USER, _NEW_MOUNTS = 0x10000000, 0x00020000
"""The flags of `clone(2)` for a new user namespace and for new mounts."""


def killed_at(call: int, folder: Path, action: Callable[[], object]) -> bool:
    """Whether `action`, in a process of its own, got as far as its n-th call that concerns `folder`."""
    left = [call]

    def before(event: str, arguments: tuple[object, ...]) -> None:
        if event == "ctypes.dlsym" or (arguments and str(arguments[0]).startswith(str(folder))):
            left[0] -= 1
            if left[0] < 0:
                os._exit(KILLED)

    def watched() -> None:
        sys.addaudithook(before)
        action()

    code = _forked(watched)
    assert code in (0, KILLED)
    return code == KILLED


class Held:
    """A process that stops where its action asks for it.

    Args:
        action: Gets what to call where it is to stop; the first call stops it.
    """

    def __init__(self, action: Callable[[Callable[[], None]], object]) -> None:
        stopped, says_stopped = os.pipe()
        may_go, self._go = os.pipe()

        def stop() -> None:
            os.write(says_stopped, b"s")
            os.read(may_go, 1)

        self.process = os.fork()
        if self.process == 0:
            os.close(self._go)
            _do(lambda: action(stop))
        os.close(says_stopped)
        os.close(may_go)
        is_held = os.read(stopped, 1) == b"s"
        os.close(stopped)
        assert is_held, "the process ended before it stopped"

    def go(self) -> None:
        """Let it go on."""
        os.write(self._go, b"g")

    def finish(self) -> None:
        """Let it go on and end, as it must without an error."""
        self.go()
        assert self._ended() == 0

    def kill(self) -> int:
        """Kill it where it is; the exit code is another than -9 if it had ended before."""
        os.kill(self.process, signal.SIGKILL)
        return self._ended()

    def _ended(self) -> int:
        os.close(self._go)
        return os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])


def on_small_disk(folder: Path, num_kb: int, action: Callable[[], object]) -> None:
    """Runs `action` in a process that has a file system of this size at `folder`, which others do not see.

    The test is marked `mounts`. Raises `AssertionError` if the action raises; what it raised is printed.
    """
    maps = {"setgroups": "deny", "uid_map": f"0 {os.geteuid()} 1", "gid_map": f"0 {os.getegid()} 1"}

    def mounted() -> None:
        system = ctypes.CDLL(None, use_errno=True)
        if system.unshare(_NEW_USER | _NEW_MOUNTS) != 0:
            raise OSError(ctypes.get_errno(), "unshare")
        for name, content in maps.items():
            Path("/proc/self", name).write_text(content)
        if system.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, f"size={num_kb}k".encode()) != 0:
            raise OSError(ctypes.get_errno(), "mount")
        action()

    assert _forked(mounted) == 0


def _forked(action: Callable[[], object]) -> int:
    """The exit code of a process that does this and nothing else."""
    child = os.fork()
    if child == 0:
        _do(action)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _do(action: Callable[[], object]) -> NoReturn:
    try:
        action()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)
