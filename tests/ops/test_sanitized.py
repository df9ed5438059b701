"""The program for the sanitizer must run, and must have every op."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.benchmarks.op_case import QUICK
from tests.benchmarks.op_cases import op_cases
from tests.ops.sanitized import SIZES, run, sanitized_cases


@pytest.mark.parametrize(("name", "case"), [pytest.param(*each, id=each[0]) for each in sanitized_cases()])
def test_case(name: str, case) -> None:
    results = run(replace(case, kernels="auto"), torch.device("cpu"))
    assert all(result.isfinite().all() for result in results), name


def test_all_ops_at_all_sizes() -> None:
    names = {name for name, _ in sanitized_cases()}
    assert names == {f"{case.name}, {of_size}" for case in op_cases(QUICK) for of_size in SIZES}
