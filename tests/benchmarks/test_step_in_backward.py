"""What `step_in_backward` measures."""

from __future__ import annotations

import torch

from tests.benchmarks.frame import measure, summarize
from tests.benchmarks.step_in_backward import INSIDE, cases


def test_contenders_do_the_same_work() -> None:
    """`measure` compares their losses behind the first steps."""
    *_, case = cases("cpu", quick=True)
    result = summarize(case, measure(case, torch.device("cpu")))
    assert INSIDE in result["contenders"]
