"""Files changed at random are read or refused: with the package's own errors, soon, and with little memory.

Some seconds for each; `python -m tests.fuzz --minutes 60` takes longer.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.fuzz import TARGETS, attack, outcome, run

SECONDS = 8
"""For each target: about a minute in all."""


@pytest.mark.parametrize("name", TARGETS)
def test_changed_files(tmp_path: Path, name: str) -> None:
    outcomes = attack(name, tmp_path / "model", 500, seed=0, deadline=time.monotonic() + SECONDS)
    assert outcomes["StateError"] + outcomes["ConfigError"] > 0


def test_what_a_reader_must_not_do_is_noticed() -> None:
    def take_time() -> None:
        sum(range(300_000_000))

    for read, expected in ((take_time, "processor time"), (lambda: b"x" * 300_000_000, "MB")):
        with pytest.raises(AssertionError, match=expected):
            outcome(read)
    with pytest.raises(KeyError):
        outcome(lambda: {}["a"])


def test_several_jobs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "index"], 0.05, 1, tmp_path) == 0
    assert "1 jobs, 0 failures" in capsys.readouterr().out
