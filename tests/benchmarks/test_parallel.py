"""The contenders of `parallel` must do the same work, with as many layers as fit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from lightning_d9d.mesh.sharding import local
from tests.benchmarks.frame import measure, summarize
from tests.benchmarks.parallel import PEER, WITHOUT, WORK, case, ways
from tests.benchmarks.training import QUICK, Steps, account, fitting_into, needed_bytes
from tests.benchmarks.training import table as table_of
from tests.harness.compare import assert_close_named
from tests.harness.ranks import RankContext


@pytest.mark.ranks(2)
def test_steps_without_sums_leave_gradients_of_the_ranks_own_tokens(rank: RankContext) -> None:
    for name in (PEER, "fsdp"):
        way = ways(2)[name]
        with_sums = Steps(QUICK, way, rank.device, sums=True)
        trained = with_sums.trained
        assert Steps(QUICK, way, rank.device, sums=False).trained is trained
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
    """With 150 GB, five layers fit on two GPUs, where a copy takes a fifth of it, and seven on eight."""
    for num_ranks, num_layers in ((2, 5), (8, 7)):
        of_ranks = ways(num_ranks)
        work = fitting_into(150 * 10**9, replace(WORK, num_ranks=num_ranks), of_ranks.values())
        assert work.config.num_hidden_layers == num_layers
        assert needed_bytes(work, of_ranks.values()) < 0.75 * 150e9
    copy = account(work, of_ranks[PEER])
    assert copy.held_bytes == 10 * work.config.num_parameters  # 2 of weights, 4 of gradients, 2 * 2 of AdamW
    of_experts = (
        7 * 16 * 3 * 2048 * 768
    )  # 16 of a layer's experts on each of 8 ranks: nobody else adds to their gradients
    others = work.config.num_parameters - 8 * of_experts
    assert account(work, of_ranks["ep"]).gradients == 4 * others + 2 * of_experts
