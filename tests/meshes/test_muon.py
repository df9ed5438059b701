"""Muon on meshes equals one process, whichever ranks hold parts of matrices, and resumes on another mesh."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from lightning_d9d import MeshConfig
from lightning_d9d.optim import MuonAdamW, OptimizerSettings
from tests.harness.compare import assert_tensors_close
from tests.harness.ranks import RankContext
from tests.harness.tolerances import Tolerance
from tests.meshes.equality import EPS, LEARNING_RATE, SMALL, WEIGHT_DECAY
from tests.meshes.test_optimizers import built, fitted, train_step

STEPS = 4
HYPERPARAMETERS = {"lr": LEARNING_RATE, "eps": EPS, "weight_decay": WEIGHT_DECAY}
MUON = OptimizerSettings(partial(MuonAdamW, **HYPERPARAMETERS))  # type: ignore[arg-type]
MESHES: dict[str, MeshConfig] = {
    "pp2": MeshConfig(pipeline_parallel=2),
    "tp2": MeshConfig(tensor_parallel=2),
    "shard4": MeshConfig(data_parallel_shard=4),
    "rep2-shard2": MeshConfig(data_parallel_replicate=2, data_parallel_shard=2),
    "rep4-ep4": MeshConfig(data_parallel_replicate=4, expert_parallel=4),
    "shard2-tp2": MeshConfig(data_parallel_shard=2, tensor_parallel=2),
}
SPARSE = {"rep2-shard2", "shard2-tp2"}


def on_one_process() -> dict[str, Tensor]:
    """Train in one process, with groups made by hand."""
    model = built(SMALL)
    words = {"model.embed_tokens.weight", "lm_head.weight"}
    groups: dict[tuple[bool, bool, int], list[torch.nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        decays = parameter.ndim >= 2 and name != "model.embed_tokens.weight"
        parts = 2 if name.endswith("gate_up_proj") else 1
        groups.setdefault((decays, name not in words, parts), []).append(parameter)
    optimizer = MuonAdamW(
        [
            {"params": parameters, "matrices": None if matrices else False, "num_parts": parts}
            | ({} if decays else {"weight_decay": 0.0})
            for (decays, matrices, parts), parameters in groups.items()
        ],
        **HYPERPARAMETERS,
    )
    for step in range(STEPS):
        train_step(model, optimizer, step)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def meshes() -> list:
    marks = {True: (pytest.mark.meshes,), False: ()}
    return [
        pytest.param(
            name, id=name, marks=[pytest.mark.ranks(2 if name in ("pp2", "tp2") else 4), *marks[name in SPARSE]]
        )
        for name in MESHES
    ]


@pytest.mark.parametrize("name", meshes())
def test_a_mesh_trains_as_one_process_does(rank: RankContext, name: str) -> None:
    expected = rank.from_first_rank(on_one_process)
    weights = fitted(rank, MESHES[name], MUON, SMALL, STEPS)
    assert_tensors_close(weights, {each: expected[each] for each in weights}, tolerance=Tolerance(relative=1e-9))
    held = rank.all_gather_object(set(weights))
    assert set().union(*held) == expected.keys()


@pytest.mark.ranks(2)
def test_a_checkpoint_goes_on_on_another_mesh(rank: RankContext) -> None:
    expected, saved = rank.from_first_rank(on_one_process), str(rank.tmp_dir / "saved")
    fitted(rank, MeshConfig(data_parallel_shard=2), MUON, SMALL, STEPS, save_to=saved)
    weights = fitted(rank, MESHES["tp2"], MUON, SMALL, STEPS, load_from=saved)
    assert_tensors_close(weights, {each: expected[each] for each in weights}, tolerance=Tolerance(relative=1e-9))
