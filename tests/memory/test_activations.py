"""Activations by arithmetic against what real models keep."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from lightning_d9d import ParallelConfig
from lightning_d9d.memory.activations import Activations, StageLayers
from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM
from lightning_d9d.models.qwen3_moe.costs import model_costs
from lightning_d9d.parallel import recompute_activations
from lightning_d9d.schedule import (
    GPipe,
    LayerCosts,
    ModelCosts,
    OneForwardOneBackward,
    Schedule,
    ZeroBubble,
    add_data_parallel,
)
from tests.memory.traced import traced

ROWS, SEQUENCE, WIDTH = 2, 512, 2
MIXED = dataclasses.replace(Qwen3MoeConfig.preset("tiny"), mlp_only_layers=(1,))
CONFIGS = {
    "sparse and dense": MIXED,
    "shared expert": dataclasses.replace(MIXED, shared_expert_intermediate_size=96),
    "dense": dataclasses.replace(MIXED, num_experts=0, mlp_only_layers=()),
}
TOLERANCE = 0.035
"""Of what a real model keeps. Left out are statistics of rows, and indices of routing."""


def alone(costs: ModelCosts) -> Activations:
    whole = StageLayers(layers=range(len(costs.layers)), is_first=True, is_last=True)
    actions = OneForwardOneBackward().program(1, 1).ranks[0]
    return Activations(costs=costs, stages={0: whole}, num_stages=1, actions=actions)


@pytest.mark.parametrize("kind", ["none", "selective", "attention", "every_2", "full"])
@pytest.mark.parametrize("name", CONFIGS)
def test_what_a_model_keeps(name: str, kind: str) -> None:
    config = CONFIGS[name]
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config).bfloat16()
    recompute_activations(model, ParallelConfig(recompute=kind))
    gradient_of_head = WIDTH * config.vocab_size * config.hidden_size  # made in the forward; counted as a gradient
    rope = WIDTH * SEQUENCE * config.head_dim
    real = traced(model, ROWS, SEQUENCE)[0] - gradient_of_head - rope

    costs = model_costs(config, SEQUENCE, WIDTH)
    predicted = alone(costs).kept(kind, ROWS)
    assert predicted is not None
    assert predicted.beside_gradients == 0
    most_again = max(  # of one block, when its backward comes
        layer.activation_bytes - {"none": layer.activation_bytes, "selective": layer.selective_bytes or 0,
        "attention": layer.attention_bytes or 0}.get(kind, layer.output_bytes)
        for layer in costs.layers
    )  # fmt: skip
    assert predicted.most - ROWS * most_again == pytest.approx(real, rel=TOLERANCE)


LAYER = LayerCosts(activation_bytes=100, selective_bytes=40, output_bytes=10, dispatch_bytes=6)
COSTS = ModelCosts(before=LayerCosts(activation_bytes=1), layers=(LAYER,) * 4, after=LayerCosts(activation_bytes=3))


def of_rank(schedule: Schedule, rank: int, num_microbatches: int, num_slices: int = 1) -> Activations:
    """Two ranks with a stage of two layers each."""
    actions = add_data_parallel(schedule.program(2, num_microbatches)).ranks[rank]
    stage = StageLayers(layers=range(2 * rank, 2 * rank + 2), is_first=rank == 0, is_last=rank == 1)
    return Activations(costs=COSTS, stages={rank: stage}, num_stages=2, actions=actions, num_slices=num_slices)


def test_by_hand_alone() -> None:
    assert alone(COSTS).kept("none", 1) == (404, 0)
    assert alone(COSTS).kept("full", 1) == (4 * 10 + 4 + 90, 0)  # one block again
    assert alone(COSTS).kept("offload", 1) == (4 + 100, 0)
    assert alone(COSTS).kept("selective", 3) == (3 * (4 * 40 + 4 + 60), 0)
    assert alone(COSTS).kept("every_2", 1) == (2 * 10 + 2 * 100 + 4 + 90, 0)
    assert alone(COSTS).kept("attention", 1) is None  # no layer says


@pytest.mark.parametrize(
    ("schedule", "rank", "live", "later"),
    [
        (GPipe(), 0, 6, 5),  # one is gone when there are gradients
        (GPipe(), 1, 6, 5),
        (OneForwardOneBackward(), 0, 2, 2),
        (OneForwardOneBackward(), 1, 1, 1),
    ],
    ids=str,
)
def test_by_hand_in_a_pipeline(schedule: Schedule, rank: int, live: int, later: int) -> None:
    ends = (1, 3)[rank]
    assert of_rank(schedule, rank, 6).kept("none", 1) == (live * (200 + ends), later * (200 + ends))
    of_full = (5 * (live * (20 + ends) + 90), 5 * (later * (20 + ends) + 90))
    assert of_rank(schedule, rank, 6).kept("full", 5) == of_full


def test_split_backwards_keep_to_the_end() -> None:
    whole = of_rank(OneForwardOneBackward(), 1, 6).kept("none", 1)
    split = of_rank(ZeroBubble(), 1, 6).kept("none", 1)
    assert whole is not None
    assert split is not None
    assert split.most >= whole.most


def test_what_is_spread_over_tensor_ranks() -> None:
    assert of_rank(GPipe(), 0, 1, num_slices=2).kept("none", 4) == (4 * 201 / 2, 0)


def test_tokens_on_their_way_to_experts() -> None:
    assert alone(COSTS).dispatch_bytes(3) == 0
    assert dataclasses.replace(alone(COSTS), sends_to_experts=True).dispatch_bytes(3) == 18
