"""Muon's passes over memory beside its products: momentum, scaling, and the step of the weights."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_d9d.ops.backend import runs_triton
from lightning_d9d.ops.stochastic import round_stochastic_


def momentum_direction_(average: Tensor, gradient: Tensor, decay: float, dtype: torch.dtype) -> Tensor:
    """Add a gradient to a momentum, and return Nesterov's direction. Local.

    `average` becomes `decay * average + gradient`; the direction is `decay * average + gradient` with the new average.

    Args:
        average: Float32 or float64; overwritten.
        gradient: Shape of `average`, in any dtype that is not wider.
        decay: Decay, from 0 to below 1.
        dtype: Dtype of the direction.

    Returns:
        A new tensor of that shape and dtype. It is computed in the dtype of `average`, and rounded once.
    """
    direction = torch.empty_like(average, dtype=dtype)
    if runs_triton(average, gradient) and average.is_contiguous() and average.numel():
        from lightning_d9d.ops.kernels import momentum as kernels

        kernels.momentum_direction(average, gradient.contiguous(), direction, decay)
        return direction
    average.mul_(decay).add_(gradient)
    return direction.copy_((average * decay).add_(gradient))


def scale_(matrices: Tensor, factors: Tensor) -> None:
    """Multiply each matrix of a stack by its own number. Local.

    Args:
        matrices: Matrices `[matrices, rows, columns]`; overwritten.
        factors: Numbers `[matrices]`, in a dtype that is not narrower. Products are computed in it, and rounded once.
    """
    if not (runs_triton(matrices, factors) and matrices.is_contiguous() and matrices.numel()):
        matrices.mul_(factors[:, None, None])
        return
    from lightning_d9d.ops.kernels import momentum as kernels

    kernels.scale(matrices, factors.contiguous())


def descend_(
    weight: Tensor, direction: Tensor, keep: float | Tensor, size: float | Tensor, seed: int, offset: int = 0
) -> None:
    """Set a bfloat16 weight to `keep * weight - size * direction`, rounded like `round_stochastic_`. Local.

    Args:
        weight: Bfloat16; overwritten.
        direction: Bfloat16 or float32, in the shape of `weight`.
        keep: A number, or a tensor without dims on the device; the host does not read it.
        size: A number or a tensor, like `keep`.
        seed: As for `round_stochastic_`.
        offset: As for `round_stochastic_`.
    """
    if not (runs_triton(weight, direction) and weight.is_contiguous() and weight.numel()):
        round_stochastic_(weight, weight.float() * keep - direction.float() * size, seed, offset)
        return
    from lightning_d9d.ops.kernels import momentum as kernels

    kernels.descend(weight, direction.contiguous(), keep, size, seed, offset)
