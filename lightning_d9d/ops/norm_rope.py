from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_d9d.ops.operator import define
from lightning_d9d.ops.rms_norm import MAX_NORM_DIM, check_norm_weight, rms_norm_reference
from lightning_d9d.ops.rope import check_tables, rope_reference, turns_on_triton


def norm_rope(
    x: Tensor,
    weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    zero_centered: bool = False,
) -> Tensor:
    """`rope(rms_norm(x, weight, eps), cos, sin)`: queries or keys, normed by head and turned by their positions.

    Computed in float32 (float64 for float64). On CUDA one operator, `torch.ops.lightning_d9d.norm_rope`, reads and
    writes memory once and rounds once, where torch rounds what is normed, too. So does its backward, which keeps the
    arguments and computes the root mean square anew; the gradient of `weight` is summed in a fixed order. Gradients
    that nobody asks for are not computed. Tables that require a gradient are torch's.

    Args:
        x: shape `[batch, seq, heads, head_dim]`.
        weight: shape `[head_dim]`, in any dtype.
        eps: as in `rms_norm`.
        cos: shape `[batch, seq, 1, pairs]`, batch may be 1; as in `rope`, without positions.
        sin: the same.
        interleaved: as in `rope`.
        zero_centered: as in `rms_norm`.

    Returns:
        Shape and dtype of `x`.

    Raises:
        ConfigError: Shapes do not fit.
    """
    check_norm_weight(x, weight)
    check_tables(x, cos, sin)
    if len(weight) > MAX_NORM_DIM or not turns_on_triton(x, cos, sin, weight):
        return norm_rope_reference(x, weight, eps, cos, sin, interleaved=interleaved, zero_centered=zero_centered)
    return _turned_op(x, weight, eps, cos, sin, interleaved, zero_centered)


def norm_rope_reference(
    x: Tensor,
    weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    zero_centered: bool = False,
) -> Tensor:
    """`norm_rope` without checks."""
    normed = rms_norm_reference(x, weight, eps, zero_centered=zero_centered)
    return rope_reference(normed, cos, sin, interleaved=interleaved)


def _norm_and_turn(
    x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor, interleaved: bool, zero_centered: bool
) -> Tensor:
    from lightning_d9d.ops.rope_kernels import forward

    result = _new_turned(x, weight, eps, cos, sin, interleaved, zero_centered)
    if result.numel():
        forward(x, cos, sin, result, interleaved, weight=weight, eps=eps, zero_centered=zero_centered)
    return result


def _new_turned(
    x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor, interleaved: bool, zero_centered: bool
) -> Tensor:
    return x.new_empty(x.shape)


def _gradients(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    interleaved: bool,
    zero_centered: bool,
    needs_x: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor]:
    from lightning_d9d.ops.rope_kernels import backward

    dx, dweight = _new_gradients(gradient, x, weight, cos, sin, eps, interleaved, zero_centered, needs_x, needs_weight)
    if x.numel():
        backward(gradient, x, weight, cos, sin, eps, interleaved, zero_centered, dx, dweight)
    else:
        dweight.zero_()
    return dx, dweight


def _new_gradients(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    interleaved: bool,
    zero_centered: bool,
    needs_x: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor]:
    """Empty ones are not asked for."""
    return x.new_empty(x.shape if needs_x else 0), weight.new_empty(weight.shape if needs_weight else 0)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, eps, cos, sin, interleaved, zero_centered = inputs
    ctx.save_for_backward(x, weight, cos, sin)
    ctx.options = eps, interleaved, zero_centered


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    needs_x, needs_weight, *_ = ctx.needs_input_grad
    dx, dweight = _gradient_op(gradient, *ctx.saved_tensors, *ctx.options, needs_x, needs_weight)
    return dx if needs_x else None, dweight if needs_weight else None, None, None, None, None, None


_turned_op = define(
    "norm_rope",
    "(Tensor x, Tensor weight, float eps, Tensor cos, Tensor sin, bool interleaved, bool zero_centered) -> Tensor",
    _norm_and_turn,
    _new_turned,
    setup_context=_setup_context,
    backward=_backward,
)
_gradient_op = define(
    "norm_rope_backward",
    "(Tensor gradient, Tensor x, Tensor weight, Tensor cos, Tensor sin, float eps, bool interleaved, "
    "bool zero_centered, bool needs_x, bool needs_weight) -> (Tensor, Tensor)",
    _gradients,
    _new_gradients,
)
