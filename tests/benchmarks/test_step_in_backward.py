"""What `step_in_backward` measures."""

from __future__ import annotations

from typing import Any

import torch

from tests.benchmarks.frame import measure, summarize
from tests.benchmarks.step_in_backward import BEHIND, INSIDE, ON_ONE_STREAM, cases, table
from tests.benchmarks.step_profile import of_trace


def test_contenders_do_the_same_work() -> None:
    """`measure` compares their losses behind the first steps."""
    *_, case = cases("cpu", quick=True)
    result = {"benchmark": "step_in_backward", **summarize(case, measure(case, torch.device("cpu")))}
    assert INSIDE in result["contenders"]
    parts = {
        name: values["profile"]["host"]["parts of a step"]["calls"] for name, values in result["contenders"].items()
    }
    assert parts[BEHIND] == 0
    assert parts[INSIDE] == parts[ON_ONE_STREAM]
    assert "| host: parts of a step | 0.0 in 0.00 ms |" in table(result, "cpu")


def test_a_trace_is_summed_up_by_the_step() -> None:
    """Two kernels run beside each other, and the device waits for a third."""

    def event(kind: str, name: str, begin: float, duration: float, stream: int = 7) -> dict[str, Any]:
        return {"cat": kind, "name": name, "ts": begin, "dur": duration, "tid": stream, "args": {"stream": stream}}

    events = [
        {"ph": "M", "name": "process_name"},
        event("cuda_runtime", "cudaLaunchKernel", 0, 5),
        event("kernel", "product", 10, 1000),
        event("kernel", "update", 500, 800, stream=20),
        event("kernel", "product", 1600, 900),
    ]
    found = of_trace(events, steps=1)
    assert found["kernels"] == {"product": {"calls": 2, "ms": 1.9}, "update": {"calls": 1, "ms": 0.8}}
    assert found["calls"] == {"cudaLaunchKernel": {"calls": 1, "ms": 0.005}}
    assert found["streams"] == {"7": 1.9, "20": 0.8}
    assert (found["busy_ms"], found["idle_ms"], found["long_gaps"]) == (2.19, 0.3, 1)
    assert found["gaps"] == [(300, "update", "product")]
