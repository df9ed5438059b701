"""Which rank is named as slow: under noise, exactly by the formula, and for which part."""

from __future__ import annotations

import math
import random
from dataclasses import asdict
from fractions import Fraction

import pytest

from lightning_d9d.coordination.stragglers import (
    ALL_PARTS,
    MOST_FALSE_NAMES,
    NUM_BLOCKS,
    NUM_REPORTS,
    PARTS,
    Comparison,
    Times,
    num_slow_blocks,
    of_block,
)
from tests.coordination.noise import SLOWER, Noise, bursts, drifting, independent, share_named


@pytest.mark.parametrize("num_ranks", [2, 3, 64, 1024, 100_000])
def test_the_rule_names_no_rank_of_an_even_run_but_with_the_probability_that_it_says(num_ranks: int) -> None:
    """Ranks that are alike, of independent blocks: a block is above the median of the others in half of all cases."""
    num_blocks = NUM_REPORTS * NUM_BLOCKS

    def probability(needed: int) -> Fraction:
        ways = sum(math.comb(num_blocks, number) for number in range(needed, num_blocks + 1))
        return num_ranks * len(PARTS) * Fraction(ways, 2**num_blocks)

    needed = num_slow_blocks(num_ranks)
    assert probability(needed) <= MOST_FALSE_NAMES < probability(needed - 1)


@pytest.mark.parametrize(
    ("noise", "num_ranks", "num_reports"),
    [
        pytest.param(independent(0.14), 2, 400, id="independent-2"),
        pytest.param(independent(0.14), 64, 4, id="independent-64"),
        pytest.param(independent(0.2, has_heavy_tails=True), 3, 100, id="heavy tails-3"),
        pytest.param(drifting(0.05, 6), 2, 400, id="drifting-2"),
        pytest.param(bursts(12, share=0.1), 2, 200, id="short bursts-2"),
        pytest.param(bursts(24, share=0.1), 4, 50, id="bursts-4"),
    ],
)
def test_no_rank_of_an_even_run_is_named_under_noise(noise: Noise, num_ranks: int, num_reports: int) -> None:
    assert share_named(noise, num_ranks, num_reports) == 0


@pytest.mark.parametrize(("num_ranks", "has_heavy_tails"), [(2, False), (3, True), (16, True)])
def test_a_rank_slower_by_a_fifth_is_named_by_two_reports(num_ranks: int, has_heavy_tails: bool) -> None:
    """Blocks vary by a tenth."""
    assert share_named(independent(0.14, has_heavy_tails), num_ranks, 160 // num_ranks, SLOWER) >= 0.95


def test_a_rank_slower_by_less_than_the_threshold_is_not_named() -> None:
    comparison = Comparison(0.1)
    for _ in range(3):
        assert comparison.add([even(), even(compute=[1.09] * NUM_BLOCKS)]) == []


def test_single_steps_do_not_count() -> None:
    assert of_block([1.0, 50.0, 1.2, 0.0, 1.1, 0.9, 1.0, 30.0]) == pytest.approx(1.075)


NOTHING = [0.0] * NUM_BLOCKS


def even(stage: int = 0, **parts: list[float]) -> Times:
    usual = dict.fromkeys(ALL_PARTS, NOTHING) | {"compute": [1.0] * NUM_BLOCKS}
    return Times("node", stage, **(usual | parts))


def test_the_part_is_named() -> None:
    comparison = Comparison(0.1)
    times = [even(link=[0.5] * NUM_BLOCKS), even(data=[0.5] * NUM_BLOCKS)]
    assert comparison.add(times) == []
    (found,) = comparison.add(times)
    assert str(found) == (
        "rank 1 on node is slow: in each step it waits for data longer than the other ranks of its stages, by 50% of "
        "their own time"
    )


def test_a_slow_processor_is_named_though_other_waits_vary_more() -> None:
    """On a busy host, for example, each rank sleeps now and then, for longer than it computes."""
    chance = random.Random(0)

    def sleeps() -> list[float]:
        return [chance.expovariate(0.5) for _ in range(NUM_BLOCKS)]

    comparison = Comparison(0.05)
    found = [
        comparison.add([even(blocked=sleeps()), even(compute=[1.2] * NUM_BLOCKS, blocked=sleeps())]) for _ in range(40)
    ]
    named = [[each.part for each in report if each.rank == 1] for report in found]
    assert sum(report == ["compute"] for report in named) >= 1
    assert not [each for report in found for each in report if each.rank == 0]


def test_small_differences_of_all_parts_do_not_add_up() -> None:
    comparison = Comparison(0.1)
    for _ in range(3):
        assert comparison.add([even(), even(compute=[1.08] * NUM_BLOCKS, blocked=[0.06] * NUM_BLOCKS)]) == []


def test_a_rank_that_computes_longer_and_waits_less_for_data_keeps_nobody_waiting() -> None:
    comparison = Comparison(0.1)
    for _ in range(3):
        assert comparison.add([even(compute=[1.5] * NUM_BLOCKS), even(data=[0.5] * NUM_BLOCKS)]) == []


def test_a_burst_on_one_rank_is_no_straggler() -> None:
    comparison = Comparison(0.1)
    for _ in range(4):
        assert comparison.add([even(), even(compute=[1.0] * 14 + [3.0] * (NUM_BLOCKS - 14))]) == []


def test_ranks_of_other_stages_are_not_compared() -> None:
    comparison = Comparison(0.1)
    later = [even(stage=1, compute=[2.0] * NUM_BLOCKS) for _ in range(2)]
    for _ in range(3):
        assert comparison.add([even(), *later]) == []


@pytest.mark.parametrize("change", [{"compute": [1.0]}, {"data": ["x"] * NUM_BLOCKS}, {"more": 1}])
def test_times_that_no_rank_wrote(change: dict[str, object]) -> None:
    good = asdict(even())
    assert Times.is_valid(good)
    assert not Times.is_valid({**good, **change})
