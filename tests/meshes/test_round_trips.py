"""What one mesh saves another one loads bit for bit, and goes on with the same batches and losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_d9d.checkpoint import open_directory
from tests.harness.compare import assert_bitwise_equal, assert_close_named
from tests.harness.jobs import run_job
from tests.harness.tolerances import Kind, Tolerance
from tests.meshes.round_trips import ROUND_TRIPS, SAVED_AFTER, STEPS, RoundTrip, train

SEVERAL_STEPS = Tolerance(relative=1e-9)


def results(folder: Path, name: str) -> list[Any]:
    return [torch.load(path, weights_only=True) for path in sorted(folder.glob(f"{name}-*.pt"))]


@pytest.mark.jobs
@pytest.mark.parametrize(
    "trip", [pytest.param(trip, id=str(trip), marks=() if trip.fast else pytest.mark.meshes) for trip in ROUND_TRIPS]
)
def test_another_mesh_goes_on(trip: RoundTrip, tmp_path: Path) -> None:
    for loads, case in enumerate(trip.cases):
        run_job(case.num_ranks, tmp_path, train, trip, bool(loads), tmp_path)
    saved = open_directory(tmp_path / f"step={SAVED_AFTER}.ckpt").read()
    again = open_directory(tmp_path / "again.ckpt").read()
    assert again.keys() == saved.keys()
    assert any(name.startswith("optimizer_0.") for name in saved)
    for name, tensor in saved.items():
        assert_bitwise_equal(name, again[name], tensor)
    before, after = results(tmp_path, "saved"), results(tmp_path, "loaded")
    assert (len(before), len(after)) == tuple(case.num_ranks for case in trip.cases)
    for rank in before:
        assert rank["weights"]
        for name, weight in rank["weights"].items():
            assert_bitwise_equal(name, saved[next(each for each in saved if each.endswith(f".{name}"))], weight)
    for rank in after:
        assert len(rank["losses"]) == STEPS - SAVED_AFTER
        assert rank["batches"] == before[0]["batches"]
        for index, (loss, expected) in enumerate(zip(rank["losses"], before[0]["losses"], strict=True)):
            assert_close_named(f"loss {index}", loss, expected, kind=Kind.LOSS, tolerance=SEVERAL_STEPS)
