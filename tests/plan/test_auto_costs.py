"""`Auto` in a plan: it knows the mesh, and says the time and the memory that the plan of its choice says."""

from __future__ import annotations

import dataclasses

import pytest

from lightning_d9d import D9DStrategy, MeshConfig, ParallelConfig
from lightning_d9d.errors import ScheduleError
from lightning_d9d.memory import GPU_OVERHEAD
from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoePretraining
from lightning_d9d.models.qwen3_moe.costs import model_costs
from lightning_d9d.plan import MachineTable, Plan, machine_of, plan
from lightning_d9d.schedule import Auto, Choice, HostSeconds

ROWS, TOKENS, GIB = 8, 4096, 2**30
MACHINE = dataclasses.replace(machine_of("h100"), sparse_host_seconds=None)
CASES: dict[str, tuple[dict[str, int], str]] = {
    "shards and experts": ({"pipeline_parallel": 2, "data_parallel_shard": 4, "expert_parallel": 4}, "none"),
    "recomputed": ({"pipeline_parallel": 2, "data_parallel_shard": 4, "expert_parallel": 4}, "full"),
    "tensor": ({"pipeline_parallel": 2, "tensor_parallel": 2, "data_parallel_shard": 2, "expert_parallel": 4}, "full"),
    "context": ({"pipeline_parallel": 4, "context_parallel_shard": 2, "expert_parallel": 2}, "selective"),
}


def planned(name: str, auto: Auto, machine: MachineTable = MACHINE) -> Plan:
    degrees, recompute = CASES[name]
    parallel = ParallelConfig(recompute=recompute, expert_dispatch="peer")
    strategy = D9DStrategy(mesh=MeshConfig(**degrees), schedule=auto, parallel=parallel)
    module = Qwen3MoePretraining(preset="30b-a3b")
    return plan(module, strategy, 8, machine, rows=ROWS, tokens=TOKENS)


def chosen(name: str, machine: MachineTable) -> tuple[Choice, Plan]:
    """The choice in a plan, and the plan of it."""
    auto = Auto(ROWS, TOKENS, memory_gib=300, machine=machine.rates)
    choices: list[Choice] = []
    original = auto.choose
    auto.choose = lambda *given, **options: choices.append(original(*given, **options)) or choices[-1]  # type: ignore[method-assign,func-returns-value]
    found = planned(name, auto, machine)
    (choice,) = choices
    return choice, found


@pytest.mark.parametrize("name", CASES)
def test_the_choice_has_the_time_of_its_plan(name: str) -> None:
    choice, found = chosen(name, MACHINE)
    assert choice.peak_memory == max(GPU_OVERHEAD.allocatable(each.needed) for each in found.ranks)
    assert choice.step_time == pytest.approx(found.timed.simulation.step_time, rel=0.01)
    assert found.model.rows * found.model.num_microbatches == ROWS


@pytest.mark.parametrize("name", CASES)
def test_the_choice_counts_a_slow_host(name: str) -> None:
    """With two microbatches the host is slower than the device, and with one there would be a longer bubble."""
    _, ahead = chosen(name, MACHINE)
    of_layer = ahead.timed.simulation.compute_time[0] / ahead.most.layers
    host = HostSeconds(*[0.6 * of_layer] * 4)
    choice, found = chosen(name, dataclasses.replace(MACHINE, sparse_host_seconds=host, message_slowdown=0.0))
    assert found.timed.is_limited_by_host
    assert 1 < choice.num_microbatches < ahead.model.num_microbatches
    assert choice.step_time == pytest.approx(found.timed.simulation.step_time, rel=0.01)


def test_what_fits_in_shards_is_not_refused() -> None:
    """The same model does not fit where each rank would hold its layers whole, which is what `Auto` assumed before."""
    costs = model_costs(Qwen3MoeConfig.preset("30b-a3b"), TOKENS)
    cap = MACHINE.allocatable / GIB
    with pytest.raises(ScheduleError, match="no schedule fits"):
        Auto(ROWS, TOKENS, memory_gib=cap).choose(2, costs, state_ratio=4)
    auto = Auto(ROWS, TOKENS, memory_gib=cap, machine=MACHINE.rates)
    found = planned("recomputed", auto)
    assert found.missing <= 0


def test_nothing_that_does_not_fit_is_chosen() -> None:
    with pytest.raises(ScheduleError, match=r"no schedule fits into 10\.0 GiB a rank; the least that one needs is"):
        planned("recomputed", Auto(ROWS, TOKENS, memory_gib=10))
