"""That the contenders of `parallel` do the same work, and that they hold and send the bytes that sizes say."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from lightning_d9d.mesh.sharding import local, local_ranges
from tests.benchmarks.frame import measure, summarize
from tests.benchmarks.parallel import PEER, QUICK, SENT, WITHOUT, Steps, account, case, fitting, meshes, needed_bytes
from tests.benchmarks.parallel import table as table_of
from tests.harness.compare import assert_close_named
from tests.harness.ranks import RankContext
from tests.harness.recorder import Recorder
from tests.harness.records import Entry, read

KINDS = {
    "allgather_base": "all_gather",
    "reduce_scatter_base": "reduce_scatter",
    "allreduce": "all_reduce",
    "alltoall_base": "all_to_all",
}


def sent_bytes(entry: Entry, rank: int) -> float:
    """By this rank, in a ring."""
    matched = re.fullmatch(r"(\w+)\[(.*)\]", entry.tensors)
    assert matched is not None, entry
    width, dims = getattr(torch, matched[1]).itemsize, matched[2].split(", ")
    others = (len(entry.ranks) - 1) / len(entry.ranks)
    if entry.operator == "alltoall_base":
        rows = sum(entry.sends) - entry.sends[entry.ranks.index(rank)]
        return rows * width * math.prod(map(int, dims[1:]))
    return width * math.prod(map(int, dims)) * others * (2 if entry.operator == "allreduce" else 1)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_gradients_are_those_of_copies_and_bytes_those_computed(rank: RankContext, num_microbatches: int) -> None:
    work = replace(QUICK, num_ranks=4, num_microbatches=num_microbatches)
    expected = {}
    for name, mesh in meshes(4).items():
        steps = Steps(work, name, rank.device, sums=True)
        trained, by_sizes = steps.trained, account(work, mesh)
        trained.step(sums=True)
        recorder = Recorder()
        recorder.start(rank.tmp_dir / f"{rank.rank} {name}")
        trained.step(sums=True)
        recorder.close()
        sent: dict[str, float] = dict.fromkeys(SENT, 0.0)
        for entry in read(rank.tmp_dir / f"{rank.rank} {name}"):
            if len(entry.ranks) > 1:
                sent[KINDS[entry.operator]] += sent_bytes(entry, rank.rank)
        assert [sent[kind] for kind in SENT] == pytest.approx([getattr(by_sizes, kind) for kind in SENT], rel=2e-3)
        assert sum(local(parameter).nbytes for parameter in trained.parameters) == by_sizes.weights
        moments = [m for state in trained.optimizer.state.values() for m in (state["exp_avg"], state["exp_avg_sq"])]
        assert sum(local(moment).nbytes for moment in moments) == by_sizes.moments
        for key, parameter in trained.stage.named_parameters():
            assert parameter.grad is not None
            gradient = local(parameter.grad)
            if name == PEER:
                expected[key] = gradient.clone()
            part = tuple(slice(r.start, r.stop) for r in local_ranges(parameter))
            assert_close_named(f"{key} of {name}", gradient, expected[key][part])
        steps.close()


@pytest.mark.ranks(2)
def test_steps_without_sums_leave_gradients_of_the_ranks_own_tokens(rank: RankContext) -> None:
    for name in (PEER, "fsdp"):
        with_sums = Steps(QUICK, name, rank.device, sums=True)
        trained = with_sums.trained
        assert Steps(QUICK, name, rank.device, sums=False).trained is trained
        before = [local(parameter).clone() for parameter in trained.parameters]
        gradients = []
        for sums in (True, False):
            trained.step(sums)
            gradients.append([local(p.grad).clone() for p in trained.parameters if p.grad is not None])
        if name == PEER:
            for index, gradient in enumerate(gradients[1]):
                dist.all_reduce(gradient)
                assert_close_named(f"gradient {index}", gradient, gradients[0][index])
        else:
            assert all(gradient.count_nonzero() == 0 for gradient in gradients[1])
        assert len(gradients[0]) == len(gradients[1]) == len(before)
        for parameter, value in zip(trained.parameters, before, strict=True):
            assert torch.equal(local(parameter), value)
        with_sums.close()


@pytest.mark.ranks(2)
def test_what_is_measured(rank: RankContext) -> None:
    compared = case(QUICK, judges=True, warmup_steps=1, block_steps=1, repeats=2)
    measured = measure(compared, rank.device)
    assert [values["warmup_loss"] for values in measured.values()] == pytest.approx([5.5] * 8, abs=0.2)  # log of 256
    if rank.rank == 0:
        result = {"benchmark": "parallel", **summarize(compared, measured)}
        assert result["contenders"]["fsdp"]["pair"]["peer"] == "fsdp" + WITHOUT
        assert result["contenders"]["fsdp"]["pair"]["limit"] == pytest.approx(1 / 0.9)
        assert result["contenders"]["ep"]["ratio"]["limit"] == pytest.approx(1 / 0.7)
        assert table_of(result, "cpu").count("\n|") == 2 + 4


def test_as_many_layers_as_fit() -> None:
    """Of 150 GB: five layers on two GPUs, where a copy takes a fifth of it, and six on eight."""
    for num_ranks, num_layers in ((2, 5), (8, 6)):
        work = fitting(num_ranks, 150 * 10**9)
        assert work.config.num_hidden_layers == num_layers
        assert needed_bytes(work) < 0.75 * 150e9
    copy = account(work, meshes(8)[PEER])
    assert copy.held_bytes == 10 * work.config.num_parameters  # 2 of weights, 4 of gradients, 2 * 2 of AdamW
    of_experts = (
        6 * 16 * 3 * 2048 * 768
    )  # 16 of a layer's experts on each of 8 ranks: nobody else adds to their gradients
    others = work.config.num_parameters - 8 * of_experts
    assert account(work, meshes(8)["ep"]).gradients == 4 * others + 2 * of_experts
