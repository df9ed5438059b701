"""Jobs whose ranks write to a terminal: what a person would see there."""

from __future__ import annotations

import os
import re
import termios
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.harness.jobs import TargetOfRank, end_job, start_job

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_SIZE = (50, 200)
"""Lines and columns."""


@dataclass
class Screen:
    """What the ranks of a job have written to their terminal."""

    written: str
    exit_codes: list[int | None]
    """The exit codes of the ranks."""

    @property
    def lines(self) -> list[str]:
        """All lines that were to be seen at some moment, without colors, in order; a bar was many."""
        text = _CONTROL.sub("", self.written)
        return [line.rstrip() for line in re.split(r"[\r\n]+", text) if line.strip()]


def run_in_terminal(
    num_ranks: int, folder: Path, target: TargetOfRank, *arguments: Any, seconds: float = 120
) -> Screen:
    """Run a job as `start_job` does, in a terminal that its ranks share.

    Args:
        num_ranks: Processes.
        folder: Their working directory.
        target: A function of a module.
        arguments: Picklable.
        seconds: When ranks are killed.
    """
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, _SIZE)
    parts: list[bytes] = []

    def read() -> None:
        try:
            while part := os.read(ours, 65536):
                parts.append(part)
        except OSError:  # nobody holds the other side any more
            pass

    reader = threading.Thread(target=read)
    reader.start()
    try:
        ranks = start_job(num_ranks, folder, _in_terminal, os.ttyname(theirs), folder, target, arguments)
        codes = end_job(ranks, seconds)
    finally:
        os.close(theirs)
        reader.join()
        os.close(ours)
    screen = Screen(b"".join(parts).decode(errors="replace"), codes)
    print(screen.written)
    return screen


def _in_terminal(terminal: str, folder: Path, target: TargetOfRank, arguments: tuple[Any, ...]) -> None:
    descriptor = os.open(terminal, os.O_RDWR | os.O_NOCTTY)
    for standard in (0, 1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)
    os.environ.update(TERM="xterm", COLUMNS=str(_SIZE[1]))
    os.chdir(folder)
    target(*arguments)
