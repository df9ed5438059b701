"""The most that a step allocates, by arithmetic, against meta tensors and what was measured."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from lightning_d9d.memory.peak import PeakBytes
from lightning_d9d.memory.rank import RankModel
from lightning_d9d.memory.spread import weights_of
from lightning_d9d.mesh import MeshConfig
from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM
from lightning_d9d.models.qwen3_moe.costs import model_costs
from lightning_d9d.models.qwen3_moe.model import layers_of_stages
from lightning_d9d.parallel import ParallelConfig, recompute_activations
from lightning_d9d.schedule import OneForwardOneBackward
from tests.memory.traced import traced

SPARSE = dataclasses.replace(Qwen3MoeConfig.preset("30b-a3b"), num_hidden_layers=2)
DENSE = dataclasses.replace(Qwen3MoeConfig.preset("8b"), num_hidden_layers=2)
SHARED = dataclasses.replace(SPARSE, mlp_only_layers=(1,))


def model_of(config: Qwen3MoeConfig) -> Qwen3MoeForCausalLM:
    with torch.device("meta"):
        return Qwen3MoeForCausalLM(config).bfloat16()


def planned(config: Qwen3MoeConfig, rows: int, tokens: int, recompute: str = "none", **values: Any) -> RankModel:
    mesh = values.pop("mesh", MeshConfig())
    return RankModel(
        weights=weights_of(model_of(config)),
        costs=model_costs(config, tokens),
        tokens=tokens,
        mesh=mesh,
        schedule=values.pop("schedule", OneForwardOneBackward()),
        layers_of_stages=tuple(layers_of_stages(config, mesh.pipeline_parallel)),
        rows=rows,
        num_microbatches=values.pop("num_microbatches", 1),
        parallel=ParallelConfig(recompute=recompute),
        **values,
    )


@pytest.mark.parametrize("recompute", ["none", "selective", "attention", "every_2", "full"])
@pytest.mark.parametrize("config", [SPARSE, DENSE, SHARED], ids=["sparse", "dense", "both"])
def test_one_rank_is_that_of_meta_tensors(
    config: Qwen3MoeConfig, recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits are not among them, as the loss is one operator; nor are weights, states and workspaces."""
    rows, tokens = 2, 4096
    monkeypatch.setattr("lightning_d9d.memory.rank.tokens_at_once", lambda *sizes: 0)
    model = model_of(config)
    recompute_activations(model, ParallelConfig(recompute=recompute))
    _, most = traced(model, rows, tokens)
    found = planned(config, rows, tokens, recompute).peak(0)
    assert most == pytest.approx(found.total - found.weights - found.states - found.constant, rel=0.01)


GIB = 2**30


@pytest.mark.parametrize(
    ("layers", "rows", "tokens", "measured"),
    [(8, 4, 4096, 47.33), (4, 1, 32768, 33.79)],
)
def test_what_was_measured_on_one_gpu(layers: int, rows: int, tokens: int, measured: float) -> None:
    """The tables of docs/explanation/one-gpu-step.md."""
    config = dataclasses.replace(SPARSE, num_hidden_layers=layers)
    assert planned(config, rows, tokens).peak(0).total / GIB == pytest.approx(measured, rel=0.02)


def test_what_was_measured_on_two_gpus() -> None:
    """`fsdp` of the table of `parallel` in docs/reference/benchmarks.md: five layers, 8192 ids."""
    config = dataclasses.replace(SPARSE, num_hidden_layers=5, vocab_size=8192)
    found = planned(config, 4, 4096, mesh=MeshConfig(data_parallel_shard=2)).peak(0)
    assert found.total / GIB == pytest.approx(24.27, rel=0.03)


def test_peak_of_nothing_is_what_lies_there() -> None:
    assert PeakBytes(weights=3, states=4, constant=0).total == 7
