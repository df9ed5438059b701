"""Muon in one process: singular values, stacks, scale, momentum, AdamW for the rest."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from lightning_d9d.errors import ConfigError
from lightning_d9d.optim import MuonAdamW
from lightning_d9d.optim.muon import orthogonalized
from tests.harness.compare import assert_bitwise_equal, assert_close_named
from tests.harness.tolerances import Tolerance


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def with_gradient(weight: Tensor, gradient: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(weight.clone())
    parameter.grad = gradient.clone()
    return parameter


@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4), (1, 5)])
def test_singular_values_come_near_to_one(shape: tuple[int, int]) -> None:
    before = drawn(*shape)
    after = orthogonalized(before)
    u, _, v = torch.linalg.svd(before, full_matrices=False)
    in_its_basis = u.mT @ after @ v.mT
    values = in_its_basis.diagonal()
    assert (in_its_basis - values.diag()).abs().max() < 1e-12  # singular vectors stay
    assert values.min() > 0.65
    assert values.max() < 1.25


def test_zeros_stay() -> None:
    assert_bitwise_equal("zeros", orthogonalized(torch.zeros(2, 3)), torch.zeros(2, 3))


def test_two_steps_are_what_the_rule_says() -> None:
    weight, gradients = drawn(4, 6), [drawn(4, 6, seed=seed) for seed in (1, 2)]
    parameter = with_gradient(weight, gradients[0])
    optimizer = MuonAdamW([parameter], lr=0.1, weight_decay=0.5, momentum=0.9)
    optimizer.step()
    parameter.grad = gradients[1].clone()
    optimizer.step()
    average, expected = torch.zeros(4, 6, dtype=torch.float64), weight
    for gradient in gradients:
        average = 0.9 * average + gradient
        direction = orthogonalized(gradient + 0.9 * average)
        expected = expected * (1 - 0.1 * 0.5) - 0.1 * 0.2 * math.sqrt(6) * direction
    assert_close_named("weight", parameter.detach(), expected, tolerance=Tolerance(relative=1e-12))
    assert list(optimizer.state[parameter]) == ["momentum"]


def test_stacks_are_matrices_each_by_itself_and_so_are_parts() -> None:
    """Experts of gate and up: two experts, each with two matrices of 3 rows."""
    weight, gradient = drawn(2, 6, 4), drawn(2, 6, 4, seed=1)
    together = with_gradient(weight, gradient)
    MuonAdamW([together], lr=0.1, num_parts=2).step()
    for expert in range(2):
        for part in range(2):
            rows = slice(3 * part, 3 * part + 3)
            alone = with_gradient(weight[expert, rows], gradient[expert, rows])
            MuonAdamW([alone], lr=0.1).step()
            theirs = together.detach()[expert, rows]
            assert_close_named("part", theirs, alone.detach(), tolerance=Tolerance(relative=1e-12))


def test_iterations_of_float32_are_in_bfloat16() -> None:
    weight, gradient = drawn(4, 6, dtype=torch.float32), drawn(4, 6, seed=1, dtype=torch.float32)
    parameter = with_gradient(weight, gradient)
    MuonAdamW([parameter], lr=1.0, weight_decay=0.0, momentum=0.0).step()
    direction = orthogonalized(gradient.bfloat16())
    expected = weight - direction.float() * (0.2 * math.sqrt(6))
    assert_close_named("weight", parameter.detach(), expected, tolerance=Tolerance(relative=1e-6))


def test_updates_are_as_large_as_those_of_adamw() -> None:
    """So its learning rate carries over; a first step of AdamW changes each element by the learning rate."""
    parameter = with_gradient(torch.zeros(64, 96, dtype=torch.float64), drawn(64, 96))
    MuonAdamW([parameter], lr=1e-3).step()
    root_mean_square = parameter.detach().square().mean().sqrt()
    assert 0.15e-3 < root_mean_square < 0.25e-3  # 0.2, as AdamW's later steps have it


def test_the_rest_is_adamw() -> None:
    shapes = [(5,), (3, 4)]
    ours, theirs = ([nn.Parameter(drawn(*shape)) for shape in shapes] for _ in range(2))
    settings: dict[str, Any] = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.3}
    one = MuonAdamW([{"params": ours[:1]}, {"params": ours[1:], "matrices": False}], **settings)
    other = AdamW(theirs, **settings)
    for step in range(3):
        for mine, its, shape in zip(ours, theirs, shapes, strict=True):
            mine.grad, its.grad = drawn(*shape, seed=step), drawn(*shape, seed=step)
        one.step()
        other.step()
    for mine, its in zip(ours, theirs, strict=True):
        assert_close_named("weight", mine.detach(), its.detach(), tolerance=Tolerance(relative=1e-12))


def test_a_state_is_loaded() -> None:
    def fresh() -> tuple[nn.Parameter, nn.Parameter, MuonAdamW]:
        matrix, vector = with_gradient(drawn(3, 4), drawn(3, 4, seed=1)), with_gradient(drawn(4), drawn(4, seed=1))
        return matrix, vector, MuonAdamW([matrix, vector])

    *expected, through = fresh()
    through.step()
    *actual, resumed = fresh()
    for mine, its in zip(actual, expected, strict=True):
        mine.data.copy_(its.data)
    resumed.load_state_dict(copy.deepcopy(through.state_dict()))  # else they would share tensors
    through.step()
    resumed.step()
    for mine, its in zip(actual, expected, strict=True):
        assert_bitwise_equal("weight", mine.detach(), its.detach())


@pytest.mark.parametrize(
    ("shape", "dtype", "settings", "message"),
    [
        ((2, 2), torch.bfloat16, {}, r"a parameter of shape \[2, 2\] is torch.bfloat16.*bf16-mixed.*StochasticAdamW"),
        ((3, 2), torch.float32, {"num_parts": 2}, r"num_parts=2 does not divide the 3 rows .* \[3, 2\]"),
        ((2, 2), torch.float32, {"num_parts": 0}, "num_parts=0 must be 1 or more"),
        ((2, 2), torch.float32, {"momentum": 1.0}, "momentum=1.0 must be from 0 to below 1"),
        ((2, 2), torch.float32, {"lr": -1.0}, "lr=-1.0 must be 0 or more"),
    ],
)
def test_what_cannot_be(shape: tuple[int, ...], dtype: torch.dtype, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"MuonAdamW: {message}"):
        MuonAdamW([nn.Parameter(torch.zeros(shape, dtype=dtype))], **settings)
