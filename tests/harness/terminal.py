"""A program in a terminal of its own: what it writes there, as a person would see it."""

from __future__ import annotations

import os
import re
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_SIZE = (50, 160)
"""Lines and columns."""


class Screen:
    """What a program has written to its terminal, and its exit code.

    Args:
        written: All of it.
        exit_code: Of the program; negative for a signal.
    """

    def __init__(self, written: str, exit_code: int) -> None:
        self.written, self.exit_code = written, exit_code

    @property
    def lines(self) -> list[str]:
        """All lines that were to be seen at some moment, without colors, in order; a bar was many."""
        text = _CONTROL.sub("", self.written)
        return [line.rstrip() for line in re.split(r"[\r\n]+", text) if line.strip()]


def run_in_terminal(
    command: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    when_written: Mapping[str, Callable[[subprocess.Popen], None]] | None = None,
    seconds: float = 200.0,
) -> Screen:
    """Run a program in a session of its own, whose terminal this is, until all processes that hold it have ended.

    Args:
        command: The program and its arguments.
        folder: Where it runs.
        environment: Its variables.
        when_written: By texts, what to do once, when the text has been written.
        seconds: When it is killed.
    """
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, _SIZE)
    waiting = dict(when_written or {})
    variables = {**environment, "TERM": "xterm"}
    process = subprocess.Popen(
        command, cwd=folder, env=variables, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    written = b""
    deadline = time.monotonic() + seconds
    try:
        while time.monotonic() < deadline:
            try:
                part = os.read(ours, 65536)
            except OSError:  # nobody holds the other side any more
                break
            if not part:
                break
            written += part
            for text in [text for text in waiting if text.encode() in written]:
                waiting.pop(text)(process)
    finally:
        os.close(ours)
        if process.poll() is None and time.monotonic() >= deadline:
            os.killpg(process.pid, 9)
        code = process.wait()
    text = written.decode(errors="replace")
    print(text)
    assert not waiting, f"never written: {list(waiting)}"
    return Screen(text, code)
