"""Kills a job again and again, at random moments, and checks what is left each time."""

from __future__ import annotations

import random
import signal
import time
from dataclasses import astuple, dataclass
from pathlib import Path

from lightning_d9d.checkpoint import open_directory
from tests.chaos.job import FINISHED, NUM_RANKS, NUM_STEPS, WRITER, started, train, weights
from tests.harness.compare import assert_bitwise_equal
from tests.harness.jobs import end_job, output_of_job, start_job

SECONDS_ALONE = 10
"""How long a rank may take to end after another was killed; a launcher would not wait so long."""
SECONDS = 120
ALONE = 0.7
"""How many of the rounds have one job; in the others, two save in one folder."""


@dataclass
class Report:
    kills: int = 0
    during_saves: int = 0
    """Kills that left files of an incomplete checkpoint behind."""
    of_all_ranks: int = 0
    before_training: int = 0
    of_two: int = 0
    """Kills of one of two jobs in one folder."""
    loaded: int = 0
    """Complete checkpoints, each read whole."""
    started: int = 0
    ended: int = 0

    def __add__(self, other: Report) -> Report:
        return Report(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __str__(self) -> str:
        return (
            f"{self.kills} kills ({self.of_all_ranks} of both ranks, {self.during_saves} during a save, "
            f"{self.before_training} before training began, {self.of_two} beside another job in the same folder) of "
            f"{self.ended} jobs; {self.loaded} checkpoints that were left were read whole and of one writer, and every "
            "job ended with the weights of one that was not killed"
        )


class Running:
    """The ranks of a job that goes on from where others in its folder were."""

    def __init__(self, folder: Path, asynchronous: bool, report: Report) -> None:
        report.started += 1
        self.folder, self.started = folder, started(folder, report.started)
        self.ranks = start_job(NUM_RANKS, folder, train, folder, asynchronous, report.started)

    def wait_at_random(self, chance: random.Random) -> None:
        """Wait until some moment before or in training."""
        if chance.random() < 0.1:
            time.sleep(chance.uniform(0, 1.5))
            return
        deadline = time.monotonic() + SECONDS
        while not self.started.exists() and self.is_whole():
            assert time.monotonic() < deadline, output_of_job(self.folder)
            time.sleep(0.002)
        time.sleep(chance.uniform(0, 2.0))

    def is_whole(self) -> bool:
        """Whether all ranks are running."""
        return all(rank.is_alive() for rank in self.ranks)

    def kill(self, chance: random.Random, report: Report) -> bool:
        """Kill one rank or all. Returns whether the job was still running."""
        victims = self.ranks if chance.random() < 0.5 else [chance.choice(self.ranks)]
        was_running = self.is_whole()
        for rank in victims:
            rank.kill()
        codes = end_job(self.ranks, SECONDS_ALONE)
        if was_running:
            report.kills += 1
            report.before_training += not self.started.exists()
            report.of_all_ranks += len(victims) == NUM_RANKS
        else:
            whole = codes == [0] * NUM_RANKS or -signal.SIGKILL in codes
            assert whole, f"{codes}\n{output_of_job(self.folder)}"
        return was_running

    def finish(self) -> None:
        """Wait for its end."""
        codes = end_job(self.ranks, SECONDS)
        assert codes == [0] * NUM_RANKS, f"{codes}\n{output_of_job(self.folder)}"


def kill_at_random(folder: Path, asynchronous: bool, chance: random.Random, report: Report) -> bool:
    """Kill a job, alone or beside its successor, which may be killed, too. Returns whether there was one."""
    job = Running(folder, asynchronous, report)
    job.wait_at_random(chance)
    if chance.random() < ALONE:
        job.kill(chance, report)
        return False
    successor = Running(folder, not asynchronous, report)
    successor.wait_at_random(chance)
    are_two = successor.is_whole()
    report.of_two += job.kill(chance, report) and are_two
    if chance.random() < 0.5:
        successor.kill(chance, report)
    else:
        successor.finish()
    return True


def check_what_is_left(folder: Path, newest: int, report: Report) -> int:
    """All that is there under a name is whole and of one job, and nothing is older than before.

    Args:
        folder: That of the jobs.
        newest: The step that must not be lost.
        report: Counts what was read.

    Returns:
        The newest step from which the next job may go on.
    """
    saved = folder / "checkpoints"
    names = sorted(path.name for path in saved.iterdir()) if saved.exists() else []
    whole = {name: open_directory(saved / name, alone=True) for name in names if not name.startswith(".")}
    torn = any(name.startswith(".") for name in names)
    torn |= any(len(list((saved / name).glob("data-*"))) > 1 for name in whole)
    report.during_saves += torn
    for name, checkpoint in whole.items():
        writers = [int(tensor) for key, tensor in checkpoint.read().items() if key.endswith(WRITER)]
        assert writers == [checkpoint.values[WRITER]], f"{name} is of jobs {writers} and {checkpoint.values[WRITER]}"
        report.loaded += 1
    steps = {name: checkpoint.values["global_step"] for name, checkpoint in whole.items()}
    assert all(str(step) in name or name.startswith("last") for name, step in steps.items()), steps
    now = max(steps.values(), default=0)
    last = max((step for name, step in steps.items() if name.startswith("last")), default=0)
    assert now >= newest, f"{steps} are left, after step {newest} had been saved"
    assert last >= newest - 1, steps
    return min(now, last + 1)


def run(folder: Path, num_kills: int, seed: int, show: bool = False, seconds: float = float("inf")) -> Report:
    """Kill jobs so many times in all, but not after `seconds`.

    Raises:
        AssertionError: A checkpoint that was left cannot be read, or a job did not end with the right weights.
    """
    chance, report, end = random.Random(seed), Report(), time.monotonic() + seconds
    whole = folder / "whole"
    whole.mkdir(parents=True)
    Running(whole, False, report).finish()
    expected = weights(whole)
    while report.kills < num_kills and time.monotonic() < end:
        job = folder / f"job {report.ended}"
        job.mkdir()
        newest = 0
        while report.kills < num_kills and time.monotonic() < end and not (job / FINISHED).exists():
            asynchronous = report.kills % 2 == 0
            were_two = kill_at_random(job, asynchronous, chance, report)
            newest = check_what_is_left(job, 0 if were_two else newest, report)
            if show:
                print(f"job {report.ended}, {asynchronous=}, {report}: step {newest} of {NUM_STEPS}", flush=True)
        if not (job / FINISHED).exists():
            Running(job, True, report).finish()
        check_what_is_left(job, NUM_STEPS, report)
        actual = weights(job)
        assert actual.keys() == expected.keys()
        for name, weight in expected.items():
            assert_bitwise_equal(name, actual[name], weight)
        report.ended += 1
    return report
