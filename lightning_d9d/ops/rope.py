from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_d9d.errors import ConfigError
from lightning_d9d.ops.backend import runs_triton
from lightning_d9d.ops.operator import define


def rope(
    x: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None, *, interleaved: bool = False
) -> Tensor:
    """Rotate pairs of elements of each head by their angles: `(a, b)` becomes `(a cos - b sin, b cos + a sin)`.

    See https://arxiv.org/abs/2104.09864. All computation is float32 (float64 for float64), rounded once. On CUDA it is
    one operator, `torch.ops.lightning_d9d.rope`, which reads and writes memory once. Its backward rotates back and
    keeps only the tables. If tables require a gradient, torch's operators are used.

    Args:
        x: Shape `[batch, seq, heads, head_dim]`.
        cos: Cosine of each pair's angle, shape `[batch, seq, 1, pairs]`; batch may be 1 for all rows. Elements of a
            head after the first `2 * pairs` do not change.
        sin: The same for the sine.
        position_ids: Integers, shape `[batch, seq]`, batch may be 1: then the tables are of all positions, shape
            `[positions, pairs]`, and each token's are looked up first. If several layers use the same positions, look
            them up once before.
        interleaved: Whether pair i has the elements 2 i and 2 i + 1; otherwise i and i + pairs.

    Returns:
        Shape and dtype of `x`.

    Raises:
        ConfigError: Shapes do not fit.
        IndexError: On the CPU: a position is not in the tables. On CUDA it fails in the kernel.
    """
    cos, sin = _looked_up(cos, sin, position_ids)
    check_tables(x, cos, sin)
    if not turns_on_triton(x, cos, sin):
        return rope_reference(x, cos, sin, interleaved=interleaved)
    return _turn_op(x, None, cos, sin, interleaved, False)[0]


def rope_qk(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Compute `rope` of queries and keys, in one launch of its kernel if they have one dtype.

    Args:
        q: Shape `[batch, seq, heads, head_dim]`.
        k: The same for keys, with their own number of heads.
        cos: As in `rope`.
        sin: The same, of the sine.
        position_ids: as in `rope`.
        interleaved: as in `rope`.

    Returns:
        Rotated queries and keys: bitwise equal to `rope` of each.

    Raises:
        ConfigError: Shapes do not fit.
        IndexError: A position is not in the tables, as in `rope`.
    """
    cos, sin = _looked_up(cos, sin, position_ids)
    check_keys(q, k)
    check_tables(q, cos, sin)
    if q.dtype != k.dtype or not turns_on_triton(q, cos, sin, k):
        return rope(q, cos, sin, interleaved=interleaved), rope(k, cos, sin, interleaved=interleaved)
    return _turn_op(q, k, cos, sin, interleaved, False)


def rope_reference(
    x: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None, *, interleaved: bool = False
) -> Tensor:
    """Compute `rope` without checks, in the wider dtype of `x` and the tables."""
    cos, sin = _looked_up(cos, sin, position_ids)
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
            f"rotary tables {list(cos.shape)} and {list(sin.shape)} do not fit x {list(x.shape)}. Give x as [batch, "
            "seq, heads, head_dim], and tables as [batch or 1, seq, 1, pairs] with at most head_dim / 2 pairs"
        )


def check_keys(q: Tensor, k: Tensor) -> None:
    """Raise ConfigError unless keys have the shape of queries, except for the number of heads."""
    if q.dim() != 4 or k.dim() != 4 or (*q.shape[:2], q.shape[3]) != (*k.shape[:2], k.shape[3]):
        raise ConfigError(
            f"keys {list(k.shape)} do not fit queries {list(q.shape)}: both must be [batch, seq, heads, head_dim], and "
            "only their numbers of heads may differ"
        )


def turns_on_triton(x: Tensor, cos: Tensor, sin: Tensor, *others: Tensor) -> bool:
    """Return whether kernels run, which rotate at least one pair and give tables no gradient."""
    is_trained = torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad)
    return cos.shape[-1] > 0 and not is_trained and runs_triton(x, cos, sin, *others)


def _looked_up(cos: Tensor, sin: Tensor, position_ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the tables of each token."""
    if position_ids is None:
        return cos, sin
    return cos[position_ids].unsqueeze(-2), sin[position_ids].unsqueeze(-2)


def _turn(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, interleaved: bool, back: bool
) -> tuple[Tensor, Tensor]:
    from lightning_d9d.ops.kernels.rope import forward

    results = new_turned(q, k)
    forward(q, k, cos, sin, results, interleaved, back=back)
    return results


def new_turned(q: Tensor, k: Tensor | None, *_: Any) -> tuple[Tensor, Tensor]:
    """Return memory for results, whether normed before or not; without keys the second one is empty."""
    return q.new_empty(q.shape), q.new_empty(0) if k is None else k.new_empty(k.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, _, cos, sin, ctx.interleaved, ctx.back = inputs
    ctx.save_for_backward(cos, sin)
    ctx.mark_non_differentiable(*(y for y, needs in zip(output, ctx.needs_input_grad[:2], strict=True) if not needs))
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dq: Tensor | None, dk: Tensor | None) -> tuple[Tensor | None, ...]:
    others = (*ctx.saved_tensors, ctx.interleaved, not ctx.back)
    if dq is not None and dk is not None:
        dq, dk = _turn_op(dq, dk, *others)
    else:
        dq, dk = (None if dy is None else _turn_op(dy, None, *others)[0] for dy in (dq, dk))
    return dq, dk, None, None, None, None


_turn_op = define(
    "rope",
    "(Tensor q, Tensor? k, Tensor cos, Tensor sin, bool interleaved, bool back) -> (Tensor, Tensor)",
    _turn,
    new_turned,
    setup_context=_setup_context,
    backward=_backward,
    compiles_ahead=True,
)
