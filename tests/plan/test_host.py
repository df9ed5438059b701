"""The time of the host in a plan: where it launches more slowly than the device computes."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from lightning_d9d import D9DStrategy, MeshConfig, ParallelConfig
from lightning_d9d.errors import ConfigError
from lightning_d9d.models.qwen3_moe import Qwen3MoePretraining
from lightning_d9d.models.qwen3_moe.presets import PresetName
from lightning_d9d.peft import FullTune, LoRA, PeftMethod
from lightning_d9d.plan import Plan, machine_of, plan, plan_of, search
from lightning_d9d.plan.page import page_of
from lightning_d9d.plan.planning import costs_of_length, rank_model
from lightning_d9d.plan.text import limit
from lightning_d9d.schedule import HostSeconds
from lightning_d9d.strategy.described import layers_of

HOST = HostSeconds(none=1.0, attention=2.0, selective=3.0, full=4.0)
MACHINE = replace(
    machine_of("h100"),
    sparse_host_seconds=HOST,
    dense_host_seconds=HostSeconds(*[0.5] * 4),
    linear_adapter_host_seconds=HostSeconds(0.01, 0.02, 0.03, 0.04),
    experts_adapter_host_seconds=HostSeconds(0.1, 0.2, 0.3, 0.4),
)
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def planned(preset: str = "30b-a3b", mesh: MeshConfig | None = None, rows: int = 1, **parallel: object) -> Plan:
    strategy = D9DStrategy(
        mesh=mesh or MeshConfig(),
        parallel=ParallelConfig(**parallel),  # type: ignore[arg-type]
        num_microbatches=rows,
    )
    ranks = 1 if mesh is None else 4
    return plan(Qwen3MoePretraining(preset=preset), strategy, ranks, MACHINE, rows=rows, tokens=128)


@pytest.mark.parametrize(
    ("recompute", "seconds"),
    [
        ("none", 48.0),
        ("attention", 96.0),
        ("selective", 144.0),
        ("full", 192.0),
        ("offload", 192.0),
        ("every_2", 120.0),
    ],
)
def test_a_step_takes_as_long_as_the_host(recompute: str, seconds: int) -> None:
    found = planned(recompute=recompute)
    parts = found.timed.seconds
    assert found.timed.host_seconds == seconds
    assert parts.compute + parts.messages + parts.host == pytest.approx(seconds)
    assert found.step_seconds == pytest.approx(seconds + parts.update)
    assert f"limited by the host: it needs {seconds:.3f} s" in str(found)
    assert "waiting for the host to launch" in page_of(found)
    assert json.loads(json.dumps(found.to_dict()))["limited_by"] == "host"


@pytest.mark.parametrize(
    ("preset", "recompute", "peft", "more"),
    [
        ("30b-a3b", "none", LoRA(), 4 * 0.01 + 2 * 0.1),
        ("30b-a3b", "selective", LoRA(), 4 * 0.03 + 2 * 0.3),
        ("30b-a3b", "full", LoRA(targets=ATTENTION), 4 * 0.04),
        ("30b-a3b", "attention", LoRA(targets=["experts.down_proj"], rank_of_experts=2), 0.2),
        ("30b-a3b", "every_2", LoRA(targets=["q_proj"]), (0.01 + 0.04) / 2),
        ("0.6b", "selective", LoRA(), 7 * 0.03),
        ("30b-a3b", "none", FullTune(["q_proj"]), 0.0),
    ],
)
def test_adapters_are_launched_too(preset: PresetName, recompute: str, peft: PeftMethod, more: float) -> None:
    strategy = D9DStrategy(parallel=ParallelConfig(recompute=recompute))
    modules = Qwen3MoePretraining(preset=preset), Qwen3MoePretraining(preset=preset, peft=peft)
    before, found = (plan(module, strategy, 1, MACHINE, rows=1, tokens=128) for module in modules)
    layers = len(found.model.costs.layers)
    assert before.timed.host_seconds is not None
    assert found.timed.host_seconds == pytest.approx(before.timed.host_seconds + layers * more)


def test_adapters_on_ranks_are_counted_whole() -> None:
    module = Qwen3MoePretraining(preset="30b-a3b", peft=LoRA())
    for mesh in (
        MeshConfig(tensor_parallel=2, data_parallel_shard=2, expert_parallel=4),
        MeshConfig(data_parallel_shard=4, expert_parallel=2),
    ):
        found = plan(module, D9DStrategy(mesh=mesh), 4, MACHINE, rows=1, tokens=128)
        assert found.timed.host_seconds == pytest.approx(48 * 1.24)


def test_microbatches_are_launched_one_by_one() -> None:
    assert planned("0.6b", rows=3).timed.host_seconds == 3 * 28 * 0.5


def test_each_rank_of_a_pipeline_has_its_own_host() -> None:
    found = planned(mesh=MeshConfig(pipeline_parallel=4), rows=4)
    layers = [each.layers for each in found.ranks]
    assert found.timed.simulation.compute_time == pytest.approx([4.0 * each for each in layers])
    assert found.timed.host_seconds == 4 * max(layers)
    assert found.step_seconds > 4 * max(layers) + layers[-1]  # the last rank's first microbatch comes between


def test_messages_slow_nothing_while_the_device_waits() -> None:
    mesh, module = MeshConfig(data_parallel_replicate=4), Qwen3MoePretraining(preset="30b-a3b")
    free = replace(MACHINE, message_slowdown=0.0)
    found, other = (plan(module, D9DStrategy(mesh=mesh), 4, machine, rows=1, tokens=128) for machine in (MACHINE, free))
    assert found.timed.seconds.sums > other.timed.seconds.sums
    assert found.step_seconds == pytest.approx(other.step_seconds)


@pytest.mark.parametrize("setting", ["compile", "cuda_graphs"])
def test_blocks_that_are_compiled_or_captured_are_not_known(setting: str) -> None:
    found = planned("30b-a3b", None, 1, **{setting: True})
    assert found.timed.host_seconds is None
    assert found.timed.seconds.host == 0
    assert "its seconds for these blocks are not known" in limit(found)


def test_a_device_that_is_slower_hides_the_host() -> None:
    strategy, module = D9DStrategy(), Qwen3MoePretraining(preset="30b-a3b")
    known = plan(module, strategy, 1, "h100", rows=8, tokens=4096)
    unknown = replace(machine_of("h100"), sparse_host_seconds=None)
    assert known.timed.host_seconds == pytest.approx(48 * machine_of("h100").sparse_host_seconds.none)  # type: ignore[union-attr]
    assert known.step_seconds == plan(module, strategy, 1, unknown, rows=8, tokens=4096).step_seconds
    assert "limited by the device: the host needs 0.384 s to launch" in str(known)


def test_a_search_takes_larger_microbatches() -> None:
    """With microbatches of one row the host would be slower than eight devices of a pipeline."""
    module = Qwen3MoePretraining(preset="30b-a3b")
    model = rank_model(module, D9DStrategy(mesh=MeshConfig(data_parallel_replicate=-1)), 8, rows=8, tokens=4096)
    table = machine_of("h200")
    plans = search(model, table, costs_of_length(module, "bf16-true"), lambda num: layers_of(module, 48, num))
    best = next(each for each in plans if each.model.mesh.pipeline_parallel == 8)
    assert best.model.num_microbatches == 32
    small = replace(best.model, rows=1, num_microbatches=64)
    limited = plan_of(small, table, costs_of_length(module, "bf16-true"))
    assert limited.timed.is_limited_by_host
    assert best.step_seconds < limited.step_seconds
    ahead = plan_of(small, replace(table, sparse_host_seconds=None), costs_of_length(module, "bf16-true"))
    assert limited.timed.seconds.without_host == pytest.approx(ahead.step_seconds, rel=0.05)


def test_mistakes() -> None:
    with pytest.raises(
        ConfigError, match=r"sparse_host_seconds=HostSeconds\(.*attention=-1, .*\) must be finite numbers of at least 0"
    ):
        replace(MACHINE, sparse_host_seconds=HostSeconds(1, -1, 1, 1))


def test_a_table_without_seconds_of_the_host_has_those_of_the_h200(tmp_path: Path) -> None:
    h200, values = machine_of("h200"), asdict(MACHINE)
    assert "sparse_host_seconds" not in h200.not_measured
    values["sparse_host_seconds"] = None
    del values["dense_host_seconds"]
    (tmp_path / "own.json").write_text(json.dumps({"own": values}))
    found = machine_of(str(tmp_path / "own.json"))
    assert (found.sparse_host_seconds, found.dense_host_seconds) == (h200.sparse_host_seconds, h200.dense_host_seconds)
    assert found.experts_adapter_host_seconds == MACHINE.experts_adapter_host_seconds
    assert {"sparse_host_seconds", "dense_host_seconds"} <= {*found.not_measured}
    assert {"linear_adapter_host_seconds", "experts_adapter_host_seconds"}.isdisjoint(
        {*found.not_measured} - {*MACHINE.not_measured}
    )
