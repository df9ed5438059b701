"""The contenders of `pipeline` must do the same work; their measurements are checked, too."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch._dynamo.utils import counters

from lightning_d9d.schedule import check, resolve_schedule
from tests.benchmarks.frame import measure, summarize
from tests.benchmarks.pipeline import DEFAULT, QUICK, TORCH, Ours, Torchs, case, table, write
from tests.benchmarks.pipeline_probe import serial
from tests.harness.compare import assert_tensors_close
from tests.harness.ranks import RankContext
from tests.parallel.test_compiling import compiler

WORK = replace(QUICK, num_ranks=2, num_microbatches=4)


IN_CI = ("interleaved_1f1b", "zero_bubble_v", "dual_pipe_v")
"""The versions of torch have different schedules, so that no list of names leaves the others out of CI."""


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "schedule", [pytest.param(name, marks=[] if name in IN_CI else pytest.mark.meshes) for name in TORCH]
)
def test_gradients_and_losses_are_torchs(rank: RankContext, schedule: str) -> None:
    gradients, losses = [], []
    for build in (Ours, Torchs):
        contender = build(WORK, schedule, rank.device)
        contender.run(2)
        gradients.append(
            {
                f"{index} {name}": parameter.grad.clone()
                for index, stage in contender.stages.items()
                for name, parameter in stage.named_parameters()
                if parameter.grad is not None
            }
        )
        losses.append(contender.loss())
    contender.close()
    assert_tensors_close(*gradients)
    assert len(gradients[0]) == sum(len(list(stage.parameters())) for stage in contender.stages.values())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert sum(rank.all_gather_object(losses[0])) == pytest.approx(5.5, abs=0.2)  # the log of 256 ids


@pytest.mark.meshes  # compiled layers of pipelines are those of tests/parallel/test_compiling.py
@pytest.mark.ranks(2)
def test_compiled_layers_do_the_same_work(rank: RankContext) -> None:
    schedules = ["zero_bubble_v", "zero_bubble_v+compile"]
    compared = case(WORK, schedules, judges=True, warmup_steps=1, repeats=2)
    assert compared.pairs[schedules[1]] == (schedules[0], None)
    gradients = []
    with compiler():
        for name in schedules:
            contender = Ours(WORK, name, rank.device)
            contender.run(1)
            stages = contender.stages.values()
            gradients.append({n: p.grad.clone() for stage in stages for n, p in stage.named_parameters()})
        assert counters["stats"]["unique_graphs"] >= 1
    contender.close()
    assert_tensors_close(*gradients)


@pytest.mark.ranks(2)
def test_what_is_measured(rank: RankContext) -> None:
    compared = case(WORK, ["interleaved_1f1b", "zero_bubble_v"], judges=True, warmup_steps=1, repeats=2)
    assert compared.pairs["interleaved_1f1b"] == ("interleaved_1f1b, torch", 1.0)
    measured = measure(compared, rank.device)
    values = measured["zero_bubble_v"]
    assert len(values["spans"]) == 4 * 4 * 3 - 4  # stage 0 runs its backwards as a whole
    assert 0 < values["simulated_bubble"] < 1
    assert 0 < values["bubble"] < 1
    assert values["messages"] == [16, 16]
    for name in TORCH.keys() & measured.keys():
        assert measured[name]["messages"] == measured[f"{name}, torch"]["messages"]
    assert all(0 < seconds < 1e-2 for seconds in values["host_seconds_per_action"])
    if rank.rank == 0:
        result = {"benchmark": "pipeline", **summarize(compared, measured)}
        write(result, rank.tmp_dir, "cpu")
        assert (rank.tmp_dir / "4-microbatches-zero_bubble_v.png").stat().st_size > 0
        assert table(result, "cpu").count("\n|") == 4


@pytest.mark.parametrize("schedule", [*DEFAULT, "gpipe", "looped_bfs"])
def test_one_microbatch_after_another(schedule: str) -> None:
    program = serial(resolve_schedule(schedule).program(4, 8))
    check(program)
    assert program.num_microbatches == 2
