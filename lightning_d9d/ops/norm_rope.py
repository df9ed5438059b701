from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from lightning_d9d.ops.operator import define
from lightning_d9d.ops.rms_norm import MAX_NORM_DIM, check_norm_weight, rms_norm_reference
from lightning_d9d.ops.rope import check_keys, check_tables, new_turned, rope_reference, turns_on_triton


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
    """Compute `rope(rms_norm(x, weight, eps), cos, sin)` of queries or keys: norm heads, then rotate them by position.

    All computation is float32 (float64 for float64). On CUDA one operator, `torch.ops.lightning_d9d.norm_rope`, reads
    and writes memory once and rounds once, while torch also rounds the normed tensor. So does its backward, which keeps
    the arguments and recomputes the root mean square; the gradient of `weight` is summed in a fixed order. Gradients
    that are not requested are not computed. If tables require a gradient, torch's operators are used.

    Args:
        x: Shape `[batch, seq, heads, head_dim]`.
        weight: Shape `[head_dim]`, in any dtype.
        eps: As in `rms_norm`.
        cos: Shape `[batch, seq, 1, pairs]`, batch may be 1; as in `rope`, without positions.
        sin: The same, of the sine.
        interleaved: As in `rope`.
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
    return _turned_op(x, None, weight, None, eps, cos, sin, interleaved, zero_centered)[0]


def norm_rope_qk(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    zero_centered: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute `norm_rope` of queries and keys, in one launch if they have one dtype, and their weights have one, too.

    The backward takes one launch, and another one that sums gradients of weights. This applies if both results have a
    gradient and the same gradients are requested for queries and keys. Otherwise each has separate launches.

    Args:
        q: Shape `[batch, seq, heads, head_dim]`.
        k: The same for keys, with their own number of heads.
        q_weight: Shape `[head_dim]`, in any dtype.
        k_weight: The same for keys.
        eps: As in `rms_norm`.
        cos: As in `norm_rope`.
        sin: The same, of the sine.
        interleaved: As in `rope`.
        zero_centered: as in `rms_norm`.

    Returns:
        Queries and keys, normed and rotated: bitwise equal to `norm_rope` of each.

    Raises:
        ConfigError: Shapes do not fit.
    """
    check_keys(q, k)
    check_norm_weight(q, q_weight)
    check_norm_weight(k, k_weight)
    check_tables(q, cos, sin)
    is_alike = q.dtype == k.dtype and q_weight.dtype == k_weight.dtype and len(q_weight) <= MAX_NORM_DIM
    if not is_alike or not turns_on_triton(q, cos, sin, k, q_weight, k_weight):
        options = {"interleaved": interleaved, "zero_centered": zero_centered}
        q = norm_rope(q, q_weight, eps, cos, sin, **options)
        return q, norm_rope(k, k_weight, eps, cos, sin, **options)
    return _turned_op(q, k, q_weight, k_weight, eps, cos, sin, interleaved, zero_centered)


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
    """Compute `norm_rope` without checks."""
    normed = rms_norm_reference(x, weight, eps, zero_centered=zero_centered)
    return rope_reference(normed, cos, sin, interleaved=interleaved)


def _norm_and_turn(
    q: Tensor,
    k: Tensor | None,
    q_weight: Tensor,
    k_weight: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    zero_centered: bool,
) -> tuple[Tensor, Tensor]:
    from lightning_d9d.ops.kernels.rope import forward

    results = new_turned(q, k)
    weights = q_weight, k_weight
    forward(q, k, cos, sin, results, interleaved, weights=weights, eps=eps, zero_centered=zero_centered)
    return results


class _Given(NamedTuple):
    """Arguments of the backward's operator."""

    dq: Tensor
    dk: Tensor | None
    q: Tensor
    k: Tensor | None
    q_weight: Tensor
    k_weight: Tensor | None
    cos: Tensor
    sin: Tensor
    eps: float
    interleaved: bool
    zero_centered: bool
    needs_inputs: bool
    needs_weights: bool


def _gradients(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from lightning_d9d.ops.kernels.rope import backward

    given = _Given(*arguments)
    results = _empty_gradients(given)
    inputs, weights = results[:2] if given.needs_inputs else None, results[2:] if given.needs_weights else None
    backward(*given[:11], inputs, weights)
    return results


def _new_gradients(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _empty_gradients(_Given(*arguments))


def _empty_gradients(given: _Given) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return memory for gradients of queries, keys and both weights; without elements for those not requested."""

    def like(tensor: Tensor | None, is_needed: bool) -> Tensor:
        return given.q.new_empty(0) if tensor is None else tensor.new_empty(tensor.shape if is_needed else 0)

    of_inputs = like(given.q, given.needs_inputs), like(given.k, given.needs_inputs)
    return *of_inputs, like(given.q_weight, given.needs_weights), like(given.k_weight, given.needs_weights)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, q_weight, k_weight, eps, cos, sin, interleaved, zero_centered = inputs
    ctx.save_for_backward(q, k, q_weight, k_weight, cos, sin)
    ctx.options = eps, interleaved, zero_centered
    needs_q, needs_k, needs_q_weight, needs_k_weight, *_ = ctx.needs_input_grad
    needs = needs_q or needs_q_weight, needs_k or needs_k_weight
    ctx.mark_non_differentiable(*(y for y, is_needed in zip(output, needs, strict=True) if not is_needed))
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dq: Tensor | None, dk: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, q_weight, k_weight, cos, sin = ctx.saved_tensors
    needs_q, needs_k, needs_q_weight, needs_k_weight, *_ = ctx.needs_input_grad
    others = cos, sin, *ctx.options

    def alone(
        gradient: Tensor | None, x: Tensor, weight: Tensor, needs_x: bool, needs_weight: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        if gradient is None or not (needs_x or needs_weight):
            return None, None
        dx, _, dweight, _ = _gradient_op(gradient, None, x, None, weight, None, *others, needs_x, needs_weight)
        return dx if needs_x else None, dweight if needs_weight else None

    if dq is not None and dk is not None and (needs_q, needs_q_weight) == (needs_k, needs_k_weight):
        gradients = _gradient_op(dq, dk, q, k, q_weight, k_weight, *others, needs_q, needs_q_weight)
        needs = needs_q, needs_k, needs_q_weight, needs_k_weight
        gradients = tuple(each if is_needed else None for each, is_needed in zip(gradients, needs, strict=True))
    else:
        dq, dq_weight = alone(dq, q, q_weight, needs_q, needs_q_weight)
        dk, dk_weight = alone(dk, k, k_weight, needs_k, needs_k_weight)
        gradients = dq, dk, dq_weight, dk_weight
    return *gradients, None, None, None, None, None


_turned_op = define(
    "norm_rope",
    "(Tensor q, Tensor? k, Tensor q_weight, Tensor? k_weight, float eps, Tensor cos, Tensor sin, bool interleaved, "
    "bool zero_centered) -> (Tensor, Tensor)",
    _norm_and_turn,
    new_turned,
    setup_context=_setup_context,
    backward=_backward,
    compiles_ahead=True,
)
_gradient_op = define(
    "norm_rope_backward",
    "(Tensor dq, Tensor? dk, Tensor q, Tensor? k, Tensor q_weight, Tensor? k_weight, Tensor cos, Tensor sin, "
    "float eps, bool interleaved, bool zero_centered, bool needs_inputs, bool needs_weights) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _gradients,
    _new_gradients,
)
