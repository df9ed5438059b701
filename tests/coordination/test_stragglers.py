"""Which rank is named as slow: on times of an even run, recorded on a busy machine, and with one rank made slower."""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest

from lightning_d9d.coordination.stragglers import NUM_BLOCKS, Comparison, Times

STEPS = 50
RECORDED: list[list[int]] = json.loads(Path(__file__).with_name("even_run.json").read_text())
"""By rank, microseconds that each step computed, in order."""


def report(chance: random.Random, num_ranks: int, slow: int | None = None, factor: float = 1.2) -> list[Times]:
    """One in which each rank has another stretch of what was recorded, so that noise keeps its length."""
    of_ranks = []
    for rank in range(num_ranks):
        steps = RECORDED[chance.randrange(len(RECORDED))]
        begin = chance.randrange(len(steps) - STEPS)
        own = [1e-6 * step * (factor if rank == slow else 1.0) for step in steps[begin : begin + STEPS]]
        of_ranks.append([median(own[place : place + 5]) for place in range(0, STEPS, STEPS // NUM_BLOCKS)])
    longest = [max(of_rank[block] for of_rank in of_ranks) for block in range(NUM_BLOCKS)]
    waits = [[end - own for end, own in zip(longest, of_rank, strict=True)] for of_rank in of_ranks]
    return [
        Times("node", 0, own, [0.0] * NUM_BLOCKS, each, [0.0] * NUM_BLOCKS)
        for own, each in zip(of_ranks, waits, strict=True)
    ]


@pytest.mark.parametrize("num_ranks", [2, 4, 16])
def test_no_rank_of_an_even_run_is_named(num_ranks: int) -> None:
    chance, comparison = random.Random(num_ranks), Comparison(0.1)
    assert [found for _ in range(200) if (found := comparison.add(report(chance, num_ranks)))] == []


@pytest.mark.parametrize("num_ranks", [2, 4, 16])
def test_a_rank_slower_by_a_fifth_is_named_within_two_reports(num_ranks: int) -> None:
    chance = random.Random(num_ranks)
    for trial in range(20):
        comparison, slow = Comparison(0.1), trial % num_ranks
        comparison.add(report(chance, num_ranks))
        comparison.add(report(chance, num_ranks))
        comparison.add(report(chance, num_ranks, slow))
        found = comparison.add(report(chance, num_ranks, slow))
        assert [(each.rank, each.part) for each in found] == [(slow, "compute")]
        assert 0.1 < found[0].excess < 0.3


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
