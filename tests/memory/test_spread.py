"""What ranks hold, by arithmetic, against the tensors that each rank of a mesh has."""

from __future__ import annotations

import dataclasses
import functools
import math

import pytest
import torch

from lightning_d9d.memory.spread import ModelWeights, Spread, weights_of
from lightning_d9d.mesh import MeshDomains
from lightning_d9d.mesh.sharding import local
from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM
from lightning_d9d.models.qwen3_moe.model import layers_of_stages
from lightning_d9d.parallel.data import num_shards
from lightning_d9d.parallel.fsdp import fully_sharded
from tests.mesh.fake_world import fake_world
from tests.parallel.meta import meta_stages
from tests.parallel.test_account import CASES, MODEL


@functools.cache
def weights(config: Qwen3MoeConfig) -> ModelWeights:
    with torch.device("meta"):
        return weights_of(Qwen3MoeForCausalLM(config).bfloat16())


MODELS = {
    "sparse": MODEL,
    "tied": dataclasses.replace(Qwen3MoeConfig.preset("0.6b"), num_hidden_layers=16),
    "mixed": dataclasses.replace(
        MODEL, mlp_only_layers=(0, 3), shared_expert_intermediate_size=96, attention_bias=True
    ),
}


SOME = ("tensor and shards", "experts within a replica", "tensor and copies of context")


@pytest.mark.parametrize(
    ("model", "name"),
    [("sparse", name) for name in CASES] + [(model, name) for model in ("tied", "mixed") for name in SOME],
)
def test_shares_are_those_of_the_tensors_of_a_rank(model: str, name: str) -> None:
    mesh, config = CASES[name].mesh, MODELS[model]
    if config.num_experts == 0:
        mesh = dataclasses.replace(mesh, expert_parallel=1)
    spread, pp = Spread(mesh), mesh.pipeline_parallel
    for rank in (0, mesh.world_size - 1):
        with fake_world(rank, mesh.world_size):
            domains = MeshDomains.build(mesh, "cpu")
            (stage,) = meta_stages(config, domains)
            units = fully_sharded(stage)
            held = [(tuple(local(p).shape), num_shards(p), p in units) for p in stage.parameters()]
            places = {axis: domains.coordinates[axis] for axis in ("dp_cp_shard", "pp")}
            of_experts = domains.expert_weights.get_local_rank("ep_fsdp") if mesh.world_size > pp else 0
        index = places["pp"]
        layers = layers_of_stages(config, pp)[index]
        own = weights(config).of_stage(layers, is_first=index == 0, is_last=index == pp - 1)
        shares = spread.shares(own)
        computed = []
        for share in shares:
            is_apart = share.weight.cut == "expert ranks" and spread.experts_are_apart()
            shape = share.of_rank(of_experts if is_apart else places["dp_cp_shard"])
            computed.append((shape, share.num_shards, share.is_unit))
        assert sorted(map(_plain, computed)) == sorted(map(_plain, held))


def _plain(entry: tuple[tuple[int, ...], int, bool]) -> tuple[int, int, bool]:
    """Shapes without elements differ in their other dims, which nobody holds."""
    shape, shards, is_unit = entry
    return math.prod(shape), shards, is_unit
