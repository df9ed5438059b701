"""Ten steps of each optimizer that settings may name, on meshes and in one process; eight bits have their own file."""

from __future__ import annotations

from functools import partial

import pytest
from torch import Tensor
from torch.optim import SGD, Adam, AdamW

from lightning_d9d import MeshConfig
from lightning_d9d.optim import AccumAdam, AccumAdamW, MuonAdamW, OptimizerSettings
from lightning_d9d.optim.settings import NamedParameters
from tests.harness.compare import assert_tensors_close
from tests.harness.ranks import RankContext
from tests.harness.tolerances import Tolerance
from tests.meshes.equality import EPS, LEARNING_RATE, SMALL, WEIGHT_DECAY
from tests.meshes.test_optimizers import built, fitted, train_step

STEPS = 4
WORDS = ["model.embed_tokens.weight"], ["lm_head.weight"]
OPTIMIZERS = {
    "AdamW": partial(AdamW, lr=LEARNING_RATE, eps=EPS, weight_decay=WEIGHT_DECAY),
    "Adam": partial(Adam, lr=LEARNING_RATE, eps=EPS),
    "SGD": partial(SGD, lr=LEARNING_RATE, momentum=0.9),
    "AccumAdam": partial(AccumAdam, lr=LEARNING_RATE, eps=EPS, weight_decay=WEIGHT_DECAY, accum_iter=3),
    "AccumAdamW": partial(AccumAdamW, lr=LEARNING_RATE, eps=EPS, weight_decay=WEIGHT_DECAY, accum_iter=2),
    "MuonAdamW": partial(MuonAdamW, lr=LEARNING_RATE, eps=EPS, weight_decay=WEIGHT_DECAY),
}
MESHES = {
    "pp2": MeshConfig(pipeline_parallel=2),
    "tp2": MeshConfig(tensor_parallel=2),
    "shard4": MeshConfig(data_parallel_shard=4),
    "rep2-shard2": MeshConfig(data_parallel_replicate=2, data_parallel_shard=2),
    "rep4-ep4": MeshConfig(data_parallel_replicate=4, expert_parallel=4),
}
FAST = {("pp2", "SGD"), ("tp2", "Adam"), ("tp2", "AccumAdamW")}


def on_one_process(name: str) -> dict[str, Tensor]:
    """Train in one process, with the groups of the settings."""
    model = built(SMALL)
    named = dict(model.named_parameters())
    optimizer = OptimizerSettings(OPTIMIZERS[name]).make_optimizer(NamedParameters(named, list(named), *WORDS))
    for step in range(STEPS):
        train_step(model, optimizer, step)
    return {name: parameter.detach() for name, parameter in named.items()}


def cases() -> list:
    """Few in CI, where other files have shorter runs of most, and `test_muon.py` has Muon's."""
    marks = {True: (), False: (pytest.mark.meshes,)}
    return [
        pytest.param(
            *(mesh, name),
            id=f"{mesh}-{name}",
            marks=[pytest.mark.ranks(degrees.world_size), *marks[(mesh, name) in FAST]],
        )
        for mesh, degrees in MESHES.items()
        for name in OPTIMIZERS
    ]


@pytest.mark.parametrize(("mesh", "name"), cases())
def test_several_steps_are_those_of_one_process(rank: RankContext, mesh: str, name: str) -> None:
    expected = rank.from_first_rank(on_one_process, name)
    weights = fitted(rank, MESHES[mesh], OptimizerSettings(OPTIMIZERS[name]), SMALL, STEPS)
    assert_tensors_close(weights, {each: expected[each] for each in weights}, tolerance=Tolerance(relative=1e-9))
    assert set().union(*rank.all_gather_object(set(weights))) == expected.keys()
