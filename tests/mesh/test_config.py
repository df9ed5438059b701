"""Degrees that fit and degrees that do not."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest

from lightning_d9d import ConfigError
from lightning_d9d.mesh import MeshConfig
from lightning_d9d.mesh.groups import partition
from tests.mesh.fake_world import legal_meshes


def test_one_rank_is_the_default() -> None:
    assert MeshConfig().resolve(1) == MeshConfig()
    assert MeshConfig().world_size == 1


@pytest.mark.parametrize("field", ["data_parallel_replicate", "data_parallel_shard"])
def test_one_data_degree_takes_what_is_left(field: str) -> None:
    config = MeshConfig(pipeline_parallel=2, tensor_parallel=2, **{field: -1})
    assert config.resolve(24) == MeshConfig(pipeline_parallel=2, tensor_parallel=2, **{field: 6})
    assert config.resolve(24).world_size == 24
    assert config.resolve(4) == MeshConfig(pipeline_parallel=2, tensor_parallel=2)


def test_experts_reuse_the_ranks_of_a_stage() -> None:
    """Experts use the ranks of all other axes, also those of tensor parallelism."""
    config = MeshConfig(pipeline_parallel=2, data_parallel_shard=2, tensor_parallel=4, expert_parallel=8)
    assert config.resolve(16).domains()["expert"] == {"pp": 2, "ep_replicate": 1, "ep_shard": 8}


def test_domains_and_the_order_of_their_axes() -> None:
    config = MeshConfig(
        pipeline_parallel=2,
        data_parallel_replicate=3,
        data_parallel_shard=5,
        context_parallel_shard=7,
        context_parallel_replicate=11,
        tensor_parallel=13,
        expert_parallel=35,
    )
    domains = {domain: list(shape.items()) for domain, shape in config.domains().items()}
    assert domains == {
        "regular": [("pp", 2), ("dp_replicate", 3), ("dp_shard", 5), ("cp_shard", 7), ("cp_replicate", 11), ("tp", 13)],
        "dense": [("pp", 2), ("dp_replicate", 3), ("dp_cp_shard", 35), ("cp_replicate", 11), ("tp", 13)],
        "expert": [("pp", 2), ("ep_replicate", 429), ("ep_shard", 35)],
        "batch": [("pp", 2), ("dp", 15), ("cp", 77), ("tp", 13)],
        "flat": [("world", 30030)],
    }


def test_degrees_resolve_where_they_multiply_to_the_world_and_nowhere_else() -> None:
    fields = ["pipeline_parallel", "data_parallel_replicate", "data_parallel_shard", "tensor_parallel"]
    for degrees in product([1, 2, 3], repeat=4):
        config = MeshConfig(**dict(zip(fields, degrees, strict=True)))
        for world_size in range(1, 20):
            if world_size == math.prod(degrees):
                assert config.resolve(world_size) == config
            else:
                with pytest.raises(ConfigError, match=f"{world_size}"):
                    config.resolve(world_size)


def test_experts_are_spread_over_whole_stages_whatever_the_other_axes_are() -> None:
    """None of all 24 ranks is left out. A copy that is fully sharded lies within one replica."""
    num_meshes = 0
    for config in legal_meshes(24):
        regular, expert, weights = config.domains()["regular"], config.domains()["expert"], config.expert_weights()
        assert config.resolve(24) == config
        stages = partition(regular, [axis for axis in regular if axis != "pp"])
        assert partition(expert, ["ep_replicate", "ep_shard"]) == stages
        assert partition(weights, ["ep_dp_replicate", "ep_fsdp", "ep_shard"]) == stages
        assert partition(weights, ["ep_shard"]) == partition(expert, ["ep_shard"])
        assert partition(weights, ["ep_dp_replicate", "ep_fsdp"]) == partition(expert, ["ep_replicate"])
        replicas = {frozenset(ranks) for ranks in partition(regular, [*regular][2:])}
        copies = {frozenset(ranks) for ranks in partition(weights, ["ep_fsdp", "ep_shard"])}
        if weights["ep_fsdp"] > 1:
            assert copies == replicas
        elif config.data_parallel_shard * config.context_parallel_shard > 1:
            assert not all(any(copy < replica for replica in replicas) for copy in copies)
        num_meshes += 1
    assert num_meshes > 1000


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        ({"tensor_parallel": 0}, r"MeshConfig\.tensor_parallel=0 must be at least 1$"),
        ({"pipeline_parallel": -1}, r"MeshConfig\.pipeline_parallel=-1 must be at least 1$"),
        ({"expert_parallel": -1}, r"MeshConfig\.expert_parallel=-1 must be at least 1$"),
        ({"data_parallel_shard": -2}, r"MeshConfig\.data_parallel_shard=-2 must be at least 1, or -1 for all ranks"),
        ({"data_parallel_shard": 2.0}, r"MeshConfig\.data_parallel_shard=2\.0 must be an integer"),
        ({"tensor_parallel": True}, r"MeshConfig\.tensor_parallel=True must be an integer"),
        ({"context_parallel_shard": "2"}, r"MeshConfig\.context_parallel_shard='2' must be an integer"),
        ({"data_parallel_replicate": -1, "data_parallel_shard": -1}, "are both -1.*set the other to 1 or more"),
    ],
    ids=str,
)
def test_impossible_degrees_are_refused_at_once(degrees: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MeshConfig(**degrees)


@pytest.mark.parametrize(
    ("degrees", "world_size", "message"),
    [
        ({"pipeline_parallel": 5}, 24, r"pipeline_parallel=5 does not divide 24 ranks: the nearest .* 4 and 6$"),
        ({"pipeline_parallel": 16}, 8, r"pipeline_parallel=16 does not divide 8 ranks: at most 8 fits$"),
        (
            {"pipeline_parallel": 2, "tensor_parallel": 2, "data_parallel_shard": 5},
            24,
            "data_parallel_shard=5 does not divide 24 ranks, of which pipeline_parallel=2 x tensor_parallel=2 leave 6: "
            "the nearest that fit are 3 and 6, or -1 for all ranks that are left",
        ),
        (
            {"tensor_parallel": 2, "data_parallel_replicate": 2},
            24,
            r"asks for 4 of 24 ranks \(tensor_parallel=2 x data_parallel_replicate=2\): set data_parallel_replicate "
            "to 12 instead of 2, or to -1",
        ),
        ({}, 4, r"asks for 1 of 4 ranks \(all degrees are 1\): set data_parallel_replicate to 4 instead of 1"),
        (
            {"pipeline_parallel": 2, "data_parallel_replicate": -1, "expert_parallel": 4},
            12,
            r"expert_parallel=4 must divide the 6 ranks of a pipeline stage \(12 ranks / pipeline_parallel=2\): "
            "the nearest that fit are 3 and 6$",
        ),
        ({"data_parallel_shard": -1, "expert_parallel": 16}, 8, r"expert_parallel=16 must divide .*: at most 8 fits$"),
        ({"data_parallel_shard": -1}, 0, "world_size=0 must be at least 1"),
    ],
    ids=str,
)
def test_degrees_that_do_not_fit_name_the_field_and_its_neighbours(
    degrees: dict[str, int], world_size: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        MeshConfig(**degrees).resolve(world_size)
