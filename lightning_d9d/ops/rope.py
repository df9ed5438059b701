from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_d9d.errors import ConfigError
from lightning_d9d.ops.kernels import runs_triton
from lightning_d9d.ops.operator import define


def rope(
    x: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None, *, interleaved: bool = False
) -> Tensor:
    """Turns pairs of elements of each head by their angles: `(a, b)` becomes `(a cos - b sin, b cos + a sin)`.

    See https://arxiv.org/abs/2104.09864. Computed in float32 (float64 for float64) and rounded once. On CUDA one
    operator, `torch.ops.lightning_d9d.rope`, that reads and writes memory once. Its backward turns back and keeps the
    tables alone. Tables that require a gradient are torch's.

    Args:
        x: shape `[batch, seq, heads, head_dim]`.
        cos: cosine of each pair's angle, shape `[batch, seq, 1, pairs]`; batch may be 1 for all rows. Elements of a
            head after the first `2 * pairs` stay as they are.
        sin: the same of the sine.
        position_ids: integers, shape `[batch, seq]`, batch may be 1: then the tables are of all positions, shape
            `[positions, pairs]`, and each token's are looked up first. Where several layers take the same, rather look
            them up once.
        interleaved: whether pair i is of the elements 2 i and 2 i + 1; else of i and i + pairs.

    Returns:
        Shape and dtype of `x`.

    Raises:
        ConfigError: Shapes do not fit.
        IndexError: A position is not in the tables: on the CPU. On CUDA it fails in the kernel.
    """
    if position_ids is not None:
        cos, sin = (table[position_ids].unsqueeze(-2) for table in (cos, sin))
    check_tables(x, cos, sin)
    if not turns_on_triton(x, cos, sin):
        return rope_reference(x, cos, sin, interleaved=interleaved)
    return _turn_op(x, cos, sin, interleaved, False)


def rope_reference(
    x: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None, *, interleaved: bool = False
) -> Tensor:
    """`rope` without checks, in the wider dtype of `x` and the tables."""
    if position_ids is not None:
        cos, sin = (table[position_ids].unsqueeze(-2) for table in (cos, sin))
    width = 2 * cos.shape[-1]
    turned = x[..., :width]
    first, second = turned.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else turned.chunk(2, dim=-1)
    pairs = first * cos - second * sin, second * cos + first * sin
    turned = torch.stack(pairs, dim=-1).flatten(-2) if interleaved else torch.cat(pairs, dim=-1)
    turned = turned.to(x.dtype)
    return turned if width == x.shape[-1] else torch.cat((turned, x[..., width:]), dim=-1)


def check_tables(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Raise ConfigError unless there is a cosine and a sine for each token of `x` and each pair."""
    fits = x.dim() == cos.dim() == 4 and cos.shape == sin.shape and 2 * cos.shape[-1] <= x.shape[-1]
    if not fits or cos.shape[0] not in (1, x.shape[0]) or cos.shape[1:3] != (x.shape[1], 1):
        raise ConfigError(
            f"rotary tables {list(cos.shape)} and {list(sin.shape)} do not fit x {list(x.shape)}: x must be [batch, "
            "seq, heads, head_dim], and the tables [batch or 1, seq, 1, pairs] with at most head_dim / 2 pairs"
        )


def turns_on_triton(x: Tensor, cos: Tensor, sin: Tensor, *others: Tensor) -> bool:
    """Whether kernels run, which turn one pair at least and give tables no gradient."""
    is_trained = torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad)
    return cos.shape[-1] > 0 and not is_trained and runs_triton(x, cos, sin, *others)


def _turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool) -> Tensor:
    from lightning_d9d.ops.rope_kernels import forward

    result = _new_turned(x, cos, sin, interleaved, back)
    if result.numel():
        forward(x, cos, sin, result, interleaved, back=back)
    return result


def _new_turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool) -> Tensor:
    return x.new_empty(x.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, cos, sin, ctx.interleaved, ctx.back = inputs
    ctx.save_for_backward(cos, sin)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
    dx = _turn_op(gradient, *ctx.saved_tensors, ctx.interleaved, not ctx.back)
    return dx, None, None, None, None


_turn_op = define(
    "rope",
    "(Tensor x, Tensor cos, Tensor sin, bool interleaved, bool back) -> Tensor",
    _turn,
    _new_turned,
    setup_context=_setup_context,
    backward=_backward,
)
