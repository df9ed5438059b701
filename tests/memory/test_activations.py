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
from tests.parallel.kept import bytes_kept

ROWS, SEQUENCE, FLOAT32 = 2, 256, 4
MIXED = dataclasses.replace(Qwen3MoeConfig.preset("tiny"), mlp_only_layers=(1,))
CONFIGS = {
    "sparse and dense": MIXED,
    "shared expert": dataclasses.replace(MIXED, shared_expert_intermediate_size=96),
    "dense": dataclasses.replace(MIXED, num_experts=0, mlp_only_layers=()),
}
TOLERANCE = 0.03
"""Of what a real model keeps. Left out are statistics of rows, and indices of routing."""


def alone(costs: ModelCosts) -> Activations:
    whole = StageLayers(layers=range(len(costs.layers)), is_first=True, is_last=True)
    actions = OneForwardOneBackward().program(1, 1).ranks[0]
    return Activations(costs=costs, stages={0: whole}, num_stages=1, actions=actions)


def kept_on_cpu_alone(config: Qwen3MoeConfig, kind: str) -> int:
    """On a CPU torch has norms of several operations, which keep their result as well; all kinds keep the rest once."""
    queries, keys = (num * config.head_dim for num in (config.num_attention_heads, config.num_key_value_heads))
    of_layer = {"none": 2 * config.hidden_size + queries + keys, "attention": 2 * config.hidden_size}
    num_layers = {"every_2": config.num_hidden_layers // 2}.get(kind, config.num_hidden_layers)
    norms = num_layers * of_layer.get("none" if kind == "every_2" else kind, 0) + config.hidden_size
    rope = 2 * SEQUENCE * config.head_dim
    gradient_of_head = config.vocab_size * config.hidden_size  # made in the forward; counted as a gradient
    return FLOAT32 * (ROWS * SEQUENCE * norms + rope + gradient_of_head)


@pytest.mark.parametrize("kind", ["none", "selective", "attention", "every_2", "full"])
@pytest.mark.parametrize("name", CONFIGS)
def test_what_a_model_keeps(name: str, kind: str) -> None:
    config = CONFIGS[name]
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config)
    recompute_activations(model, ParallelConfig(recompute=kind))
    ids = torch.randint(config.vocab_size, (ROWS, SEQUENCE + 1))
    inputs = {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous(), "reduction": "sum"}
    real = bytes_kept(model, inputs) - kept_on_cpu_alone(config, kind)

    costs = model_costs(config, SEQUENCE, FLOAT32)
    predicted = alone(costs).kept(kind, ROWS)
    assert predicted is not None
    assert predicted.beside_gradients == 0
    most_again = max(  # of one block, when its backward comes
        layer.activation_bytes - {"none": layer.activation_bytes, "selective": layer.selective_bytes or 0,
        "attention": layer.attention_bytes or 0}.get(kind, layer.output_bytes)
        for layer in costs.layers
    )  # fmt: skip
    assert predicted.most - ROWS * most_again == pytest.approx(real, rel=TOLERANCE)


MEASURED = {"none": 8895, "attention": 7150, "every_2": 4672, "selective": 3440, "full": 450}
"""MiB that four layers of `30b-a3b` keep on an H200, with 4 rows of 4096 tokens: docs/how-to/save-memory.md."""


@pytest.mark.parametrize("kind", MEASURED)
def test_what_was_measured_on_a_gpu(kind: str) -> None:
    """Arithmetic says a little less: 110 MiB or less, whatever the kind."""
    config = dataclasses.replace(Qwen3MoeConfig.preset("30b-a3b"), num_hidden_layers=4)
    costs = model_costs(config, 4096, 2)
    kept, layer = alone(costs).kept(kind, 4), costs.layers[0]
    assert kept is not None
    smallest = {"none": layer.activation_bytes, "selective": layer.selective_bytes, "attention": layer.attention_bytes}
    again = 4 * (layer.activation_bytes - (smallest.get(kind) or layer.output_bytes))
    assert MEASURED[kind] - 130 < (kept.most - again) / 2**20 < MEASURED[kind]


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
