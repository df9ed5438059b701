"""Plans beside runs of `tests/benchmarks/plan_runs.yaml` that were measured on one or two H100 80 GB, in 10^9 bytes."""

from __future__ import annotations

import pytest

from lightning_d9d.plan import Plan, plan
from tests.benchmarks.plan_runs import listed
from tests.benchmarks.plan_runs_job import module_of, strategy_of

MEASURED = {
    "sparse": (28.46, 31.19, 0.1342),
    "sparse selective": (31.59, 34.85, 0.1577),
    "sparse full": (41.56, 43.56, 0.2229),
    "sparse attention": (26.64, 30.18, 0.141),
    "sparse every second": (31.59, 34.92, 0.1859),
    "sparse 16k": (28.47, 31.19, 0.1671),
    "sparse 32k": (28.88, 32.2, 0.3377),
    "sparse 64k": (29.43, 37.18, 1.5511),
    "float32 weights": (32.17, 36.14, 0.1208),
    "eight-bit states": (31.23, 33.92, 0.1617),
    "update in backward": (33.67, 34.59, 0.141),
    "eight bits in backward": (37.58, 38.52, 0.3089),
    "dense full": (34.76, 37.05, 1.0216),
    "dense none": (28.2, 28.24, 0.1906),
    "dense selective": (17.87, 18.19, 0.3313),
    "adapters of attention": (35.9, 36.37, 0.4408),
    "whole model but q_proj frozen": (69, 69.88, 0.8356),
    "replicas": (25.81, 32.72, 0.145),
    "replicas in bfloat16": (22.86, 25.48, 0.1294),
    "shards": (27.55, 41.53, 0.2149),
    "shards full": (34.41, 44.27, 0.3792),
    "shards of a dense": (35.49, 46.94, 0.6464),
    "experts": (28.83, 31.34, 0.1931),
    "experts and shards": (20.81, 26.77, 0.2331),
    "experts in eight bits": (29.04, 32.13, 0.3739),
    "tensors": (18.81, 20.39, 0.1469),
    "contexts": (13.66, 16.3, 0.162),
    "1f1b": (15.12, 15.91, 0.7424),
    "interleaved": (17.2, 18.17, 0.733),
    "zero bubble V": (15.91, 17.4, 0.9124),
    "microbatches": (29.14, 31.43, 0.2585),
}
"""Allocated and reserved bytes of the rank with most, and seconds of a step."""
RESERVED = {
    "sparse 64k": 0.2,
    "float32 weights": 0.09,
    "replicas": 0.18,
    "shards": 0.27,
    "shards full": 0.17,
    "shards of a dense": 0.23,
    "experts and shards": 0.16,
    "contexts": 0.09,
}
"""The most that a plan is off, where it is more than 8 %: torch reserves more for sums and for full sharding."""
TIME = {
    "sparse 16k": 0.11,
    "sparse 32k": 0.18,
    "sparse 64k": 0.2,
    "float32 weights": 0.16,
    "dense selective": 0.12,
    "adapters of attention": 0.12,
    "whole model but q_proj frozen": 0.13,
    "replicas": 0.14,
    "shards": 0.26,
    "shards full": 0.19,
    "shards of a dense": 0.3,
    "experts": 0.12,
    "experts and shards": 0.14,
    "zero bubble V": 0.25,
    "microbatches": 0.18,
}
"""The most that the time of a plan with the shipped table is off, where it is more than 10 %."""


def planned(name: str) -> Plan:
    (run,) = (each for each in listed() if each.name == name)
    return plan(
        module_of(run, is_quick=False),
        strategy_of(run),
        run.gpus,
        "h100",
        rows=run.rows,
        tokens=run.tokens,
        precision=run.precision,
        clips=not run.in_backward,
    )


@pytest.mark.parametrize("name", MEASURED)
def test_memory_and_time(name: str) -> None:
    allocated, reserved, seconds = MEASURED[name]
    found = planned(name)
    errors = found.most.peak.total / 1e9 / allocated, found.most.reserved / 1e9 / reserved, found.step_seconds / seconds
    print(name, *(f"{each - 1:+.1%}" for each in errors))
    assert errors[0] == pytest.approx(1, abs=0.05)
    assert errors[1] == pytest.approx(1, abs=RESERVED.get(name, 0.08))
    assert errors[2] == pytest.approx(1, abs=TIME.get(name, 0.1))
