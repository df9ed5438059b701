"""Muon's passes over memory: what the rule says, in the reference and in the kernels."""

from __future__ import annotations

import pytest
import torch

from lightning_d9d.ops import round_stochastic_
from lightning_d9d.ops.backend import using_kernels
from lightning_d9d.ops.momentum import descend_, momentum_direction_, scale_
from tests.harness.compare import assert_bitwise_equal
from tests.ops.grid import DEVICES, laid_out

SHAPES = [(1,), (3, 7), (2, 33, 65), (4096,)]


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_the_direction_is_nesterovs() -> None:
    average, gradient = drawn(4, 6, seed=0).double(), drawn(4, 6, seed=1).double()
    before = average.clone()
    direction = momentum_direction_(average, gradient, 0.9, torch.float64)
    assert_bitwise_equal("average", average, 0.9 * before + gradient)
    assert_bitwise_equal("direction", direction, 0.9 * (0.9 * before + gradient) + gradient)


@DEVICES
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced"])
@pytest.mark.parametrize("shape", SHAPES)
def test_momentum_of_the_kernel_equals_the_reference(shape: tuple[int, ...], layout: str, device: str) -> None:
    narrow = torch.bfloat16 if device == "cuda" else torch.float16  # the interpreter has no bfloat16
    for dtype, out in [(torch.float32, torch.float32), (narrow, narrow)]:
        average, gradient = drawn(*shape, seed=0), laid_out(drawn(*shape, seed=1).to(dtype), layout)
        expected_average = average.clone()
        with using_kernels("torch"):
            expected = momentum_direction_(expected_average, gradient, 0.95, out)
        average = average.to(device)
        with using_kernels("triton"):
            direction = momentum_direction_(average, gradient.to(device), 0.95, out)
        assert_bitwise_equal("average", average, expected_average)
        assert_bitwise_equal("direction", direction, expected)


@DEVICES
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 7), (2, 48, 64), (4, 0, 3)])
def test_each_matrix_is_multiplied_by_its_own_number(shape: tuple[int, int, int], device: str) -> None:
    narrow = torch.bfloat16 if device == "cuda" else torch.float16  # the interpreter has no bfloat16
    factors = drawn(shape[0], seed=1)
    for dtype in (torch.float32, narrow):
        matrices = drawn(*shape, seed=0).to(dtype)
        expected = torch.stack(
            [(each.float() * factor).to(dtype) for each, factor in zip(matrices, factors, strict=True)]
        )
        for kernels in ("torch", "triton"):
            scaled = matrices.to(device, copy=True)
            with using_kernels(kernels):
                scale_(scaled, factors.to(device))
            assert_bitwise_equal(kernels, scaled, expected)


@DEVICES
@pytest.mark.parametrize("is_tensor", [False, True])
@pytest.mark.parametrize("offset", [0, 3, 2**33 + 5])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_step_is_rounded_as_round_stochastic_does(
    shape: tuple[int, ...], offset: int, is_tensor: bool, device: str
) -> None:
    weight = drawn(*shape, seed=0).to(torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float32):
        direction = drawn(*shape, seed=1).to(dtype)
        values = weight.float() * 0.875 - direction.float() * 0.25
        expected = round_stochastic_(torch.empty_like(weight), values, 2**40 + 3, offset)
        keep, size = (torch.tensor(each, device=device) if is_tensor else each for each in (0.875, 0.25))
        for kernels in ("torch", "triton"):
            moved = weight.to(device, copy=True)
            with using_kernels(kernels):
                descend_(moved, direction.to(device), keep, size, 2**40 + 3, offset)
            assert_bitwise_equal(kernels, moved, expected)


@DEVICES
def test_a_direction_between_other_elements_and_nothing_at_all(device: str) -> None:
    weight, direction = drawn(6, 8, seed=0).to(torch.bfloat16), drawn(8, 6, seed=1).mT
    with using_kernels("triton"):
        moved, same = weight.to(device, copy=True), weight.to(device, copy=True)
        descend_(moved, direction.to(device), 1.0, 0.5, 1)
        descend_(same, direction.contiguous().to(device), 1.0, 0.5, 1)
        descend_(moved[:0], direction[:0].to(device), 1.0, 0.5, 1)
    assert_bitwise_equal("moved", moved, same)
