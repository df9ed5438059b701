"""What `muon` measures: that all forms do the same work, and how many operations it is."""

from __future__ import annotations

import torch

from tests.benchmarks import frame, ops
from tests.benchmarks.frame import Case
from tests.benchmarks.muon import ADAMW, MUON, cases, flops, flops_of_gram_form, table
from tests.benchmarks.op_case import OpCase


def test_contenders_do_the_same_work() -> None:
    for case in cases("cpu", quick=True):
        if isinstance(case, OpCase):
            result = ops.run_case(case, "cpu")
            of_pass = result["passes"]["forward"]
            assert all("seconds" in values for values in of_pass["contenders"].values()), of_pass
            assert table(result, "cpu").count("\n|") == 2 + len(of_pass["contenders"])


def test_the_share_of_a_step_is_told() -> None:
    (case,) = (case for case in cases("cpu", quick=True) if isinstance(case, Case))
    result = {"benchmark": "muon", **frame.summarize(case, frame.measure(case, torch.device("cpu")))}
    assert result["contenders"].keys() == {ADAMW, MUON}
    assert table(result, "cpu").count("on 8") == 2


def test_operations() -> None:
    """Experts of a layer of `30b-a3b`."""
    gate_and_up, down = (128, 2, 768, 2048), (128, 2048, 768)
    assert round((flops(gate_and_up) + flops(down)) / 1e12, 1) == 11.0
    assert flops(gate_and_up) == 2 * flops(down)
    assert round(flops_of_gram_form(down) / flops(down), 2) == 0.78
