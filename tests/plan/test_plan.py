"""Plans of runs: sizes by hand, what does not fit, files, and mistakes."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path

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


def test_what_does_not_fit_is_said() -> None:
    found = planned(1)
    assert found.missing == found.most.needed - machine_of("h200").memory_bytes > 0
    assert f"DOES NOT FIT: pipeline rank 0 needs {found.most.needed / 2**30:.2f}" in str(found)


def test_files_have_the_plan(tmp_path: Path) -> None:
    found = planned(8, pipeline_parallel=2, data_parallel_replicate=4)
    read = json.loads(json.dumps(found.to_dict()))
    assert [each["allocated_bytes"] for each in read["ranks"]] == [each.peak.total for each in found.ranks]
    write_page(found, tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text()
    assert page.count("<svg") == 2
    assert "<script" not in page
    assert "http" not in page.replace("http-equiv", "")


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

    def of(mesh: MeshConfig, dtype: torch.dtype, recompute: str = "none") -> tuple[Qwen3MoePretraining, D9DStrategy]:
        module = Qwen3MoePretraining(preset="30b-a3b", optimizer=partial(StochasticAdamW, lr=1e-5, state_dtype=dtype))
        sync, parallel = GradSyncConfig(dtype="bfloat16"), ParallelConfig(recompute=recompute)
        return module, D9DStrategy(mesh=mesh, grad_sync=sync, parallel=parallel)

    module, strategy = of(MeshConfig(data_parallel_replicate=-1), torch.bfloat16)
    model = rank_model(module, strategy, 2, rows=4, tokens=4096, gpus_per_node=8)
    costs = costs_of_length(module, "bf16-true")
    plans = search(model, machine_of("h200"), costs, lambda stages: layers_of(module, 48, stages))
    assert {each.model.mesh.expert_parallel for each in plans} == {2}
    assert {each.model.dispatch for each in plans} == {"all_to_all", "peer"}
    assert {each.model.has_eight_bits for each in plans} == {False, True}
    assert len({each.model.parallel.recompute for each in plans}) > 3
    for each in plans:
        dtype = torch.uint8 if each.model.has_eight_bits else torch.bfloat16
        own = plan(*of(each.model.mesh, dtype, each.model.parallel.recompute), 2, "h200", rows=4, tokens=4096)
        assert (own.step_seconds, own.most.needed) == (each.step_seconds, each.most.needed), name_of(each)
    settings = settings_of(next(each for each in plans if each.model.has_eight_bits))
    assert settings["model"] == {"init_args": {"optimizer": {"init_args": {"state_dtype": "uint8"}}}}


def test_machines_say_what_is_not_measured(tmp_path: Path) -> None:
    measured = {name for name, table in shipped().items() if "copy_bytes" not in table.not_measured}
    assert measured == {"h100", "h200"}
    machine_of("h200").save(tmp_path / "own.json", "own")
    assert machine_of(str(tmp_path / "own.json")) == machine_of("h200")


def test_mistakes_are_named() -> None:
    with pytest.raises(ConfigError, match=r"gpu='h2000' is unknown; did you mean"):
        machine_of("h2000")
    with pytest.raises(ConfigError, match=r"does not divide 7 ranks"):
        planned(7, data_parallel_replicate=8)
    with pytest.raises(ConfigError, match=r"expert_parallel=256 does not divide 128"):
        planned(256, data_parallel_replicate=256, expert_parallel=256)
