from __future__ import annotations

from typing import Any, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_d9d.errors import ConfigError
from lightning_d9d.ops.backend import runs_triton
from lightning_d9d.ops.operator import define

MAX_NORM_DIM = 2**15
"""Wider rows do not fit into the registers of one program; torch's operators process them."""


@overload
def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, zero_centered: bool = False, residual: None = None
) -> Tensor: ...


@overload
def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, zero_centered: bool = False, residual: Tensor
) -> tuple[Tensor, Tensor]: ...


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, zero_centered: bool = False, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute `x / sqrt(mean(x**2) + eps) * weight` over the last dim (https://arxiv.org/abs/1910.07467).

    All computation is float32, or float64 for float64, rounded once. On CUDA one operator,
    `torch.ops.lightning_d9d.rms_norm`, reads and writes memory once, and so does its backward. The backward keeps `x`,
    or the sum with `residual`, and recomputes the root mean square. The gradient of `weight` is summed in a fixed
    order. Gradients that are not requested are not computed.

    Args:
        x: Shape `[..., dim]`; for a norm of each head `[..., heads, head_dim]`.
        weight: Shape `[dim]`, in any dtype.
        eps: Number added to the mean square.
        zero_centered: Whether to multiply with `1 + weight` instead.
        residual: Tensor to which `x` is added first, shape of `x`.

    Returns:
        Shape and dtype of `x`. With `residual` the norm of `x + residual`, and `x + residual` itself; both are
        differentiable and have the wider dtype of the two.

    Raises:
        ConfigError: Shapes do not fit.
    """
    check_norm_weight(x, weight)
    if residual is not None and residual.shape != x.shape:
        raise ConfigError(f"residual {list(residual.shape)} must have the shape of x {list(x.shape)}")
    if len(weight) > MAX_NORM_DIM or not runs_triton(x, weight, residual):
        return rms_norm_reference(x, weight, eps, zero_centered=zero_centered, residual=residual)
    normed, total = _norm_op(x, weight, residual, eps, zero_centered)
    return normed if residual is None else (normed, total)


def rms_norm_reference(
    x: Tensor, weight: Tensor, eps: float, *, zero_centered: bool = False, residual: Tensor | None = None
) -> Any:
    """Compute `rms_norm` without checks; a weight wider than `x` is rounded first, unless it is zero-centred."""
    total = x if residual is None else x + residual
    if zero_centered:
        wide = torch.promote_types(total.dtype, torch.float32)
        normed = F.rms_norm(total.to(wide), weight.shape, 1 + weight.to(wide), eps)
    else:
        normed = F.rms_norm(total, weight.shape, weight.to(total.dtype), eps)  # torch's kernels take one dtype
    normed = normed.to(total.dtype)  # autocast widens it on CUDA
    return normed if residual is None else (normed, total)


def check_norm_weight(x: Tensor, weight: Tensor) -> None:
    """Raise ConfigError unless there is a weight for each element of a row."""
    if weight.shape != x.shape[-1:]:
        raise ConfigError(f"the weight {list(weight.shape)} of a norm must have the last dim of x {list(x.shape)}")


def _norm(x: Tensor, weight: Tensor, residual: Tensor | None, eps: float, zero_centered: bool) -> tuple[Tensor, Tensor]:
    from lightning_d9d.ops.kernels.rms_norm import forward

    normed, total = _new_norm(x, weight, residual, eps, zero_centered)
    if normed.numel():
        forward(x, weight, residual, eps, zero_centered, normed, total)
    return normed, total


def _new_norm(
    x: Tensor, weight: Tensor, residual: Tensor | None, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    """Return memory for norm and sum; the sum is empty without residual, because an op may not return its input."""
    if residual is None:
        return x.new_empty(x.shape), x.new_empty(0)
    dtype = torch.promote_types(x.dtype, residual.dtype)
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape, dtype=dtype)


def _gradients(
    dnormed: Tensor,
    dtotal: Tensor | None,
    total: Tensor,
    weight: Tensor,
    eps: float,
    zero_centered: bool,
    needs_total: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor]:
    from lightning_d9d.ops.kernels.rms_norm import backward

    result = _new_gradients(dnormed, dtotal, total, weight, eps, zero_centered, needs_total, needs_weight)
    if not total.numel():
        return result[0], result[1].zero_()
    backward(dnormed, dtotal, total, weight, eps, zero_centered, *result)
    return result


def _new_gradients(
    dnormed: Tensor,
    dtotal: Tensor | None,
    total: Tensor,
    weight: Tensor,
    eps: float,
    zero_centered: bool,
    needs_total: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor]:
    """Return memory for gradients; those not requested are empty."""
    return total.new_empty(total.shape if needs_total else 0), weight.new_empty(weight.shape if needs_weight else 0)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, residual, ctx.eps, ctx.zero_centered = inputs
    ctx.save_for_backward(x if residual is None else output[1], weight)
    ctx.dtypes = x.dtype, None if residual is None else residual.dtype
    if residual is None:
        ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dnormed: Tensor | None, dtotal: Tensor | None) -> tuple[Tensor | None, ...]:
    needs_x, needs_weight, needs_residual, *_ = ctx.needs_input_grad
    dweight = None
    if dnormed is not None:
        options = ctx.eps, ctx.zero_centered, needs_x or needs_residual, needs_weight
        dtotal, dweight = _gradient_op(dnormed, dtotal, *ctx.saved_tensors, *options)
    x_dtype, residual_dtype = ctx.dtypes
    dx = dtotal.to(x_dtype) if needs_x and dtotal is not None else None
    dresidual = dtotal.to(residual_dtype) if needs_residual and dtotal is not None else None
    return dx, dweight if needs_weight else None, dresidual, None, None


_norm_op = define(
    "rms_norm",
    "(Tensor x, Tensor weight, Tensor? residual, float eps, bool zero_centered) -> (Tensor, Tensor)",
    _norm,
    _new_norm,
    setup_context=_setup_context,
    backward=_backward,
    compiles_ahead=True,
)
_gradient_op = define(
    "rms_norm_backward",
    "(Tensor dnormed, Tensor? dtotal, Tensor total, Tensor weight, float eps, bool zero_centered, bool needs_total, "
    "bool needs_weight) -> (Tensor, Tensor)",
    _gradients,
    _new_gradients,
)
