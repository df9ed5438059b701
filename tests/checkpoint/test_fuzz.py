"""Files changed at random are read or refused: with the package's own errors, soon, and with little memory.

Two seconds for each; `python -m tests.fuzz --minutes 60` takes longer.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.fuzz import MAX_SECONDS, TARGETS, attack, outcome, run

SECONDS = 2
"""Seconds for each target, which gets at least one round of files."""


@pytest.mark.parametrize("name", TARGETS)
def test_changed_files(tmp_path: Path, name: str) -> None:
    deadline, outcomes = time.monotonic() + SECONDS, Counter[str]()
    for seed in itertools.count():
        outcomes += attack(name, tmp_path, seed)
        if time.monotonic() > deadline:
            break
    assert outcomes["StateError"] + outcomes["ConfigError"] > 0


def test_what_a_reader_must_not_do_is_noticed() -> None:
    def take_time() -> None:
        begin = time.process_time()
        while time.process_time() - begin < MAX_SECONDS + 0.1:
            pass

    for read, expected in ((take_time, "processor time"), (lambda: b"x" * 300_000_000, "MB")):
        with pytest.raises(AssertionError, match=expected):
            outcome(read)
    with pytest.raises(KeyError):
        outcome(lambda: {}["a"])


@pytest.mark.jobs
def test_several_jobs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "manifest"], 0.01, 2, tmp_path) == 0
    printed = capsys.readouterr().out
    assert "config: 0 files" not in printed
    assert "2 jobs, 0 failures" in printed
    assert not [*tmp_path.iterdir()]
