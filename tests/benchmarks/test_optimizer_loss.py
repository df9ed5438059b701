"""What `optimizer_loss` judges and shows; `tests/optim/test_state_dtypes.py` trains by it."""

from __future__ import annotations

import json
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks import optimizer_loss
from tests.benchmarks.optimizer_loss import (
    KINDS,
    MUON,
    OF_1B,
    OF_100M,
    PEER,
    SMALL,
    LossCase,
    cases,
    run_case,
    table,
    verdicts,
)
from tests.harness import warm

RESULT = {
    "case": "tiny",
    "steps": 1000,
    "rates": {0.001: 1.3, 0.003: 1.2},
    "best_rate": 0.003,
    "losses": {PEER: [1.2, 1.4], "8-bit states": [1.25, 1.36], "in backward": [1.3, 1.32], MUON: [1.2, 1.3]},
    "curves": {
        PEER: [[(500, 1.5), (1000, 1.2)], [(500, 1.6), (1000, 1.4)]],
        "8-bit states": [[(500, 1.5), (1000, 1.25)], [(500, 1.5), (1000, 1.36)]],
        "in backward": [[(500, 1.5), (1000, 1.3)], [(500, 1.5), (1000, 1.32)]],
        MUON: [[(500, 1.24), (1000, 1.2)], [(500, 1.35), (1000, 1.3)]],
    },
}


def test_differences_within_seeds_are_judged() -> None:
    """Muon by the steps to the peer's loss."""
    assert verdicts(RESULT) == ["missed", "missed", "met"]
    text = table(RESULT, "cuda")
    assert "| 8-bit states | 1.3050 | +4.17%, -2.86% | +0.65% +- 4.97% | 1.2500, 1.3600 |  |" in text
    assert "| Muon, float32 | 1.2500 | +0.00%, -7.14% | -3.57% +- 5.05% | 1.2000, 1.3000 | 500 |" in text
    assert "0.001: 1.3000, 0.003: 1.2000" in text
    assert verdicts({**RESULT, "curves": {**RESULT["curves"], MUON: RESULT["curves"][PEER]}})[-1] == "missed"


def test_cases_by_device_and_options() -> None:
    assert [case.name for case in cases("cuda", quick=False)] == ["tiny", "100M", "1B"]
    assert [case.name for case in cases("cpu", quick=False)] == ["tiny"]
    assert all(case.kinds == tuple(KINDS) for case in cases("cuda", quick=False)[:2])
    chosen = cases("cuda", quick=False, methods=[MUON], rates=[0.1], steps=7, jobs=3)
    assert {(case.kinds, case.rates, case.steps, case.jobs) for case in chosen} == {((MUON,), (0.1,), 7, 3)}
    with pytest.raises(ValueError, match="--methods 'Adam' is unknown; choose from 'AdamW, float32', '8-bit states'"):
        cases("cuda", quick=False, methods=["Adam"])


def write_to(directory: str, gpus: Any) -> None:
    """Write the results in a process of the pool, which is a fork that has made its imports."""
    os.environ["OUT"] = directory
    optimizer_loss._take_gpu(gpus)
    (Path(directory) / f"{os.getpid()}.gpu").write_text(os.environ["CUDA_VISIBLE_DEVICES"])


def test_runs_of_several_processes_write_their_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first seed of the best rate is not trained again, and a rate that is too large is not the best."""
    monkeypatch.setattr(
        optimizer_loss,
        "ProcessPoolExecutor",
        lambda jobs, _, initializer, initargs: ProcessPoolExecutor(
            jobs, warm.context(), write_to, (str(tmp_path), *initargs)
        ),
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    rates = (1e30, 1e-3)
    case = LossCase(
        name="small", config=SMALL, steps=2, rows=2, length=32, rates=rates, repeats=2, kinds=(PEER,), jobs=2
    )
    result = run_case(case, "cpu")
    rows = [json.loads(line) for line in (tmp_path / "optimizer_loss-small.jsonl").read_text().splitlines()]
    assert sorted((row["rate"], row["seed"]) for row in rows) == [(1e-3, 0), (1e-3, 1), (1e30, 0)]
    assert result["best_rate"] == 1e-3
    of_seeds = {row["seed"]: row["loss"] for row in rows if row["rate"] == 1e-3}
    assert result["losses"][PEER] == [of_seeds[0], of_seeds[1]]
    assert sorted(path.read_text() for path in tmp_path.glob("*.gpu")) == ["3", "5"]


def test_large_models_have_about_as_many_parameters_as_their_names_say() -> None:
    assert OF_100M.num_parameters == pytest.approx(100e6, rel=0.3)
    assert OF_1B.num_parameters == pytest.approx(1e9, rel=0.1)
