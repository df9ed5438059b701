"""The most that a step allocates, by arithmetic, against meta tensors and what was measured."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from lightning_d9d.memory import GPU_OVERHEAD
from lightning_d9d.memory.layers import Microbatch, StageShares, scaled, with_room
from lightning_d9d.memory.peak import GradientRules, PeakBytes, peak
from lightning_d9d.memory.rank import RankModel
from lightning_d9d.memory.spread import Part, Share, Weight, weights_of
from lightning_d9d.mesh import MeshConfig
from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM
from lightning_d9d.models.qwen3_moe.costs import model_costs
from lightning_d9d.models.qwen3_moe.model import layers_of_stages
from lightning_d9d.parallel import ParallelConfig, recompute_activations
from lightning_d9d.schedule import GPipe, LayerCosts, ModelCosts, OneForwardOneBackward, Schedule, ZeroBubble
from lightning_d9d.schedule.program import merge_backwards
from tests.memory.traced import traced

SPARSE = dataclasses.replace(Qwen3MoeConfig.preset("30b-a3b"), num_hidden_layers=2)
DENSE = dataclasses.replace(Qwen3MoeConfig.preset("8b"), num_hidden_layers=2)
SHARED = dataclasses.replace(SPARSE, mlp_only_layers=(1,))


def model_of(config: Qwen3MoeConfig) -> Qwen3MoeForCausalLM:
    with torch.device("meta"):
        return Qwen3MoeForCausalLM(config).bfloat16()


def planned(config: Qwen3MoeConfig, rows: int, tokens: int, recompute: str = "none", **values: Any) -> RankModel:
    mesh = values.pop("mesh", MeshConfig())
    return RankModel(
        weights=weights_of(model_of(config)),
        costs=model_costs(config, tokens),
        tokens=tokens,
        mesh=mesh,
        schedule=values.pop("schedule", OneForwardOneBackward()),
        layers_of_stages=tuple(layers_of_stages(config, mesh.pipeline_parallel)),
        rows=rows,
        num_microbatches=values.pop("num_microbatches", 1),
        parallel=ParallelConfig(recompute=recompute),
        **values,
    )


@pytest.mark.parametrize("tokens", [4096, 32768])
@pytest.mark.parametrize("recompute", ["none", "selective", "attention", "every_2", "full"])
@pytest.mark.parametrize("config", [SPARSE, DENSE, SHARED], ids=["sparse", "dense", "both"])
def test_one_rank_is_that_of_meta_tensors(
    config: Qwen3MoeConfig, recompute: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits are not among them, as the loss is one operator; nor are weights, states and workspaces."""
    rows = 2
    monkeypatch.setattr("lightning_d9d.memory.layers.tokens_at_once", lambda *sizes: 0)
    model = model_of(config)
    recompute_activations(model, ParallelConfig(recompute=recompute))
    _, most = traced(model, rows, tokens)
    found = planned(config, rows, tokens, recompute).peak(0)
    assert most == pytest.approx(found.total - found.weights - found.states - found.constant, rel=0.01)


GIB = 2**30


@pytest.mark.parametrize(
    ("layers", "rows", "tokens", "measured"),
    [(8, 4, 4096, 47.33), (4, 1, 32768, 33.79)],
)
def test_what_was_measured_on_one_gpu(layers: int, rows: int, tokens: int, measured: float) -> None:
    """The tables of docs/explanation/one-gpu-step.md."""
    config = dataclasses.replace(SPARSE, num_hidden_layers=layers)
    assert planned(config, rows, tokens).peak(0).total / GIB == pytest.approx(measured, rel=0.02)


def test_what_was_measured_on_two_gpus() -> None:
    """`fsdp` of the table of `parallel` in docs/reference/benchmarks.md: five layers, 8192 ids."""
    config = dataclasses.replace(SPARSE, num_hidden_layers=5, vocab_size=8192)
    found = planned(config, 4, 4096, mesh=MeshConfig(data_parallel_shard=2)).peak(0)
    assert found.total / GIB == pytest.approx(24.27, rel=0.05)


def test_peak_of_nothing_is_what_lies_there() -> None:
    assert PeakBytes(weights=3, states=4, constant=0).total == 7


LAYER = LayerCosts(activation_bytes=100, selective_bytes=40, output_bytes=10, weight_bytes=8)
COSTS = ModelCosts(before=LayerCosts(activation_bytes=1), layers=(LAYER,) * 4, after=LayerCosts(activation_bytes=3))
MATRIX = Weight(shape=(2, 2), dtype=torch.bfloat16, part=Part.MLP)
"""8 bytes, and 16 of a sum in float32."""


def by_hand(
    schedule: Schedule, rank: int, num_microbatches: int, recompute: str = "none", rules: GradientRules | None = None
) -> PeakBytes:
    """Two ranks with a stage of two layers each."""
    share = Share(weight=MATRIX, gathered=(2, 2), shape=(2, 2), num_shards=1, num_copies=1, is_unit=False)
    ends = {"before": (), "after": None} if rank == 0 else {"before": None, "after": ()}
    shares = StageShares([(share,), (share,)], **ends)
    layers = range(2 * rank, 2 * rank + 2)
    stage = Microbatch(costs=COSTS, tokens=1, rows=1, recompute=recompute).stage(layers, shares)
    actions = merge_backwards(schedule.compute(2, num_microbatches)).ranks[rank]
    given = rules or GradientRules(accumulates=num_microbatches > 1)
    return peak({rank: stage}, actions, weights=0, states=0, rules=given, keeps_gathered=False, constant=0)


@pytest.mark.parametrize(
    ("schedule", "rank", "live", "later"),
    [(GPipe(), 0, 6, 5), (GPipe(), 1, 6, 5), (OneForwardOneBackward(), 0, 2, 2), (OneForwardOneBackward(), 1, 1, 1)],
    ids=str,
)
def test_a_pipeline_by_hand(schedule: Schedule, rank: int, live: int, later: int) -> None:
    """`later` microbatches are live at the second backward, with all sums and one more gradient."""
    ends = (1, 3)[rank]
    first = live * (200 + ends) + 10 + 8  # the gradient of an output, and one fresh gradient
    first -= ends * (rank == 1)  # the head's share is gone before the last layer's backward
    second = later * (200 + ends) - ends * (rank == 1) + 10 + 2 * 16 + 8
    assert by_hand(schedule, rank, 6).total == max(first, second)
    # all recomputed: inputs are kept, and one block is whole
    of_full = [count * (20 + ends) - ends * (rank == 1) + 90 + 10 for count in (live, later)]
    assert by_hand(schedule, rank, 6, "full").total == max(of_full[0] + 8, of_full[1] + 32 + 8)


def test_gradients_of_earlier_batches_are_there_all_the_time() -> None:
    alone = by_hand(GPipe(), 0, 1)
    later = by_hand(GPipe(), 0, 1, rules=GradientRules(accumulates=True, accumulates_batches=True))
    assert alone.total == 201 + 10 + 8
    assert later.total == 201 + 10 + 8 + 2 * 16


def test_split_backwards_keep_to_the_end() -> None:
    split = dataclasses.replace(LAYER, split_activation_bytes=60)
    costs = dataclasses.replace(COSTS, layers=(split,) * 4)
    stage = Microbatch(costs=costs, tokens=1, rows=1).stage(range(2, 4), StageShares([(), ()], None, ()))

    def most(schedule: Schedule) -> int:
        actions = merge_backwards(schedule.compute(2, 6)).ranks[1]
        rules = GradientRules(accumulates=True)
        return peak({1: stage}, actions, weights=0, states=0, rules=rules, keeps_gathered=False, constant=0).total

    assert most(OneForwardOneBackward()) == 203 - 3 + 10
    assert most(ZeroBubble()) > most(OneForwardOneBackward())


def test_tokens_are_gathered_over_tensor_ranks() -> None:
    """A rank keeps the tokens that it gathers for attention and a dense MLP."""
    plain, cut = (Microbatch(costs=COSTS, tokens=1, rows=1 / n, tensor_parallel=n) for n in (1, 2))
    shares = StageShares([(), ()])
    assert plain.stage(range(2), shares).layers[0].costs.activation_bytes == 100
    assert cut.stage(range(2), shares).layers[0].costs.activation_bytes == 50 + 2 * 5


def test_room_for_copies_is_that_of_more_experts_a_token() -> None:
    """A half of rows to spare takes what four more experts do beside eight, but for their numbers and weights."""
    eight, twelve = (
        model_costs(dataclasses.replace(SPARSE, num_experts_per_tok=number), 4096).layers[0] for number in (8, 12)
    )
    spare, notes = with_room(eight, 0.5), 4096 * 20 * 4
    for name in ("activation_bytes", "attention_bytes", "forward_peak_bytes"):
        assert getattr(spare, name) == getattr(twelve, name) - notes
    for name in ("split_activation_bytes", "block_bytes"):
        assert getattr(spare, name) == getattr(twelve, name)
    assert spare.frozen_bytes is not None
    assert twelve.frozen_bytes is not None
    assert spare.frozen_bytes == twelve.frozen_bytes - notes
    assert twelve.selective_bytes is not None
    assert spare.selective_bytes == twelve.selective_bytes - notes + twelve.dispatch_bytes  # the copies stay, too
    assert [each.row_bytes for each in spare.backward_moments] == [each.row_bytes for each in twelve.backward_moments]


def test_memory_that_peers_write_to() -> None:
    """Two ranks of 16,384 tokens in bfloat16: twice 32,768 rows, each with eight weights and places, and a flag."""
    parallel = ParallelConfig(expert_dispatch="peer", expert_capacity=4.0)
    mesh = MeshConfig(data_parallel_replicate=2, expert_parallel=2)
    model = dataclasses.replace(planned(SPARSE, 4, 4096, mesh=mesh), parallel=parallel)
    (stage,) = model.stages(0).values()
    layer, found = stage.layers[0], model.peak(0)
    rows = 2 * 32768 * (4096 + 8 * (8 + 4) + 4)
    assert rows <= found.peers == layer.peer_bytes <= rows + 2 * 4 * 2 * (2 + 128) + 2048
    assert layer.wire_bytes == 0
    whole = with_room(scaled(model.costs.layers[0], 4), 1.0)  # all tokens of both ranks are twice an even share
    assert layer.costs.activation_bytes == whole.activation_bytes
    assert GPU_OVERHEAD.needed(found) == GPU_OVERHEAD.needed(dataclasses.replace(found, peers=0)) + found.peers
    assert dataclasses.replace(model, parallel=ParallelConfig()).peak(0).peers == 0


def test_tokens_on_their_way_to_experts() -> None:
    layer = dataclasses.replace(LAYER, dispatch_bytes=60.0)  # six copies of each token
    costs = dataclasses.replace(COSTS, layers=(layer,) * 4)
    wires = [
        Microbatch(costs=costs, tokens=1, rows=3, expert_parallel=ranks).stage(range(1), StageShares([()])).layers[0]
        for ranks in (1, 4, 16)
    ]
    assert [each.wire_bytes for each in wires] == [0, 3 * 2 * 4 * 10, 3 * 2 * 6 * 10]
