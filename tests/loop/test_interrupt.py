"""Ctrl-C in the middle of a batch: the run stops before the next one, saves if asked, and says how to go on."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_d9d.checkpoint import open_directory
from lightning_d9d.loop.interrupt import Saved, exit_message
from tests.harness.terminal import run_in_terminal
from tests.loop.display_job import Job, fit, read

SAVING = {"save_last": True, "every_n_train_steps": 100, "save_on_exception": True}
LAST = "saved/last.ckpt"


def lines_of(folder: Path, *jobs: Job, codes: list[int]) -> list[str]:
    screen = run_in_terminal(jobs[0].num_ranks, folder, fit, *jobs)
    assert screen.exit_codes == codes
    return screen.lines


@pytest.mark.jobs
@pytest.mark.parametrize(
    ("job", "batches"),
    [
        (Job(saving=SAVING, trainer={"max_steps": 5}, interrupts=(0, 2, 1), num_workers=1), 3),
        (Job(saving=SAVING, trainer={"max_steps": 3, "accumulate_grad_batches": 2}, interrupts=(0, 2, 1)), 4),
        (Job(saving=SAVING, trainer={"max_steps": 5}, interrupts=(1, 2, 1), num_ranks=2), None),
    ],
    ids=["workers", "window", "two_ranks"],
)
def test_goes_on_as_if_never_interrupted(tmp_path: Path, job: Job, batches: int | None) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    lines_of(whole, replace(job, interrupts=None, saving=None, num_workers=0), codes=[0] * job.num_ranks)
    lines = lines_of(parts, job, codes=[1] * job.num_ranks)
    steps = len(read(parts, "loss")) // job.trainer.get("accumulate_grad_batches", 1)
    assert batches in (None, len(read(parts, "loss")))
    assert (
        f"Stopped after step {steps}, saved in {LAST}. To go on: the same command with --ckpt_path {LAST}, or "
        f"Trainer.fit(..., ckpt_path='{LAST}')"
    ) in lines
    lines_of(parts, replace(job, interrupts=None, resumes=True, num_workers=0), codes=[0] * job.num_ranks)
    assert read(parts, "loss") == read(whole, "loss")


@pytest.mark.jobs
def test_twice_saves_nothing(tmp_path: Path) -> None:
    """What is half a step must not take the place of a good checkpoint."""
    job = Job(saving={**SAVING, "every_n_train_steps": 2}, interrupts=(0, 3, 2))
    lines = lines_of(tmp_path, job, codes=[1])
    assert "Ctrl-C: training stops before the next batch; once more stops it at once, without saving" in lines
    last = next(line for line in lines if line.startswith("Stopped"))
    assert last.startswith(f"Stopped after step 3; the last checkpoint is {LAST}, of step 2 (to save where")
    lines_of(tmp_path, Job(resumes=True, trainer={"max_steps": 3}), codes=[0])
    assert [batch for batch, _ in read(tmp_path, "loss")] == [0, 1, 2, 2]


@pytest.mark.jobs
def test_a_rank_that_fails_saves_nothing(tmp_path: Path) -> None:
    """The ranks are at different places, and one would wait for the other."""
    job = Job(saving={**SAVING, "every_n_train_steps": 2}, interrupts=(1, 3, 0), num_ranks=2)
    lines = lines_of(tmp_path, job, codes=[1, 1])
    assert "ValueError: bad row on rank 1" in lines
    assert not [line for line in lines if line.startswith(("Stopped", "An ")) or "not ended" in line]
    end = next(number for number, line in enumerate(lines) if line.startswith("[rank 0] Failed"))
    assert lines[end].startswith(
        f"[rank 0] Failed after step 3; the last checkpoint is {LAST}, of step 2 (to lose less"
    )
    assert lines[end + 1].startswith("Error: rank 1 failed: ValueError: bad row on rank 1")
    assert not [line for line in lines if line.startswith("[rank 1] Failed")]
    assert open_directory(tmp_path / LAST, alone=True).values["global_step"] == 2


@pytest.mark.jobs
def test_one_process_that_fails_says_how_it_goes_on(tmp_path: Path) -> None:
    job = Job(saving={**SAVING, "save_on_exception": False, "every_n_train_steps": 2}, interrupts=(0, 3, 0))
    lines = lines_of(tmp_path, job, codes=[1])
    end = next(number for number, line in enumerate(lines) if line.startswith("Failed"))
    assert lines[end].startswith(f"Failed after step 3; the last checkpoint is {LAST}, of step 2 (to lose less")
    assert f"To go on: the same command with --ckpt_path {LAST}, or Trainer.fit(" in lines[end]
    assert lines[end + 1].startswith("Error: ValueError: bad row on rank 0")


@pytest.mark.jobs
def test_sigterm_ends_one_process_as_several(tmp_path: Path) -> None:
    """A scheduler that looks at the exit code must not take the run for a complete one."""
    job = Job(saving=SAVING, interrupts=(0, 2, 1), stop_signal=signal.SIGTERM)
    lines = lines_of(tmp_path, job, codes=[128 + signal.SIGTERM])
    assert any(line.startswith(f"Stopped after step 3, saved in {LAST}. To go on: ") for line in lines)


@pytest.mark.jobs
def test_without_a_checkpoint(tmp_path: Path) -> None:
    lines = lines_of(tmp_path, Job(saving=None, interrupts=(0, 1, 1)), codes=[1])
    advice = "to save where a run is stopped, give ModelCheckpoint save_on_exception: true"
    assert f"Stopped after step 2; nothing was saved ({advice})." in lines


@pytest.mark.parametrize(
    ("saved", "text"),
    [
        (Saved("gone.ckpt", 1), "Stopped after step 3; nothing was saved"),
        (Saved("s3://bucket/a.ckpt", 3), "Stopped after step 3, saved in s3://bucket/a.ckpt. To go on: the same"),
        (Saved("here.ckpt", None), "the last checkpoint is here.ckpt, from which this run went on ("),
    ],
)
def test_resume_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: Saved, text: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here.ckpt").touch()
    assert text in exit_message(3, saved)


def test_the_message_names_the_error_and_reports(tmp_path: Path) -> None:
    (tmp_path / "a b.ckpt").touch()
    path = f"'{tmp_path}/a b.ckpt'"
    assert exit_message(3, Saved(f"{tmp_path}/a b.ckpt", 2), "ValueError: bad row", ["hang-1.txt", "hang-2.txt"]) == (
        f"Failed after step 3; the last checkpoint is {path}, of step 2 (to lose less, give ModelCheckpoint "
        f"every_n_train_steps). To go on: the same command with --ckpt_path {path}, or Trainer.fit(..., "
        f'ckpt_path="{path}")\n'
        "Error: ValueError: bad row\nReports: hang-1.txt, hang-2.txt"
    )
