"""Plans of runs: sizes by hand, what does not fit, files, and mistakes."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from lightning_d9d import D9DStrategy, GradSyncConfig, MeshConfig, ParallelConfig
from lightning_d9d.errors import ConfigError
from lightning_d9d.models.qwen3_moe import Qwen3MoePretraining
from lightning_d9d.optim import StochasticAdamW
from lightning_d9d.plan import Plan, machine_of, plan, search, shipped, write_page
from lightning_d9d.plan.planning import costs_of_length, rank_model
from lightning_d9d.plan.search import name_of, settings_of
from lightning_d9d.strategy.described import layers_of

EXPERTS = 48 * 128 * 3 * 2048 * 768
OTHERS = 30_532_122_624 - EXPERTS


def planned(world_size: int, **degrees: int) -> Plan:
    strategy = D9DStrategy(mesh=MeshConfig(**degrees), num_microbatches=4)
    return plan(Qwen3MoePretraining(preset="30b-a3b"), strategy, world_size, "h200", rows=4, tokens=4096)


@pytest.mark.parametrize(
    ("world_size", "degrees", "experts", "shards"),
    [
        (64, {"data_parallel_replicate": 64, "expert_parallel": 8}, 8, 1),
        (1024, {"data_parallel_replicate": 1024, "expert_parallel": 64}, 64, 1),
        (4096, {"data_parallel_replicate": 64, "data_parallel_shard": 64, "expert_parallel": 64}, 64, 64),
        (16384, {"data_parallel_replicate": 256, "data_parallel_shard": 64, "expert_parallel": 64}, 64, 64),
    ],
)
def test_weights_are_those_by_hand(world_size: int, degrees: dict[str, int], experts: int, shards: int) -> None:
    found = planned(world_size, **degrees)
    assert found.num_parameters == EXPERTS + OTHERS
    assert sum(found.most.elements.values()) == pytest.approx(EXPERTS / experts + OTHERS / shards, rel=0.002)
    assert found.tokens == 4 * 4096 * world_size
    assert found.ranks[0].num_ranks == world_size


def test_layers_that_are_given_for_several_stages_of_a_rank() -> None:
    """Each of the two ranks has two of the four stages, and the plan is that of the virtual layers that cut so."""
    strategy = D9DStrategy(mesh=MeshConfig(pipeline_parallel=2), schedule="zero_bubble_v", num_microbatches=4)
    plans = [
        plan(Qwen3MoePretraining(preset="30b-a3b", **cut), strategy, 2, "h200", rows=4, tokens=4096)
        for cut in ({"layers_per_stage": [13, 13, 12, 10]}, {"virtual_layers_after": 2}, {"virtual_layers_after": 5})
    ]
    elements = [[rank.elements for rank in found.ranks] for found in plans]
    assert elements[0] == elements[1] != elements[2]
    assert plans[0].tokens_per_second == plans[1].tokens_per_second


def test_what_does_not_fit_is_said() -> None:
    found = planned(1)
    assert found.missing == found.most.needed - machine_of("h200").memory_bytes > 0
    assert f"DOES NOT FIT: pipeline rank 0 needs {found.most.needed / 2**30:.2f}" in str(found)


@pytest.mark.parametrize("dispatch", ["all_to_all", "peer"])
def test_an_uneven_load_of_experts_needs_more(dispatch: Literal["all_to_all", "peer"]) -> None:
    def of(load: float) -> Plan:
        strategy = D9DStrategy(
            mesh=MeshConfig(data_parallel_replicate=4, expert_parallel=4),
            parallel=ParallelConfig(expert_dispatch=dispatch, expert_capacity=1.25 if dispatch == "peer" else 1.5),
        )
        module = Qwen3MoePretraining(preset="30b-a3b")
        return plan(module, strategy, 4, "h200", rows=2, tokens=4096, expert_load=load)

    plans = {load: of(load) for load in (1.0, 1.5, 1.7, 4.0)}  # with 32 experts of a rank all 8 of a token may be there
    assert plans[1.0].needed_by_load == {load: plans[load].most.needed for load in (1.0, 1.5, 4.0)}
    assert plans[1.7].needed_by_load == {load: each.most.needed for load, each in plans.items()}
    costs = Qwen3MoePretraining(preset="30b-a3b").model_costs(4096, 2)
    rooms = {1.0: 1.0, 1.5: 1.5, 1.7: 1.7, 4.0: 4.0}
    if dispatch == "peer":
        rooms = {1.0: 1.25, 1.5: 1.25 * 1.5, 1.7: 1.25 * 1.7, 4.0: 4.0}
    for load, each in plans.items():
        more = (rooms[load] - rooms[1.0]) * 2 * sum(layer.copies_bytes for layer in costs.layers)
        assert each.most.peak.activations - plans[1.0].most.peak.activations == pytest.approx(more, rel=0.03)
    assert "1.5 x an even share" in str(plans[1.0])
    with pytest.raises(ConfigError, match=r"expert_load=0.5, which must be a number of at least 1"):
        of(0.5)
    assert planned(1).needed_by_load == {}


def test_files_have_the_plan(tmp_path: Path) -> None:
    found = planned(8, pipeline_parallel=2, data_parallel_replicate=4)
    read = json.loads(json.dumps(found.to_dict()))
    assert [each["allocated_bytes"] for each in read["ranks"]] == [each.peak.total for each in found.ranks]
    write_page(found, tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text()
    assert page.count("<svg") == 2
    assert "<script" not in page
    assert "http" not in page.replace("http-equiv", "")


def test_settings_that_are_not_counted_are_named(tmp_path: Path) -> None:
    def of(**options: Any) -> Plan:
        mesh, parallel = MeshConfig(data_parallel_replicate=2, expert_parallel=2), ParallelConfig(**options)
        strategy = D9DStrategy(mesh=mesh, parallel=parallel)
        return plan(Qwen3MoePretraining(preset="tiny"), strategy, 2, rows=4, tokens=64)

    assert "counted as without" not in str(of(recompute="full"))
    found = of(overlap_experts=True, kernels="torch")
    assert "\ncounted as without: overlap_experts=True, kernels='torch'\n" in str(found)
    write_page(found, tmp_path / "plan.html")
    assert (
        "Counted as without: overlap_experts=True, kernels=&#x27;torch&#x27;." in (tmp_path / "plan.html").read_text()
    )


@pytest.mark.parametrize(
    ("gib", "recompute", "heading"),
    [
        (139.8, "full", "make it faster"),
        (132.0, "none", "make it fit"),
        (60.0, "full", "need less memory"),
    ],
)
def test_single_changes_are_plans_of_their_own(gib: float, recompute: str, heading: str, tmp_path: Path) -> None:
    machine = dataclasses.replace(machine_of("h200"), memory_gib=gib)

    def of(recompute: str = recompute, experts: int = 2, dtype: torch.dtype = torch.bfloat16) -> Plan:
        optimizer = partial(StochasticAdamW, lr=1e-5, state_dtype=dtype)
        strategy = D9DStrategy(
            mesh=MeshConfig(data_parallel_replicate=4, expert_parallel=experts),
            parallel=ParallelConfig(recompute=recompute),
            grad_sync=GradSyncConfig(dtype="bfloat16"),
        )
        module = Qwen3MoePretraining(preset="30b-a3b", optimizer=optimizer)
        return plan(module, strategy, 4, machine, rows=4, tokens=4096)

    found = of()
    assert 1 <= len(found.changes) <= 3
    assert f"single changes that {heading}:" in str(found)
    for change in found.changes:
        name, value = change.setting.rsplit(" ", 1)
        if name == "recompute":
            again = of(recompute=value)
        elif name == "expert_parallel":
            again = of(experts=int(value))
        else:
            again = of(dtype=torch.uint8)
        assert (again.step_seconds, again.most.needed) == change[1:]
        if heading == "make it faster":
            assert again.step_seconds < found.step_seconds
        assert (again.missing <= 0) == (heading != "need less memory")
        assert again.missing < found.missing or heading == "make it faster"
    assert found.to_dict()["changes"] == [each._asdict() for each in found.changes]
    write_page(found, tmp_path / "plan.html")
    assert f"Single changes that {heading}".lower() in (tmp_path / "plan.html").read_text().lower()


def test_a_search_returns_what_fits_and_is_as_fast_as_said() -> None:
    module, strategy = Qwen3MoePretraining(preset="30b-a3b"), D9DStrategy(mesh=MeshConfig(data_parallel_replicate=-1))
    model, few = (rank_model(module, strategy, ranks, rows=2, tokens=4096) for ranks in (8, 2))
    costs = costs_of_length(module, "bf16-true")
    plans = search(model, machine_of("h200"), costs, lambda stages: layers_of(module, 48, stages))
    assert len({str(each) for each in plans}) == len(plans) == 10
    assert all(each.missing <= 0 for each in plans)
    assert {each.tokens for each in plans} == {8 * 2 * 4096}
    assert [each.step_seconds for each in plans] == sorted(each.step_seconds for each in plans)
    small = dataclasses.replace(machine_of("h200"), memory_gib=4.0)
    with pytest.raises(ConfigError, match=r"nothing that was tried fits 4.0 GiB; the nearest"):
        search(few, small, costs, lambda stages: layers_of(module, 48, stages))


def test_a_search_varies_experts_recomputation_and_states() -> None:
    """Each found plan is that of its own settings, also after a variant had no room for the memory of peers."""

    def module(dtype: torch.dtype) -> Qwen3MoePretraining:
        return Qwen3MoePretraining(preset="30b-a3b", optimizer=partial(StochasticAdamW, lr=1e-5, state_dtype=dtype))

    sync, costs = GradSyncConfig(dtype="bfloat16"), costs_of_length(module(torch.bfloat16), "bf16-true")
    strategy = D9DStrategy(mesh=MeshConfig(data_parallel_replicate=-1), grad_sync=sync)
    model = rank_model(module(torch.bfloat16), strategy, 2, rows=4, tokens=4096, gpus_per_node=8)
    layers = partial(layers_of, module(torch.bfloat16), 48)
    plans = search(model, machine_of("h200"), costs, layers, most=20)
    assert plans[0].model.mesh.expert_parallel == 2
    assert {each.model.dispatch for each in plans} >= {"all_to_all", "peer"}
    assert {each.model.has_eight_bits for each in plans} == {False, True}
    assert len({each.model.parallel.recompute for each in plans}) > 3
    for each in plans:
        found, dtype = each.model, torch.uint8 if each.model.has_eight_bits else torch.bfloat16
        own = D9DStrategy(
            mesh=found.mesh,
            schedule=found.schedule,
            num_microbatches=found.num_microbatches,
            parallel=ParallelConfig(recompute=found.parallel.recompute),
            grad_sync=sync,
        )
        rows = found.rows * found.num_microbatches
        again = plan(module(dtype), own, 2, "h200", rows=rows, tokens=4096)
        assert (again.step_seconds, again.most.needed) == (each.step_seconds, each.most.needed), name_of(each)
    settings = settings_of(next(each for each in plans if each.model.has_eight_bits))
    assert settings["model"] == {"init_args": {"optimizer": {"init_args": {"state_dtype": "uint8"}}}}


def test_a_search_leaves_out_what_compiled_blocks_refuse() -> None:
    module = Qwen3MoePretraining(preset="30b-a3b")
    strategy = D9DStrategy(mesh=MeshConfig(data_parallel_replicate=-1), parallel=ParallelConfig(compile=True))
    model = rank_model(module, strategy, 4, rows=2, tokens=4096)
    plans = search(
        model, machine_of("h200"), costs_of_length(module, "bf16-true"), partial(layers_of, module, 48), most=40
    )
    kinds = {each.model.parallel.recompute for each in plans}
    assert {"3_of_4", "offload"} <= kinds
    assert not kinds & {"attention", "selective"}


def test_machines_say_what_is_not_measured(tmp_path: Path) -> None:
    measured = {name for name, table in shipped().items() if "copy_bytes" not in table.not_measured}
    assert measured == {"h100", "h200"}
    machine_of("h200").save(tmp_path / "own.json", "own")
    assert machine_of(str(tmp_path / "own.json")) == machine_of("h200")


def test_mistakes_are_named() -> None:
    with pytest.raises(ConfigError, match=r"gpu='h2000' is unknown; choose one of .*; did you mean 'h200'\?$"):
        machine_of("h2000")
    with pytest.raises(ConfigError, match=r"does not divide 7 ranks"):
        planned(7, data_parallel_replicate=8)
    with pytest.raises(ConfigError, match=r"expert_parallel=256 does not divide 128"):
        planned(256, data_parallel_replicate=256, expert_parallel=256)
    strategy = D9DStrategy(parallel=ParallelConfig(overlap_pairs=True), mesh=MeshConfig(data_parallel_replicate=8))
    with pytest.raises(ConfigError, match="overlap_pairs=True has no effect here: each rank has all experts"):
        plan(Qwen3MoePretraining(preset="tiny"), strategy, 8, rows=4, tokens=64)
