"""Cutting layers into stages, and a list of blocks as stages."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_d9d import BlockSequence, ConfigError, StageInfo
from lightning_d9d.pipeline import distribute_layers, split_evenly
from lightning_d9d.pipeline.initial_weights import materialize
from tests.harness.compare import assert_bitwise_equal


def lengths(ranges: Sequence[range]) -> list[int]:
    """How long the ranges are, which follow one another from 0."""
    assert ranges[0].start == 0
    assert all(left.stop == right.start for left, right in pairwise(ranges))
    return [len(each) for each in ranges]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((24, 4, 1, 1), [6, 7, 6, 5]),
        ((30, 4, 0, 2), [8, 8, 8, 6]),
        ((34, 4, 0, 0), [9, 9, 8, 8]),
        ((10, 1, 1, 2), [10]),
        ((4, 4, 0, 0), [1, 1, 1, 1]),
        ((5, 2, 0, 3), [4, 1]),
    ],
)
def test_layers_and_virtual_layers(arguments: tuple[int, int, int, int], expected: list[int]) -> None:
    assert lengths(distribute_layers(*arguments)) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 4, 1, 1), "a model without layers cannot be split into 4 stages"),
        ((2, 4, 1, 1), "2 layers cannot be split into 4 stages.*use 1 to 2 stages"),
        ((5, 0), "5 layers cannot be split into 0 stages"),
        ((4, 2, 0, 4), "4 layers, with 0 virtual ones before and 4 after them, are 4 or 5 for each of 2 stages. "
                       "Stage 1 would have no real layer. Use fewer virtual layers or fewer stages"),
        ((4, 2, 6, 0), "Stage 0 would have"),
        ((4, 2, -1, 0), "-1 virtual layers before and 0 after.*at least 0"),
    ],
)  # fmt: skip
def test_layers_that_cannot_be_distributed(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        distribute_layers(*arguments)


def best_by_trying(weights: Sequence[int | float], num_stages: int) -> list[int]:
    """The cut of all that there are: least maximum, then least sum of squares, then the longest first."""

    def rank(cuts: tuple[int, ...]) -> tuple[Fraction, Fraction, list[int]]:
        stages = list(pairwise((0, *cuts, len(weights))))
        sums = [sum(map(Fraction, weights[start:stop]), Fraction()) for start, stop in stages]
        return max(sums), sum((each * each for each in sums), Fraction()), [start - stop for start, stop in stages]

    best = min(combinations(range(1, len(weights)), num_stages - 1), key=rank)
    return [stop - start for start, stop in pairwise((0, *best, len(weights)))]


weights_and_stages = st.lists(
    st.integers(0, 20) | st.floats(0, 1e300, allow_subnormal=True), min_size=1, max_size=9
).flatmap(lambda weights: st.tuples(st.just(weights), st.integers(1, len(weights))))


@given(weights_and_stages)
@settings(max_examples=300, deadline=None)
def test_the_even_cut_is_the_best_of_all(case: tuple[list[int | float], int]) -> None:
    weights, num_stages = case
    assert lengths(split_evenly(weights, num_stages)) == best_by_trying(weights, num_stages)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ([1] * 10, [4, 3, 3]),
        ([300] + [10] * 12 + [300], [1, 6, 6, 1]),  # the stages that are not the heaviest are even too
        ([0.1, 0.2, 0.3], [2, 1]),  # 0.1 + 0.2 is more than 0.3 only when it is rounded
        ([0, 0, 0, 5], [3, 1]),
    ],
)
def test_even_cuts(weights: list[float], expected: list[int]) -> None:
    assert lengths(split_evenly(weights, len(expected))) == expected


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf")])
def test_weights_that_are_none(weight: float) -> None:
    with pytest.raises(ConfigError, match=f"layer 1 has the weight {weight}; weights must be finite and at least 0"):
        split_evenly([1, weight], 2)
    with pytest.raises(ConfigError, match="2 layers cannot be split into 3 stages"):
        split_evenly([1, 1], 3)


# Blocks


def blocks() -> list[nn.Module]:
    """Seven blocks, the second of which has as many parameters as all others."""
    return [nn.Linear(4, 8), nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 2), nn.Tanh(), nn.Linear(2, 2)]


def stages(num_stages: int, **options: Any) -> list[BlockSequence]:
    result = []
    for index in range(num_stages):
        with torch.device("meta"):
            stage = BlockSequence(blocks(), StageInfo(index, num_stages), **options)
        materialize(stage, torch.device("cpu"), seed=0)
        result.append(stage)
    return result


def names(stages: Sequence[BlockSequence]) -> list[list[str]]:
    return [list(stage) for stage in stages]


def test_stages_of_blocks_are_the_whole_model() -> None:
    with torch.device("meta"):
        whole = nn.Sequential(*blocks())
    materialize(whole, torch.device("cpu"), seed=0)
    for num_stages in (1, 2, 3, 7):
        x = torch.randn(3, 4)
        expected, cut = whole(x), stages(num_stages)
        assert sum(map(len, cut)) == 7
        weights = {name: tensor for stage in cut for name, tensor in stage.state_dict().items()}
        assert weights.keys() == whole.state_dict().keys()
        for name, tensor in weights.items():
            assert_bitwise_equal(name, tensor, whole.state_dict()[name])
        for stage in cut:
            x = stage(x) if stage is not cut[0] else stage(input=x)
        assert_bitwise_equal("output", x, expected)


def test_blocks_are_cut_by_parameters_or_by_hand_or_by_the_strategy() -> None:
    assert names(stages(2)) == [["0", "1", "2"], ["3", "4", "5", "6"]]
    assert names(stages(3, split=[1, 4, 2])) == [["0"], ["1", "2", "3", "4"], ["5", "6"]]
    given = BlockSequence(blocks(), StageInfo(0, 3, layers=range(2, 5)), split=[1, 4, 2])
    assert list(given) == ["2", "3", "4"]


@pytest.mark.parametrize("split", [[3, 4, 1], [7], [0, 7], []])
def test_a_split_that_does_not_fit(split: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"split=\[.*2 stages and the model 7 layers. Give 2 numbers of at least 1"):
        BlockSequence(blocks(), StageInfo(0, 2), split=split)


@pytest.mark.parametrize("layers", [range(3, 8), range(2, 2), range(0, 4, 2)])
def test_layers_that_the_model_does_not_have(layers: range) -> None:
    with pytest.raises(ConfigError, match=r"layers range\(.*with 7 layers.*out of range\(0, 7\)"):
        BlockSequence(blocks(), StageInfo(0, 2, layers=layers))


class Scaled(nn.Module):
    """Passes a pair on; every block is given the scale."""

    def forward(self, pair: tuple[Tensor, int], *, scale: float) -> tuple[Tensor, int]:
        x, count = pair
        return x * scale, count + 1


def test_blocks_pass_any_tree_on_and_share_keyword_arguments() -> None:
    passed = (torch.ones(2), 0)
    for index in range(2):
        passed = BlockSequence([Scaled(), Scaled(), Scaled()], StageInfo(index, 2))(passed, scale=2.0)
    assert passed[1] == 3
    assert passed[0].tolist() == [8.0, 8.0]


class InMapping(nn.Module):
    def forward(self, x: Any) -> dict[str, Tensor]:
        return {"x": torch.ones(1)}


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_mapping_between_blocks_is_refused_on_any_number_of_stages(num_stages: int) -> None:
    with pytest.raises(ConfigError, match=r"block 0 \(InMapping\) returns a mapping.*Return a tuple or a dataclass"):
        BlockSequence([InMapping(), InMapping()], StageInfo(0, num_stages))(torch.ones(1))
    last = BlockSequence([nn.Identity(), InMapping()], StageInfo(num_stages - 1, num_stages))
    assert last(torch.ones(1)) == {"x": torch.ones(1)}  # what microbatch_loss gets may be one


@pytest.mark.parametrize(
    ("given", "named"), [({"x": torch.ones(2), "mask": torch.ones(2)}, "'x', 'mask'"), ({}, "nothing")]
)
def test_an_input_of_another_name_is_named_beside_the_right_one(given: dict[str, Tensor], named: str) -> None:
    stage = BlockSequence([nn.Identity()], StageInfo(0, 1))
    with pytest.raises(
        ConfigError, match=rf"must be 'input' of StageInputs\.first, but first and shared have {named}\."
    ):
        stage(**given)


def test_a_parameter_that_two_stages_would_share_is_refused() -> None:
    first, middle, last = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
    last.weight = first.weight
    with pytest.raises(
        ConfigError, match=r"blocks 2 to 2 share 'weight' with block 0, which is on another stage.*split"
    ):
        BlockSequence([first, middle, last], StageInfo(1, 2, layers=range(2, 3)))
    with pytest.raises(ConfigError, match=r"blocks 0 to 1 share 'weight' with block 2"):
        BlockSequence([first, middle, last], StageInfo(0, 2, layers=range(0, 2)))
    assert len(list(BlockSequence([first, middle, last], StageInfo(0, 1)).parameters())) == 5
    first, middle = nn.Linear(3, 3), nn.Linear(3, 3)
    middle.weight = first.weight
    assert list(BlockSequence([first, middle, nn.Linear(3, 3)], StageInfo(0, 2), split=[2, 1])) == ["0", "1"]
