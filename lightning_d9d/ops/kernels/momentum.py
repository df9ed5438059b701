"""Kernels for Muon's passes over memory beside its products."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_d9d.ops.kernels.compiling import jit
from lightning_d9d.ops.kernels.stochastic import _quiet, _random_bits, _rounded, _widened
from lightning_d9d.ops.rows import ceil_div

_TILE = 2048
"""Elements of a program: eight for each thread of eight warps, so 16 bytes of bfloat16."""
_WARPS = 8


def momentum_direction(average: Tensor, gradient: Tensor, direction: Tensor, decay: float) -> None:
    """Overwrite `average`, float32, and fill `direction`. All are contiguous and not empty."""
    _momentum[(ceil_div(average.numel(), _TILE),)](
        average,
        gradient,
        direction,
        average.numel(),
        decay,
        _TILE,
        num_warps=_WARPS,  # type: ignore[call-arg]
        enable_fp_fusion=False,  # type: ignore[call-arg]  # as torch rounds
    )


def scale(matrices: Tensor, factors: Tensor) -> None:
    """Multiply matrices by their factors, float32. Both tensors are contiguous and not empty."""
    size = matrices[0].numel()
    _scale[(len(matrices) * ceil_div(size, _TILE),)](
        matrices,
        factors,
        size,
        _TILE,
        num_warps=_WARPS,  # type: ignore[call-arg]
    )


def descend(
    weight: Tensor, direction: Tensor, keep: float | Tensor, size: float | Tensor, seed: int, offset: int
) -> None:
    """Overwrite `weight`, bfloat16. Both tensors are contiguous and not empty."""
    scalars = None
    if isinstance(keep, Tensor) or isinstance(size, Tensor):
        scalars = torch.stack([torch.as_tensor(each, device=weight.device).float() for each in (keep, size)])
        keep = size = 0.0
    count, shift = weight.numel(), offset % 8
    _descend[(ceil_div(count + shift, _TILE),)](
        weight.view(torch.int16),
        direction.view(torch.int16) if direction.dtype == torch.bfloat16 else direction,
        scalars,
        keep,
        size,
        count,
        seed,
        offset // 8,
        shift,
        _TILE,
        num_warps=_WARPS,  # type: ignore[call-arg]
        enable_fp_fusion=False,  # type: ignore[call-arg]
    )


@jit
def _momentum(average_ptr, gradient_ptr, direction_ptr, count, decay, TILE: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    exists = places < count
    gradient = tl.load(gradient_ptr + places, mask=exists, other=0.0).to(tl.float32)
    average = tl.load(average_ptr + places, mask=exists, other=0.0) * decay + gradient
    tl.store(average_ptr + places, average, mask=exists)
    direction = average * decay + gradient
    tl.store(direction_ptr + places, direction.to(direction_ptr.dtype.element_ty), mask=exists)


@jit
def _scale(matrices_ptr, factors_ptr, size, TILE: tl.constexpr):
    tiles = tl.cdiv(size, TILE)
    matrix = tl.program_id(0) // tiles
    places = tl.program_id(0) % tiles * TILE + tl.arange(0, TILE)
    pointer, exists = matrices_ptr + matrix.to(tl.int64) * size + places, places < size
    scaled = tl.load(pointer, mask=exists, other=0.0).to(tl.float32) * tl.load(factors_ptr + matrix)
    tl.store(pointer, scaled.to(matrices_ptr.dtype.element_ty), mask=exists)


@triton.jit
def _moved(weight, direction, keep, size):
    return _quiet(_widened(weight) * keep - _widened(direction) * size)


@jit(do_not_specialize=["seed", "first_block"])
def _descend(
    weight_ptr, direction_ptr, scalars, keep, size, count, seed, first_block, shift, TILE: tl.constexpr
):  # fmt: skip
    if scalars is not None:
        keep, size = tl.load(scalars), tl.load(scalars + 1)
    start = tl.program_id(0).to(tl.int64) * TILE
    random = _random_bits(first_block, start, seed, TILE)
    lanes = start - shift + tl.arange(0, TILE)
    if (start >= shift) & (start - shift + TILE <= count):
        moved = _moved(tl.load(weight_ptr + lanes), tl.load(direction_ptr + lanes), keep, size)
        tl.store(weight_ptr + lanes, _rounded(moved, random))
    else:
        exists = (lanes >= 0) & (lanes < count)
        weight = tl.load(weight_ptr + lanes, mask=exists, other=0)
        direction = tl.load(direction_ptr + lanes, mask=exists, other=0)
        tl.store(weight_ptr + lanes, _rounded(_moved(weight, direction, keep, size), random), mask=exists)
