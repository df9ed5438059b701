"""Kill processes that save, at random moments, one or two at a time: `python -m tests.kills --kills 200`.

Each saves a file, a checkpoint directory and an export again and again, in one folder. After each round all three must
be whole and of one save, and the next save must remove what was left. `tests.chaos` does this with whole jobs.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lightning_d9d.checkpoint import remove_directory
from tests.harness.forked import Held
from tests.state.test_full_disk import save as export
from tests.state.test_full_disk import saved as exported
from tests.state.test_owner import checkpoint, file, number_of

SAVES: dict[str, tuple[Callable[[Path, int], None], Callable[[Path], float]]] = {
    "file.ckpt": (file, number_of),
    "folder.ckpt": (checkpoint, number_of),
    "export": (export, exported),
}
LONGEST = 0.4
"""Seconds from when all jobs save until the first is killed, and from one to the next."""


@dataclass
class Report:
    kills: int = 0
    of_two: int = 0
    """Kills of two jobs in one folder."""
    with_leftovers: int = 0
    """Rounds after which something incomplete lay in the folder."""
    read: int = 0
    """Files, checkpoints and exports, each whole."""

    def __str__(self) -> str:
        return (
            f"{self.kills} kills ({self.of_two} of two jobs in one folder); incomplete files were left in "
            f"{self.with_leftovers} rounds; {self.read} files, checkpoints and exports were read, all whole"
        )


def save_all(folder: Path, number: int) -> None:
    """Save once under each name."""
    for name, (save, _) in SAVES.items():
        save(folder / name, number)


def work(folder: Path, numbers: range, started: Callable[[], None]) -> None:
    """Save until the process is killed, or the one that would do so has ended; other jobs have other numbers."""
    parent = os.getppid()
    save_all(folder, numbers[0])
    started()
    for number in itertools.takewhile(lambda _: os.getppid() == parent, itertools.cycle(numbers)):
        save_all(folder, number)


def kill_some(folder: Path, num_jobs: int, chance: random.Random, report: Report) -> None:
    """One round: all jobs are killed, one after the other, and none may have ended by itself."""
    numbers = [range(1000 * job, 1000 * (job + 1)) for job in range(1, num_jobs + 1)]
    jobs = [Held(lambda stop, own=own: work(folder, own, stop)) for own in numbers]
    for job in jobs:
        job.go()
    for job in jobs:
        time.sleep(chance.uniform(0, LONGEST))
        assert job.kill() == -signal.SIGKILL, "a job failed; see its traceback above"
        report.kills += 1
        report.of_two += num_jobs == 2
    report.with_leftovers += any(name.startswith(".") for name in os.listdir(folder))
    check(folder, {number for own in numbers for number in own}, report)
    save_all(folder, 1)
    check(folder, {1}, report)
    assert sorted(os.listdir(folder)) == sorted(SAVES)
    for name in ("folder.ckpt", "export"):
        assert len(os.listdir(folder / name)) == (2 if name == "folder.ckpt" else 4)


def check(folder: Path, numbers: set[int], report: Report) -> None:
    """All is there, whole, and of one of these saves."""
    for name, (_, read) in SAVES.items():
        assert read(folder / name) in numbers, name
        report.read += 1


def run(folder: Path, num_kills: int, seed: int, seconds: float = float("inf"), show: bool = False) -> Report:
    """Kill so many processes.

    Raises:
        AssertionError: Something was not whole, or a process failed.
        StateError: Likewise.
    """
    chance, report, end = random.Random(seed), Report(), time.monotonic() + seconds
    folder.mkdir()
    while report.kills < num_kills and time.monotonic() < end:
        kill_some(folder, chance.choice([1, 2]), chance, report)
        if show:
            print(report, flush=True)
        if chance.random() < 0.2:
            remove_directory(folder / "folder.ckpt")
    return report


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no round after this time")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(run(Path(folder) / "kills", arguments.kills, arguments.seed, arguments.seconds))


if __name__ == "__main__":
    main()
