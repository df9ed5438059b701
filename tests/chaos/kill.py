"""Kills a job again and again, at random moments, and checks what is left each time."""

from __future__ import annotations

import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from lightning_d9d.checkpoint import open_directory
from tests.chaos.job import FINISHED, NUM_RANKS, NUM_STEPS, STARTED, train, weights
from tests.harness.compare import assert_bitwise_equal
from tests.harness.jobs import end_job, output_of_job, run_job, start_job

SECONDS_ALONE = 10
"""How long a rank may take to end after another was killed; a launcher would not wait so long."""
SECONDS = 120


@dataclass
class Report:
    kills: int = 0
    during_saves: int = 0
    """With files of an incomplete checkpoint left behind."""
    of_all_ranks: int = 0
    before_training: int = 0
    loaded: int = 0
    """Complete checkpoints, each read whole."""
    jobs: int = 0

    def __str__(self) -> str:
        return (
            f"{self.kills} kills ({self.of_all_ranks} of both ranks, {self.during_saves} during a save, "
            f"{self.before_training} before training began) of {self.jobs} jobs; {self.loaded} checkpoints that were "
            "left were read whole, and every job ended with the weights of one that was not killed"
        )


def finish(folder: Path, asynchronous: bool) -> None:
    """Run a job to its end, from wherever it is."""
    (folder / STARTED).unlink(missing_ok=True)
    run_job(NUM_RANKS, folder, train, folder, asynchronous)


def kill_at_random(folder: Path, asynchronous: bool, chance: random.Random, report: Report) -> bool:
    """Whether the job was still running."""
    (folder / STARTED).unlink(missing_ok=True)
    ranks = start_job(NUM_RANKS, folder, train, folder, asynchronous)
    early = chance.random() < 0.1
    if early:
        time.sleep(chance.uniform(0, 1.5))
    else:
        deadline = time.monotonic() + SECONDS
        while not (folder / STARTED).exists() and all(rank.is_alive() for rank in ranks):
            assert time.monotonic() < deadline, output_of_job(folder)
            time.sleep(0.002)
        time.sleep(chance.uniform(0, 2.0))
    victims = ranks if chance.random() < 0.5 else [chance.choice(ranks)]
    was_running = all(rank.is_alive() for rank in ranks)
    for rank in victims:
        rank.kill()
    codes = end_job(ranks, SECONDS_ALONE)
    if not was_running:
        assert codes == [0] * NUM_RANKS or -signal.SIGKILL in codes, f"{codes}\n{output_of_job(folder)}"
        return False
    report.kills += 1
    report.before_training += not (folder / STARTED).exists()
    report.of_all_ranks += len(victims) == NUM_RANKS
    return True


def check_what_is_left(folder: Path, newest: int, report: Report) -> int:
    """All that is there under a name is whole, and nothing is older than before. Returns the newest step."""
    saved = folder / "checkpoints"
    names = sorted(path.name for path in saved.iterdir()) if saved.exists() else []
    whole = {name: open_directory(saved / name, alone=True) for name in names if not name.startswith(".")}
    torn = any(name.startswith(".") for name in names)
    torn |= any(len(list((saved / name).glob("data-*"))) > 1 for name in whole)
    report.during_saves += torn
    for checkpoint in whole.values():
        checkpoint.read()
        report.loaded += 1
    steps = {name: checkpoint.values["global_step"] for name, checkpoint in whole.items()}
    assert all(str(step) in name or name == "last.ckpt" for name, step in steps.items()), steps
    now = max(steps.values(), default=0)
    assert now >= newest, f"{steps} are left, after step {newest} had been saved"
    assert steps.get("last.ckpt", 0) >= newest - 1, steps
    return now


def run(folder: Path, num_kills: int, seed: int, show: bool = False) -> Report:
    """Kill jobs so many times in all.

    Raises:
        AssertionError: A checkpoint that was left cannot be read, or a job did not end with the right weights.
    """
    chance, report = random.Random(seed), Report()
    whole = folder / "whole"
    whole.mkdir(parents=True)
    finish(whole, asynchronous=False)
    expected = weights(whole)
    while report.kills < num_kills:
        job = folder / f"job {report.jobs}"
        job.mkdir()
        newest = 0
        while report.kills < num_kills and not (job / FINISHED).exists():
            asynchronous = report.kills % 2 == 0
            if not kill_at_random(job, asynchronous, chance, report):
                break
            newest = check_what_is_left(job, newest, report)
            if show:
                print(f"job {report.jobs}, {asynchronous=}, kill {report.kills}: step {newest} of {NUM_STEPS}")
        if not (job / FINISHED).exists():
            finish(job, asynchronous=True)
        actual = weights(job)
        assert actual.keys() == expected.keys()
        for name, weight in expected.items():
            assert_bitwise_equal(name, actual[name], weight)
        report.jobs += 1
    return report
