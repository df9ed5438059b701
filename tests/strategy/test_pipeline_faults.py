"""Faults in the middle of a pipeline's schedule: how they end, how soon, and what the other ranks say.

Two stages, four microbatches of a batch, "1f1b"; docs/explanation/faults.md shows `CELLS` as its second table. A
fault happens inside the named action: 1F2 is the forward of stage 1 for microbatch 2.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_d9d import TimeoutConfig
from tests.harness.ranks import RankContext
from tests.strategy import fault_job as job
from tests.strategy.fault_job import NUM_STEPS, SHUTDOWN_SECONDS, STEP_SECONDS, Fault
from tests.strategy.fault_table import BODY_SECONDS, ByTest, Job, LeftOut, Table
from tests.strategy.test_faults import NO_STORE, SILENT, check_that_tests_exist, resume

FILE = "tests/strategy/test_pipeline_faults.py"
STAGES_AND_MICROBATCHES = "(stages 0 to 1, microbatches 0 to 3)"
STOPS = "all ranks stop before the same batch"


def raised(rank: int, where: str, error: str = "ValueError: bad row") -> str:
    return f"rank {rank} failed: {error}\nat {where} {STAGES_AND_MICROBATCHES}"


def pipelined(
    rank: int, act: Any, exit_code: int, text: str, steps: tuple[int, ...] = (2,), skip: int = 2, **options: Any
) -> Job:
    return Job(rank, act, exit_code, text, steps, kind="pipelined", skip=skip, **options)


FORWARD_OF_1 = raised(1, "1F2 of the schedule: forward of stage 1, microbatch 2")
CELLS: dict[tuple[str, str], Job | ByTest | LeftOut] = {
    ("raise", "inputs 0F1, 1F0"): ByTest(
        f"{FILE}::test_ranks_that_all_raise_can_run_again",
        BODY_SECONDS,
        "each rank raises its own; the next run of the same processes takes no message of this one",
    ),
    ("raise", "forward 1F2"): pipelined(1, job.fail, 1, FORWARD_OF_1),
    ("raise", "loss 1F2, one of two pipelines"): pipelined(
        2, job.fail, 1, FORWARD_OF_1.replace("rank 1", "rank 2"), num_ranks=4
    ),
    ("raise", "backward 0B2"): pipelined(
        0, job.fail, 1, raised(0, "0B2 of the schedule: backward of stage 0, microbatch 2")
    ),
    ("raise", "forward 1F2 of validation"): pipelined(1, job.fail, 1, FORWARD_OF_1, (), loop="validate"),
    ("raise", "forward 1F2 of prediction"): pipelined(1, job.fail, 1, FORWARD_OF_1, (), loop="predict"),
    ("wrong output", "output 0F2"): pipelined(
        0, job.widen, 1, "rank 0 failed: lightning_d9d.errors.ConfigError: stage 0 returned"
    ),
    ("kill", "forward 1F2"): pipelined(1, job.kill, -signal.SIGKILL, SILENT),
    ("kill", "backward 0B2"): pipelined(0, job.kill, -signal.SIGKILL, NO_STORE),
    ("stop", "forward 1F2"): pipelined(1, job.stop, -signal.SIGKILL, SILENT, waits_seconds=STEP_SECONDS),
    ("stop", "backward 0B2"): pipelined(
        0, job.stop, -signal.SIGKILL, NO_STORE, waits_seconds=STEP_SECONDS + SHUTDOWN_SECONDS
    ),
    ("SIGTERM", "forward 1F2"): pipelined(
        1, job.terminate, 143, f"SIGTERM on rank 1: {STOPS}", (2, 4), others_exit_code=143
    ),
    ("SIGINT", "backward 1B2"): pipelined(1, job.interrupt, 1, f"SIGINT on rank 1: {STOPS}", (2, 4)),
    ("slow", "forward 1F2"): ByTest(
        f"{FILE}::test_slow_stage_changes_nothing", BODY_SECONDS, "the others wait; the same weights as without it"
    ),
    **{
        ("NaN", where): ByTest(
            f"{FILE}::test_nan_in_one_stage[{where}]",
            BODY_SECONDS,
            "with `skip_nonfinite` all ranks leave out the step; without it weights of all stages are NaN from then on",
        )
        for where in ("forward 1F2", "backward 0B2")
    },
}
TABLE = Table(CELLS, f"{FILE}::test_job_whose_other_ranks_end")


def test_every_cell_is_tested(request: pytest.FixtureRequest) -> None:
    check_that_tests_exist(TABLE, request)


def test_the_page_shows_the_table() -> None:
    assert TABLE.shown() == TABLE.page_rows(lambda test: "?")


@pytest.mark.jobs
@pytest.mark.parametrize("name", TABLE.jobs)
def test_job_whose_other_ranks_end(name: str, tmp_path: Path) -> None:
    cell = TABLE.jobs[name]
    ended = cell.run(tmp_path, name.partition("-")[2])
    for path in cell.check(ended, tmp_path):
        resume(tmp_path, cell.kind, path)


on_ranks = pytest.mark.ranks(2, timeout_seconds=BODY_SECONDS)


def fit(rank: RankContext, name: str, **options: Any) -> job.Fitted:
    options = {"timeouts": TimeoutConfig(), **options}
    return job.fit(rank.tmp_dir / name, rank.world_size, str(rank.device), kind="pipelined", **options)


@pytest.mark.ranks(2, timeout_seconds=BODY_SECONDS, record=False)  # messages that nobody takes are what this is about
def test_ranks_that_all_raise_can_run_again(rank: RankContext) -> None:
    """Rank 0 has sent a microbatch that rank 1 does not take; the first of the next run would be taken for it."""
    undisturbed = fit(rank, "undisturbed")

    def fail_together(inputs: Any) -> None:
        rank.barrier()  # a rank that heard of the other's failure before its own would raise a RankError
        job.fail(inputs)

    with pytest.raises(ValueError, match="bad row"):
        fit(rank, "raises", fault=Fault("inputs", None, fail_together, skip=1 - rank.rank))
    again = fit(rank, "again")
    torch.testing.assert_close(again.weights, undisturbed.weights, rtol=0, atol=0)


@on_ranks
def test_slow_stage_changes_nothing(rank: RankContext) -> None:
    """The stage is slower than `shutdown_seconds`, which limits only ranks that end."""
    undisturbed = fit(rank, "undisturbed")
    fault = Fault("forward", 1, job.be_slow, skip=2)
    slow = fit(rank, "slow", fault=fault, timeouts=TimeoutConfig(shutdown_seconds=job.SLOW_SECONDS / 2))
    assert rank.all_gather_object(fault.has_acted) == [False, True]
    torch.testing.assert_close(slow.weights, undisturbed.weights, rtol=0, atol=0)


@on_ranks
@pytest.mark.parametrize("where", ["forward 1F2", "backward 0B2"])
def test_nan_in_one_stage(rank: RankContext, where: str) -> None:
    """NaN is in an input of stage 1, or in a gradient of stage 0. The other stage sees only the norm of the latter."""
    phase, at = ("forward", 1) if where == "forward 1F2" else ("backward", 0)
    left_out = fit(rank, "left out", fault=Fault(phase, at, job.spoil, skip=2), skip_nonfinite=True)
    assert left_out.strategy.num_skipped_steps == 1
    assert left_out.weights.isfinite().all()
    taken = fit(rank, "taken", fault=Fault(phase, at, job.spoil, skip=2))
    assert taken.trainer.global_step == NUM_STEPS
    assert taken.weights.isnan().any()
