"""The stages of a rank as tensors, against the plan of the same rank: a fit and a plan say the same."""

from __future__ import annotations

import pytest
import torch

from lightning_d9d.memory import StagesHeld, stage_held
from lightning_d9d.memory.layers import Microbatch
from lightning_d9d.memory.rank import RankModel
from lightning_d9d.memory.spread import weights_of
from lightning_d9d.mesh import MeshDomains
from lightning_d9d.models.qwen3_moe import Qwen3MoeForCausalLM
from lightning_d9d.models.qwen3_moe.costs import model_costs
from lightning_d9d.models.qwen3_moe.model import layers_of_stages
from lightning_d9d.parallel import ParallelConfig
from lightning_d9d.schedule import OneForwardOneBackward
from tests.mesh.fake_world import fake_world
from tests.parallel.meta import meta_stages
from tests.parallel.test_account import CASES, MODEL

ROWS, TOKENS = 2, 4096


@pytest.mark.parametrize("name", ["tensor and shards", "experts within a replica", "tensor and copies of context"])
def test_a_rank_takes_what_its_plan_says(name: str) -> None:
    mesh = CASES[name].mesh
    with torch.device("meta"):
        weights = weights_of(Qwen3MoeForCausalLM(MODEL).bfloat16())
    number = 2 * mesh.pipeline_parallel
    layers = tuple(layers_of_stages(MODEL, mesh.pipeline_parallel))
    model = RankModel(
        weights=weights,
        costs=model_costs(MODEL, TOKENS),
        tokens=TOKENS,
        mesh=mesh,
        schedule=OneForwardOneBackward(),
        layers_of_stages=layers,
        rows=ROWS,
        num_microbatches=number,
        parallel=ParallelConfig(recompute="every_2"),
    )
    planned = model.peak(0)
    with fake_world(0, mesh.world_size):
        domains = MeshDomains.build(mesh, "cpu")
        (stage,) = meta_stages(MODEL, domains)
        stage = stage.bfloat16()
        held = stage_held(
            stage,
            layers[0],
            mesh.world_size // mesh.pipeline_parallel,
            is_first=True,
            is_last=mesh.pipeline_parallel == 1,
        )
    assert held is not None
    chunks = mesh.context_parallel_shard * mesh.context_parallel_replicate
    found = StagesHeld(
        microbatch=Microbatch(
            costs=model_costs(MODEL, TOKENS // chunks),  # attention is not in memory
            tokens=TOKENS // chunks,
            rows=1 / mesh.tensor_parallel,
            tensor_parallel=mesh.tensor_parallel,
            expert_parallel=mesh.expert_parallel,
        ),
        stages={0: held},
        actions=model.actions(0),
        rules=model.rules([]),
        keeps_gathered=model.keeps_gathered,
    ).peak("every_2", ROWS, weights=planned.weights, states=planned.states, constant=planned.constant)
    assert found is not None
    assert found.total == pytest.approx(planned.total, rel=1e-3)
    assert found.gathered == pytest.approx(planned.gathered, rel=1e-3)


def test_blocks_that_are_not_the_layers() -> None:
    with torch.device("meta"):
        stage = Qwen3MoeForCausalLM(MODEL)
    assert stage_held(stage, range(3), 1, is_first=True, is_last=True) is None
