"""Adapters on kernels (Triton's interpreter without a GPU), with what runs a forward twice or a backward in halves.

The truth is the same step in float64, which torch's products and separate adapters compute.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import NamedTuple

import lightning as L
import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from lightning_d9d import D9DStrategy, MeshConfig, ParallelConfig
from lightning_d9d.models.qwen3_moe import Qwen3MoeForCausalLM
from lightning_d9d.ops import defer
from lightning_d9d.ops.backend import using_kernels
from lightning_d9d.ops.weight_gradients import WeightGradients
from lightning_d9d.parallel import recompute_activations
from lightning_d9d.peft import LoRA, inject, trainable_parameters
from lightning_d9d.sync.norm import gradient_norm
from tests.harness.compare import assert_close_named, assert_tensors_close
from tests.harness.ranks import RankContext
from tests.harness.tolerances import Kind, Tolerance
from tests.meshes.cases import LAYERS
from tests.meshes.equality import CONFIG, Steps, on_mesh, on_one_process
from tests.ops.grid import DEVICES
from tests.parallel.test_compiling import compiler
from tests.peft.test_inject import with_values

SMALL = dataclasses.replace(CONFIG, num_hidden_layers=2)
METHOD = LoRA(rank=4, alpha=6, rank_of_experts=3)
IDS = torch.arange(42).view(2, 21) * 5 % CONFIG.vocab_size
TINY = dataclasses.replace(SMALL, num_hidden_layers=1, num_experts=4)
"""A model for ranks, small because the interpreter runs every program of a kernel separately."""
TWO_STEPS = Tolerance(relative=5e-5)
"""The tolerance of two steps in float32."""


class Step(NamedTuple):
    loss: Tensor
    gradients: dict[str, Tensor | None]
    norm: Tensor


def model_of() -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(SMALL)
    inject(model, METHOD)
    return with_values(model)


def step_of(model: Qwen3MoeForCausalLM, device: str, *, split: bool = False) -> Step:
    model.to(device)
    ids, gradients = IDS.to(device), WeightGradients()
    with defer(gradients if split else None):
        loss = model(ids[:, :-1], ids[:, 1:], reduction="sum").loss / 40
    if split:
        gradients.backward(loss)
        gradients.accumulate()
    else:
        loss.backward()
    named = {name: parameter.grad for name, parameter in trainable_parameters(model).items()}
    return Step(loss.detach(), named, gradient_norm(model.parameters()))


def compare(actual: Step, expected: Step) -> None:
    assert all(gradient is not None and gradient.any() for gradient in actual.gradients.values())
    assert_close_named("loss", actual.loss, expected.loss, kind=Kind.LOSS)
    assert_tensors_close(actual.gradients, expected.gradients)
    assert_close_named("norm", actual.norm, expected.norm)


@DEVICES
@pytest.mark.parametrize("kind", ["none", "full", "selective", "every_2"])
def test_recomputed(kind: str, device: str) -> None:
    model = model_of()
    expected = step_of(copy.deepcopy(model).double(), device)
    recompute_activations(model.model, ParallelConfig(recompute=kind))
    with using_kernels("triton"):
        compare(step_of(model, device), expected)


@DEVICES
@pytest.mark.parametrize("kind", ["none", "full"])
def test_split_backward(kind: str, device: str) -> None:
    model = model_of()
    expected = step_of(copy.deepcopy(model).double(), device)
    recompute_activations(model.model, ParallelConfig(recompute=kind))
    with using_kernels("triton"):
        compare(step_of(model, device, split=True), expected)


def of_one_process() -> Steps:
    L.seed_everything(1, verbose=False)
    return on_one_process(TINY, steps=2, peft=METHOD)


def compare_steps(actual: Steps, expected: Steps, tolerance: Tolerance) -> None:
    for index, gradients in enumerate(actual.gradients):
        assert_tensors_close(gradients, {n: expected.gradients[index][n] for n in gradients}, tolerance=tolerance)
        assert_close_named(f"norm {index}", actual.norms[index], expected.norms[index], tolerance=tolerance)
        assert_close_named(f"loss {index}", actual.losses[index], expected.losses[index], tolerance=tolerance)


@pytest.mark.ranks(2)
def test_experts_over_ranks(rank: RankContext) -> None:
    expected = rank.from_first_rank(of_one_process)
    L.seed_everything(1, verbose=False)
    strategy = D9DStrategy(
        mesh=MeshConfig(data_parallel_replicate=2, expert_parallel=2),
        parallel=ParallelConfig(kernels="triton", recompute="full"),
    )
    actual = on_mesh(rank, strategy, TINY, steps=2, peft=METHOD, precision="32-true")
    compare_steps(actual, expected, TWO_STEPS)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param({"data_parallel_shard": 2}, marks=pytest.mark.meshes),
        pytest.param({"tensor_parallel": 2}, marks=pytest.mark.meshes),
        {"data_parallel_replicate": 2, "expert_parallel": 2},
    ],
    ids=str,
)
def test_compiled_blocks_on_ranks(rank: RankContext, mesh: dict[str, int]) -> None:
    runs = []
    with compiler(whole="expert_parallel" not in mesh):  # there experts run uncompiled
        for compiles in (False, True):
            L.seed_everything(1, verbose=False)
            strategy = D9DStrategy(mesh=MeshConfig(**mesh), parallel=ParallelConfig(compile=compiles))
            runs.append(on_mesh(rank, strategy, TINY, steps=2, peft=LAYERS))
        assert counters["stats"]["unique_graphs"] >= 1
    compare_steps(runs[1], runs[0], Tolerance(relative=1e-9))
