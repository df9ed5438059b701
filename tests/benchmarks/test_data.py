"""What the benchmark of data measures: rows of a real file, read from the disk, and steps that do the same work."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from tests.benchmarks import data
from tests.benchmarks.data import REAL, LoaderCase, cases, memory_taken, run_case, table, verdicts
from tests.benchmarks.frame import measure, summarize


def test_a_loader_and_a_step() -> None:
    loader, step = cases("cpu", quick=True)
    assert isinstance(loader, LoaderCase)
    result = run_case(loader, "cpu")
    assert len(result["tokens_per_second"]) == 2
    assert min(result["tokens_per_second"]) > 0
    assert "not judged" in table(result, "cpu")
    assert verdicts({**result, "is_judged": True, "tokens_per_second": [1.0]}) == ["missed"]
    measured = summarize(step, measure(step, torch.device("cpu")))  # compares their losses behind the first steps
    assert REAL in measured["contenders"]
    assert measured["peer"] == data.SYNTHETIC


def test_memory_is_held() -> None:
    def held() -> int:
        """Count the kB of this thread's child processes, of which there may be others."""
        children = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()
        lines = (line.split() for child in children for line in Path(f"/proc/{child}/status").read_text().splitlines())
        return sum(int(words[1]) for words in lines if words[0] == "RssAnon:")

    before = held()
    with memory_taken(1 << 29):
        assert held() - before >= 1 << 19


def test_a_process_that_cannot_hold_it() -> None:
    with pytest.raises(MemoryError, match="bytes of memory could not be held"), memory_taken(1 << 60):
        pass
