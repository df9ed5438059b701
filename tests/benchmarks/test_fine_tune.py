"""What `fine_tune` measures."""

from __future__ import annotations

import torch

from tests.benchmarks.fine_tune import Adapters, cases, table
from tests.benchmarks.frame import measure, summarize


def test_contenders_do_the_same_work() -> None:
    """`measure` compares their losses behind the first steps."""
    (compared,) = cases("cpu", quick=True)
    result = {"benchmark": "fine_tune", **summarize(compared, measure(compared, torch.device("cpu")))}
    assert f"| transformers and peft, {Adapters()} | 1 (peer)" in table(result, "cpu")


def test_ours_with_experts_is_judged_by_every_peer() -> None:
    of_gpu = cases("cuda", quick=False)
    assert [[*case.limits] for case in of_gpu] == [[f"ours, {Adapters(2)}"]] * 3
