"""A watchdog that cannot be silenced: by streams that take nothing, or by values in the store that no rank wrote."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_d9d.coordination.messages import Failure
from lightning_d9d.coordination.watchdog import RankWatch
from tests.coordination import watched
from tests.harness import warm

SECONDS = watched.SHUTDOWN_SECONDS + 60
"""Seconds until a process has ended, with the wait for its messages, on a busy machine."""


def start(target: Any, *arguments: Any) -> Any:
    process = warm.context().Process(target=target, args=arguments)
    process.start()
    return process


def end(process: Any, seconds: float) -> int | None:
    """Return its exit code; None if it had to be killed."""
    process.join(seconds)
    code = process.exitcode
    process.kill()
    process.join()
    return code


@pytest.mark.jobs
@pytest.mark.parametrize(
    ("key", "value", "code"),
    [("failure", Failure(1, "ValueError: bad row").to_store(), 1), ("stop", "[1, 15]", 128 + signal.SIGTERM)],
)
@pytest.mark.parametrize("streams", watched.STREAMS)
def test_a_rank_that_cannot_speak_ends(streams: str, key: str, value: str, code: int) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    process = start(watched.wait_with_streams, streams, store.port)
    store.wait(["ready"])
    begin = time.monotonic()
    store.set(key, value)
    assert end(process, SECONDS) == code
    assert time.monotonic() - begin > watched.SHUTDOWN_SECONDS


@pytest.mark.jobs
def test_what_a_rank_was_blocked_in_is_told_though_it_has_just_left(tmp_path: Path) -> None:
    """A collective ends with an error when the other rank is ended, which may be a moment earlier."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    process = start(watched.leave_just_before_the_end, tmp_path / "said", store.port)
    store.wait(["ready"])
    store.set("failure", Failure(1, "ValueError: bad row").to_store())
    assert end(process, SECONDS) == 1
    now, before = (tmp_path / "said").read_text().split("A moment before it was at:\n")
    assert "in be_blocked" not in now
    assert "in be_blocked\n    leaves.wait()\n" in before
    assert before.endswith("[rank 0] To go on: the same command\n")


@pytest.mark.jobs
def test_a_rank_that_is_ended_names_those_that_do_not_answer(tmp_path: Path) -> None:
    """The error that would say so has not been written when the time limit is over."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    process = start(watched.lose_the_other_rank, tmp_path / "said", store.port)
    assert end(process, SECONDS) == 1
    assert "\n[rank 0] no answer from rank 1: a process ended" in (tmp_path / "said").read_text()


@pytest.mark.jobs
def test_values_that_no_rank_wrote(tmp_path: Path) -> None:
    process = start(watched.read_garbage, tmp_path / "heard.json")
    assert end(process, 240) == 0
    heard = json.loads((tmp_path / "heard.json").read_text())
    for key, by_garbage in heard.items():
        assert by_garbage.keys() == set(watched.GARBAGE)
        for garbage, text in by_garbage.items():
            assert f"under {key!r}, which no rank of this job wrote" in text, (key, garbage[:40], text[:200])
            assert text.startswith("rank 0 failed: ")


@pytest.mark.jobs
def test_numbers_that_no_rank_counted(tmp_path: Path) -> None:
    process = start(watched.count_garbage, tmp_path / "heard.json")
    assert end(process, 60) == 0
    heard = json.loads((tmp_path / "heard.json").read_text())
    assert heard.pop("num_left") == "None"  # read when all have arrived
    assert heard.pop("num_heard") == "rank 0 failed: torch.distributed.DistNetworkError: a connection broke"
    assert heard.keys() == {"num_arrived", "meeting/epoch/0", "meeting/evaluation/0"}
    for key, text in heard.items():
        assert text.startswith("rank 0 failed: ")
        assert f"the store has b'x' under {key!r}, which no rank of this job wrote" in text


def test_a_failure_is_the_same_behind_the_store() -> None:
    failure = Failure.of(3, ValueError("\U0001f600" * 200_000))
    assert len(failure.summary) == 10_000
    assert Failure.from_store("failure", failure.to_store().encode()) == failure


def test_a_note_about_another_rank_does_not_steer_a_terminal() -> None:
    watch = RankWatch(dist.HashStore(), 0, 2, 600, 2, [], lambda _: SystemExit())
    watch.failure = Failure(1, "ValueError: \x1b[2J")
    error = ValueError("own")
    watch.report(error)
    assert error.__notes__ == ["before that, rank 1 failed: ValueError: \\x1b[2J"]
