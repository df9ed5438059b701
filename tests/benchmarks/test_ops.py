"""What `ops` measures, on a CPU: that all contenders of all ops run and do the same work, and what is judged how."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.benchmarks.op_case import QUICK, Sizes, Work
from tests.benchmarks.op_cases import op_cases
from tests.benchmarks.ops import OURS, _judged, cases, run_case, table, verdicts

CEILINGS = {"bytes_per_second": 4e12, "flops_per_second": 8e14}


@pytest.mark.parametrize("case", cases("cpu", quick=True), ids=lambda case: case.name)
def test_contenders_do_the_same_work(case) -> None:
    result = run_case(replace(case, repeats=1), "cpu")
    for name, of_pass in result["passes"].items():
        assert all(len(values["seconds"]) == 1 for values in of_pass["contenders"].values()), of_pass
        assert of_pass["bytes"] + of_pass["flops"] == case.work[name].bytes + case.work[name].flops > 0
    assert verdicts(result) == []
    rows = sum(len(of_pass["contenders"]) for of_pass in result["passes"].values())
    assert table(result, "cpu").count("\n|") == 2 + rows


def test_a_contender_with_other_results_is_told() -> None:
    case = cases("cpu", quick=True, ops=["swiglu"])[0]
    wrong = replace(case, peers={"wrong": lambda gate_up, weights: 1.2 * case.ours(gate_up, weights)})
    contenders = run_case(wrong, "cpu")["passes"]["forward"]["contenders"]
    assert contenders["wrong"]["error"] == "ValueError: result or gradient 0 differs from ours by 20.0%"


def test_limits() -> None:
    """The op moves 400 MB, which takes 100 us at the ceiling."""
    case = replace(op_cases(QUICK)[0], work={"forward": Work(400_000_000)}, limits={"ceiling": 1.2}, most_extra=5)
    seconds = {OURS: 110e-6, "faster": 100e-6, "equal": 110e-6, "ceiling": 100e-6}
    measured = {name: {"seconds": [each] * 8, "extra_bytes": 6} for name, each in seconds.items()}
    judged = _judged(case, "forward", measured, CEILINGS)
    assert {target["name"]: target["verdict"] for target in judged["targets"]} == {
        "time of faster": "missed",
        "time of equal": "met",
        "time of ceiling": "met",
        "share of copy bandwidth": "met",
        "bytes beside results": "missed",
    }
    assert judged["contenders"][OURS]["share"] == pytest.approx(1 / 1.1)
    of_products = replace(case, work={"forward": Work(flops=10**12, least_rate=1e15)}, peers={}, most_extra=None)
    judged = _judged(of_products, "forward", {OURS: {"seconds": [2e-3] * 8, "extra_bytes": 0}}, CEILINGS)
    assert judged["targets"] == [{"name": "operations a second", "limit": 1e15, "verdict": "missed"}]


def test_sizes_of_the_shape() -> None:
    """The sizes are those of the 30b-a3b shape and twice that."""
    for scale in (1.0, 2.0):
        of_op = {case.name: case.work for case in op_cases(Sizes().scaled(scale))}
        assert of_op["rms_norm"]["backward"].bytes == scale * 3 * 16_384 * 2048 * 2
        assert of_op["linear_cross_entropy"]["both"].flops == scale * 6 * 16_384 * 2048 * 151_936
        assert of_op["stochastic_adamw"]["forward"].bytes == pytest.approx(scale * 5e9 * 14, rel=0.01)
        in_eight_bits = of_op["stochastic_adamw, 8-bit states"]["forward"].bytes
        assert in_eight_bits == pytest.approx(scale * 2.5e9 * 10.125, rel=0.01)
    with pytest.raises(ValueError, match="--ops 'gemm' is unknown; choose from 'rms_norm', "):
        cases("cuda", quick=False, ops=["gemm"])
