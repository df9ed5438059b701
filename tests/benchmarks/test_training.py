"""Contenders that are spread in different ways must do the same work, and hold and send the predicted bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from torch import Tensor

from lightning_d9d import MeshConfig
from lightning_d9d.mesh.sharding import local, local_ranges
from tests.benchmarks import context, parallel, tensor
from tests.benchmarks.training import QUICK, SENT, Steps, Way, Work, account
from tests.harness.compare import assert_close_named
from tests.harness.ranks import RankContext
from tests.harness.recorder import Recorder
from tests.harness.records import KINDS, read, sent_bytes


@pytest.mark.ranks(4)
@pytest.mark.parametrize("num_microbatches", [pytest.param(1, marks=pytest.mark.meshes), 2])
def test_gradients_are_those_of_copies_and_bytes_those_computed(rank: RankContext, num_microbatches: int) -> None:
    # Each rank of four has four tokens of a row, whose eight copies go to each expert once, as in the whole row.
    work = replace(QUICK, num_ranks=4, num_microbatches=num_microbatches, sequence_length=16)
    of_ranks = parallel.ways(4) | tensor.ways(4)
    expected = check(rank, work, parallel.PEER, of_ranks[parallel.PEER], {})
    for name, way in of_ranks.items():
        check(rank, work, name, way, expected)


@pytest.mark.ranks(4)
def test_gradients_of_sequences_on_several_ranks_are_the_same_in_all_kinds(rank: RankContext) -> None:
    config = replace(QUICK.config, num_attention_heads=4, num_key_value_heads=4)
    work = replace(QUICK, num_ranks=4, config=config)
    of_ranks = context.ways(work)
    assert [*of_ranks] == ["cp1", "gather", "ring", "heads"]
    whole_experts = Way(MeshConfig(context_parallel_replicate=4))
    expected = check(rank, work, "whole experts", whole_experts, {})
    for name, way in of_ranks.items():
        check(rank, work, name, way, {} if name == context.PEER else expected)


def check(rank: RankContext, work: Work, name: str, way: Way, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The gradients of a step, if it holds and sends what sizes say and its gradients are the expected."""
    steps = Steps(work, way, rank.device)
    trained, by_sizes = steps.trained, account(work, way)
    trained.step(sums=True)
    path = rank.tmp_dir / f"{rank.rank} {name} {len(expected)}"
    recorder = Recorder()
    recorder.start(path)
    trained.step(sums=True)
    recorder.close()
    sent: dict[str, float] = dict.fromkeys(SENT, 0.0)
    for entry in read(path):
        if len(entry.ranks) > 1 and entry.operator != "receive":
            sent[KINDS[entry.operator]] += sent_bytes(entry, rank.rank)
    computed = [getattr(by_sizes, kind) for kind in SENT]
    assert [sent[kind] for kind in SENT] == pytest.approx(computed, rel=1e-9)
    assert sum(local(parameter).nbytes for parameter in trained.parameters) == by_sizes.weights
    moments = [m for state in trained.optimizer.state.values() for m in (state["exp_avg"], state["exp_avg_sq"])]
    assert sum(local(moment).nbytes for moment in moments) == by_sizes.moments
    gradients = {}
    for key, parameter in trained.stage.named_parameters():
        assert parameter.grad is not None
        gradients[key] = local(parameter.grad).clone()
        if expected:
            part = tuple(slice(r.start, r.stop) for r in local_ranges(parameter))
            assert_close_named(f"{key} of {name}", gradients[key], expected[key][part])
    steps.close()
    return gradients
