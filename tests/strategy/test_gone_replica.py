"""A replica that is gone ends all others, also those that were not to mix with it."""

from __future__ import annotations

import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from tests.strategy import fault_job as job
from tests.strategy.fault_job import STEP_SECONDS
from tests.strategy.fault_table import Job

KILLED = Job(3, job.kill, -signal.SIGKILL, "failed: RuntimeError", (2, 4), kind="mixed", skip=1, num_ranks=4)
"""A replica is killed in the fifth step, when the fourth round has begun. Replica 2 is its partner in the fifth
round."""
STOPPED = replace(KILLED, act=job.stop, waits_seconds=STEP_SECONDS)


@pytest.mark.jobs
@pytest.mark.parametrize("cell", [KILLED, pytest.param(STOPPED, marks=pytest.mark.meshes)], ids=["killed", "stopped"])
def test_a_gone_replica_ends_all_others(cell: Job, tmp_path: Path) -> None:
    ended = cell.run(tmp_path, "forward")
    assert ended.exit_codes == [1, 1, 1, -signal.SIGKILL]
    assert ended.seconds < cell.limit_seconds
    assert all("RuntimeError" in output for output in ended.outputs[:3])
    assert "replica 2 mixed with replica 3 (rank 3) in round 5" in ended.outputs[2]
    assert any("no answer from rank 3: a process ended" in output for output in ended.outputs[:3])
    assert {path.name for path in (tmp_path / "saved").glob("*.ckpt")} == {"step=2.ckpt", "step=4.ckpt"}


@pytest.mark.jobs
def test_a_replica_that_stops_before_its_copy_ends_all_others(tmp_path: Path) -> None:
    """Its partner waits for a number in memory, for which it has a time limit."""
    cell = replace(STOPPED, kind="mixed by copies")
    ended = cell.run(tmp_path, "forward")
    assert ended.exit_codes == [1, 1, 1, -signal.SIGKILL]
    assert ended.seconds < cell.limit_seconds
    named = r"no answer from rank 3|replica 3 \(rank 3\) did not exchange its weights within 4 s"
    assert any(re.search(named, output) for output in ended.outputs[:3])
    assert {path.name for path in (tmp_path / "saved").glob("*.ckpt")} == {"step=2.ckpt", "step=4.ckpt"}


@pytest.mark.gpu
@pytest.mark.two_gpus
@pytest.mark.jobs
@pytest.mark.parametrize("cell", [KILLED, STOPPED], ids=["killed", "stopped"])
def test_a_gone_replica_on_another_gpu_ends_its_partner(cell: Job, tmp_path: Path) -> None:
    """Weights that were mixed with nobody are not saved."""
    cell = replace(cell, rank=1, num_ranks=2, kind="mixed by copies", device="cuda", waits_seconds=STEP_SECONDS)
    ended = cell.run(tmp_path, "forward")
    assert all(ended.exit_codes)
    assert ended.seconds < cell.limit_seconds
    assert "rank 1" in ended.outputs[0]
    assert {path.name for path in (tmp_path / "saved").glob("*.ckpt")} == {"step=2.ckpt", "step=4.ckpt"}
