"""Plans beside runs of `tests/benchmarks/plan_runs.yaml` that were measured on one or two H100 80 GB, in 10^9 bytes."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from lightning_d9d.memory.traffic import by_kind
from lightning_d9d.plan import Plan, plan
from tests.benchmarks.plan_runs import cases, listed
from tests.benchmarks.plan_runs_job import module_of, strategy_of

MEASURED = {
    "sparse": (28.46, 31.19, 0.1342),
    "sparse selective": (31.59, 34.85, 0.1577),
    "sparse full": (41.56, 43.56, 0.2257),
    "sparse attention": (26.64, 30.18, 0.141),
    "sparse every second": (31.59, 34.92, 0.1859),
    "sparse 16k": (28.47, 31.19, 0.1671),
    "sparse 32k": (28.88, 32.2, 0.3377),
    "adapters of experts": (22.30, 22.61, 0.1853),
    "float32 weights": (32.17, 36.14, 0.1208),
    "eight-bit states": (31.23, 33.92, 0.1617),
    "update in backward": (33.67, 34.59, 0.141),
    "eight bits in backward": (37.58, 38.52, 0.3089),
    "dense full": (34.76, 37.05, 1.0216),
    "dense none": (28.2, 28.24, 0.1906),
    "dense selective": (17.87, 18.19, 0.3313),
    "adapters of attention": (35.9, 36.37, 0.4408),
    "whole model but q_proj frozen": (69, 69.88, 0.8356),
    "replicas": (25.81, 32.72, 0.1455),
    "replicas in bfloat16": (22.86, 25.48, 0.1295),
    "shards": (27.55, 41.53, 0.2148),
    "shards full": (34.41, 44.27, 0.3646),
    "shards of a dense": (35.49, 46.94, 0.5077),
    "experts": (28.83, 31.34, 0.1931),
    "experts and shards": (20.81, 26.77, 0.2353),
    "experts in eight bits": (29.04, 32.13, 0.3646),
    "tensors": (18.81, 20.39, 0.1451),
    "contexts": (13.66, 16.3, 0.162),
    "1f1b": (15.12, 15.91, 0.7407),
    "interleaved": (17.2, 18.34, 0.7312),
    "zero bubble V": (15.91, 17.4, 0.7261),
    "microbatches": (29.14, 31.43, 0.2585),
}
"""Allocated and reserved bytes of the rank with most, and seconds of a step, on H100s."""
MEASURED_ON_H200 = {
    "sparse full": (41.56, 43.56, 0.2123),
    "sparse attention": (26.64, 30.18, 0.1361),
    "eight-bit states": (31.23, 33.92, 0.1548),
    "microbatches": (29.14, 31.43, 0.2468),
    "float32 weights": (32.17, 36.14, 0.111),
    "dual pipe V": (17.88, 19.19, 0.7159),
    "sparse 64k": (29.43, 33.68, 1.5714),
    "adapters of experts": (22.30, 22.61, 0.1907),
}
LIMITED_BY_HOST = {"adapters of experts"}
"""The run whose device waits for the host: kernels took 97.6 ms of a step."""
BUBBLES = {"1f1b": 0.0704, "interleaved": 0.0457, "zero bubble V": 0.0183, "dual pipe V": 0.0619}
"""The share of a step in which ranks of the pipeline compute nothing."""
SENT: dict[str, dict[str, int]] = {
    "replicas": {"all_reduce": 9966778536},
    "replicas in bfloat16": {"all_reduce": 4983390816},
    "shards": {"all_reduce": 5152, "all_gather": 7475870208, "reduce_scatter": 7475870208},
    "shards full": {"all_reduce": 8224, "all_gather": 11214594048, "reduce_scatter": 11214594048},
    "shards of a dense": {"all_reduce": 32, "all_gather": 7655977472, "reduce_scatter": 8044936192},
    "experts": {"all_reduce": 2948714756, "all_to_all": 1623195840},
    "experts and shards": {
        "all_reduce": 6176,
        "all_gather": 1474354176,
        "all_to_all": 2032140672,
        "reduce_scatter": 1474354176,
    },
    "experts in eight bits": {"all_reduce": 1704057086, "all_to_all": 4064281344},
    "tensors": {"reduce_scatter": 671088640, "all_gather": 671350784, "all_to_all": 1082130560, "all_reduce": 4276316},
    "contexts": {
        "all_reduce": 2642456692,
        "all_gather": 134217728,
        "all_to_all": 541065280,
        "reduce_scatter": 134217728,
    },
    "1f1b": {"point_to_point": 536870912, "all_reduce": 24},
    "interleaved": {"point_to_point": 1610612736, "all_reduce": 24},
    "zero bubble V": {"point_to_point": 1073741824, "all_reduce": 24},
    "dual pipe V": {"point_to_point": 1073741824, "all_reduce": 24},
}
"""Bytes that each rank sends in a step, by kind of collective."""
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "plan-a-run.md"


@functools.cache
def planned(name: str, gpu: str = "h100") -> Plan:
    (run,) = (each for each in listed() if each.name == name)
    return plan(
        module_of(run, is_quick=False),
        strategy_of(run),
        run.gpus,
        gpu,
        rows=run.rows,
        tokens=run.tokens,
        precision=run.precision,
        clips=not run.in_backward,
    )


@pytest.mark.parametrize(
    ("gpu", "name"), [*(("h100", name) for name in MEASURED), *(("h200", name) for name in MEASURED_ON_H200)]
)
def test_memory_and_time(gpu: str, name: str) -> None:
    allocated, reserved, seconds = (MEASURED if gpu == "h100" else MEASURED_ON_H200)[name]
    found = planned(name, gpu)
    errors = found.most.peak.total / 1e9 / allocated, found.most.reserved / 1e9 / reserved, found.step_seconds / seconds
    assert errors[0] == pytest.approx(1, abs=0.05)
    assert errors[1] == pytest.approx(1, abs=0.08)
    assert errors[2] == pytest.approx(1, abs=0.1)
    assert found.timed.is_limited_by_host == (name in LIMITED_BY_HOST)
    cells = " | ".join(f"{100 * (error - 1):+.1f} %" for error in errors)
    row = next(line for line in PAGE.read_text().splitlines() if f"{gpu.upper()}, *{name}*" in line)
    assert [cell.strip() for cell in row.split("|")[3:9:2]] == cells.split(" | ")


@pytest.mark.parametrize("name", BUBBLES)
def test_bubbles(name: str) -> None:
    gpu = "h100" if name in MEASURED else "h200"
    assert planned(name, gpu).timed.bubble_ratio == pytest.approx(BUBBLES[name], abs=0.03)


@pytest.mark.parametrize("name", SENT)
def test_bytes_on_links_are_those_of_the_recorder(name: str) -> None:
    for rank in planned(name).ranks:
        assert by_kind(rank.sent) == SENT[name]


def test_numbers_of_gpus_without_runs_are_refused() -> None:
    with pytest.raises(ValueError, match="--gpus 4: plan_runs has runs on 1 and 2 GPUs only"):
        cases("cuda", quick=False, gpus=4)
