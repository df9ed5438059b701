"""What `optimizer_loss` judges and shows; `tests/optim/test_state_dtypes.py` trains by it."""

from __future__ import annotations

import pytest

from tests.benchmarks.optimizer_loss import KINDS, OF_100M, PEER, cases, table, verdicts

RESULT = {
    "case": "tiny",
    "steps": 1000,
    "rates": {0.001: 1.3, 0.003: 1.2},
    "best_rate": 0.003,
    "losses": {PEER: [1.2, 1.4], "8-bit states": [1.25, 1.36], "bfloat16 states": [1.3, 1.32]},
}


def test_means_over_seeds_are_judged() -> None:
    assert verdicts(RESULT) == ["met", "missed"]
    text = table(RESULT, "cuda")
    assert "| 8-bit states | 1.3050 | +0.38% | 1.2500, 1.3600 |" in text
    assert "0.001: 1.3000, 0.003: 1.2000" in text


def test_cases_by_device() -> None:
    assert [case.name for case in cases("cuda", quick=False)] == ["tiny", "100M"]
    assert [case.name for case in cases("cpu", quick=False)] == ["tiny"]
    assert all(case.kinds == tuple(KINDS) for case in cases("cuda", quick=False))


def test_the_large_model_has_about_100_million_parameters() -> None:
    assert OF_100M.num_parameters == pytest.approx(100e6, rel=0.3)
