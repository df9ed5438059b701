"""Which rank is named as slow: on times of an even run, recorded on a busy machine, and with one rank made slower."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import pytest

from lightning_d9d.coordination.stragglers import NUM_BLOCKS, Comparison, Times, of_block

STEPS = 50
RECORDED: list[list[int]] = json.loads(Path(__file__).with_name("even_run.json").read_text())
"""By rank, how many times 10 microseconds each step of one run computed, in order."""


def reports(first: int, slow: int | None = None) -> list[list[Times]]:
    """Those of the run from its step `first` on, as if all steps of one rank had taken a fifth longer."""
    found = []
    for begin in range(first, len(RECORDED[0]) - STEPS + 1, STEPS):
        of_ranks = []
        for rank, steps in enumerate(RECORDED):
            own = [1e-5 * step * (1.2 if rank == slow else 1.0) for step in steps[begin : begin + STEPS]]
            of_ranks.append([of_block(own[place : place + 5]) for place in range(0, STEPS, STEPS // NUM_BLOCKS)])
        found.append([even(compute=compute) for compute in of_ranks])
    return found


def test_no_rank_of_an_even_run_is_named() -> None:
    """In the recorded run, and in the same beginning half a report later.

    The settings were chosen on this recording. It shows that they still hold there, not how often others are named.
    """
    for first in (0, STEPS // 2):
        comparison = Comparison(0.1)
        found = [comparison.add(report) for report in reports(first)]
        assert not any(found)


@pytest.mark.parametrize("slow", [0, 1])
def test_a_rank_slower_by_a_fifth_is_named_within_two_reports(slow: int) -> None:
    usual, slowed = reports(0), reports(0, slow)
    for begin in range(1, len(usual) - 1):
        comparison = Comparison(0.1)
        comparison.add(usual[begin - 1])
        comparison.add(slowed[begin])
        found = comparison.add(slowed[begin + 1])
        assert (slow, "compute") in [(each.rank, each.part) for each in found], begin


def even(**parts: list[float]) -> Times:
    return Times(
        "node", 0, **{"compute": [1.0] * 10, "data": [0.0] * 10, "link": [0.0] * 10, "queue": [0.0] * 10, **parts}
    )


def test_the_part_is_named() -> None:
    comparison = Comparison(0.1)
    times = [even(link=[0.5] * 10), even(data=[0.5] * 10)]
    assert comparison.add(times) == []
    (found,) = comparison.add(times)
    assert str(found) == (
        "rank 1 on node is slow: in each step it waits for data longer than the other ranks of its stages, by 50% of "
        "their own time"
    )


def test_a_rank_that_computes_longer_and_waits_less_for_data_keeps_nobody_waiting() -> None:
    comparison = Comparison(0.1)
    for _ in range(3):
        assert comparison.add([even(compute=[1.5] * 10), even(data=[0.5] * 10)]) == []


def test_a_burst_on_one_rank_is_no_straggler() -> None:
    comparison = Comparison(0.1)
    for _ in range(4):
        burst = [even(), even(compute=[1.0] * 3 + [3.0] * 7)]
        assert comparison.add([even(), even()]) == []
        assert comparison.add(burst) == []


def test_ranks_of_other_stages_are_not_compared() -> None:
    comparison = Comparison(0.1)
    later = [Times("node", 1, [2.0] * 10, [0.0] * 10, [0.0] * 10, [0.0] * 10) for _ in range(2)]
    for _ in pairwise(range(4)):
        assert comparison.add([even(), *later]) == []


@pytest.mark.parametrize("change", [{"compute": [1.0]}, {"data": ["x"] * 10}, {"more": 1}])
def test_times_that_no_rank_wrote(change: dict[str, object]) -> None:
    good = asdict(even())
    assert Times.is_valid(good)
    assert not Times.is_valid({**good, **change})
