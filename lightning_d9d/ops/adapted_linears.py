"""Frozen linear layers of one input with adapters: the layers' products add to the adapters' results.

[Note: adapted linear layers] A separate adapter would write its result, read it and the layer's result, and write the
sum. The gradient of the input would take the same extra passes. Here a thin product writes, and the layer's product
adds to it in place. All layers of one input share the product with their `a`, and the gradient of the input.

| pass of a thin product over wide rows | how often |
|---|---|
| forward: read the input | once for all layers |
| forward: write the result, for the layer's product to add to | once for each layer |
| backward: read the gradient of the result | twice for each layer |
| backward: read the input | once for all layers |
| backward: write the input's gradient, for the layers' products to add to | once for all layers |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import register_flop_formula

from lightning_d9d.ops.linear import autocast_dtype
from lightning_d9d.ops.operator import define
from lightning_d9d.ops.weight_gradients import receiver

MOST_LAYERS = 3
"""Maximum number of layers in a call: queries, keys and values."""


def adapted_linears(
    x: Tensor, weights: Sequence[Tensor], a: Sequence[Tensor], b: Sequence[Tensor], scales: Sequence[float]
) -> tuple[Tensor, ...]:
    """Compute `x @ weight.T + scale * x @ a.T @ b.T` of some frozen layers. [Note: adapted linear layers].

    It is one operator, `torch.ops.lightning_d9d.adapted_linears`, which keeps `x`, the matrices and the products with
    `a`. Gradients of `a` and `b` are never deferred by a split backward.

    Args:
        x: Shape `[..., in]`; all tensors have the dtype that `can_adapt` requires.
        weights: Weights of at most `MOST_LAYERS` layers, shapes `[out, in]`. The weights get no gradients.
        a: A tensor of shape `[rank, in]` for each layer.
        b: A tensor of shape `[out, rank]` for each layer.
        scales: A factor for each layer.

    Returns:
        For each layer a tensor of shape `[..., out]`.
    """
    absent = [None] * 2 * (MOST_LAYERS - len(weights))
    pairs = [matrix for pair in zip(weights, b, strict=True) for matrix in pair]
    together = a[0] if len(a) == 1 else torch.cat([*a])
    *results, _ = _adapted_op(x.flatten(0, -2), together, *pairs, *absent, list(scales))
    return tuple(result.unflatten(0, x.shape[:-1]) for result in results[: len(weights)])


def can_adapt(x: Tensor, weight: Tensor, a: Tensor, b: Tensor) -> bool:
    """Return whether `adapted_linears` supports such a layer.

    The weight must be frozen, all dtypes the one of the computation, and no gradient may be deferred.
    """
    tensors = (x, weight, a, b)
    return (
        not weight.requires_grad
        and x.dim() > 1
        and not any(isinstance(tensor, DTensor) for tensor in tensors)
        and {tensor.dtype for tensor in tensors} == {autocast_dtype(x)}
        and receiver(x, a) is None
        and receiver(x, b) is None
    )


def _layers(*pairs: Tensor | None) -> list[tuple[Tensor, Tensor]]:
    """Return the weight and the `b` of each layer."""
    return [(w, b) for w, b in zip(pairs[::2], pairs[1::2], strict=True) if w is not None and b is not None]


def _product(one: Tensor, other: Tensor, scale: float) -> Tensor:
    """Return `scale * one @ other`, rounded once."""
    return torch.addmm(one.new_empty(()), one, other, beta=0, alpha=scale)


def _hidden(h: Tensor, layers: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
    """Return the columns of each layer."""
    return h.split([b.shape[1] for _, b in layers], 1)


def _new_adapted(x: Tensor, a: Tensor, *others: Any) -> tuple[Tensor, ...]:
    widths = [0 if weight is None else weight.shape[0] for weight in others[:-1:2]]
    return *(x.new_empty(len(x) if width else 0, width) for width in widths), x.new_empty(len(x), len(a))


def _adapted(x: Tensor, a: Tensor, *others: Any) -> tuple[Tensor, ...]:
    *pairs, scales = others
    layers, h = _layers(*pairs), x @ a.t()
    results = [
        _product(part, b.t(), scale).addmm_(x, weight.t())
        for (weight, b), part, scale in zip(layers, _hidden(h, layers), scales, strict=True)
    ]
    return *results, *(x.new_empty(0, 0) for _ in range(MOST_LAYERS - len(layers))), h


def _new_gradients(x: Tensor, h: Tensor, a: Tensor, *others: Any) -> tuple[Tensor, ...]:
    bs = others[1 : 2 * MOST_LAYERS : 2]
    return (
        x.new_empty(x.shape if others[-1] else (0, 0)),
        a.new_empty(a.shape),
        *(a.new_empty((0, 0) if b is None else b.shape) for b in bs),
    )


def _gradients(x: Tensor, h: Tensor, a: Tensor, *others: Any) -> tuple[Tensor, ...]:
    *rest, scales, needs_x = others
    layers, dys = _layers(*rest[: 2 * MOST_LAYERS]), rest[2 * MOST_LAYERS :]
    each = [*zip(dys, layers, _hidden(h, layers), scales, strict=False)]
    dbs = [_product(dy.t(), part, scale) for dy, _, part, scale in each]
    dh = torch.cat([_product(dy, b, scale) for dy, (_, b), _, scale in each], 1)
    dx = dh @ a if needs_x else x.new_empty(0, 0)
    if needs_x:
        for dy, (weight, _), *_ in each:
            dx.addmm_(dy, weight)
    return dx, dh.t() @ x, *dbs, *(x.new_empty(0, 0) for _ in range(MOST_LAYERS - len(layers)))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, *matrices, ctx.scales = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, output[-1], *matrices)


def _backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
    needs_x, needs_a, *needs = ctx.needs_input_grad
    x, h, a, *pairs = ctx.saved_tensors
    dys = [  # of a layer whose result nothing has read: zeros
        x.new_zeros(len(x), len(weight)) if dy is None and weight is not None else dy
        for dy, weight in zip(gradients, pairs[::2], strict=False)
    ]
    dx, da, *dbs = _gradients_op(x, h, a, *pairs, *dys, ctx.scales, needs_x)
    of_pairs = [each for db, needs_b in zip(dbs, needs[1::2], strict=False) for each in (None, db if needs_b else None)]
    return dx if needs_x else None, da if needs_a else None, *of_pairs, None


_PAIRS = "Tensor w0, Tensor b0, Tensor? w1, Tensor? b1, Tensor? w2, Tensor? b2"
_adapted_op = define(
    "adapted_linears",
    f"(Tensor x, Tensor a, {_PAIRS}, float[] scales) -> (Tensor, Tensor, Tensor, Tensor)",
    _adapted,
    _new_adapted,
    setup_context=_setup,
    backward=_backward,
)
_gradients_op = define(
    "adapted_linears_backward",
    f"(Tensor x, Tensor h, Tensor a, {_PAIRS}, Tensor dy0, Tensor? dy1, Tensor? dy2, float[] scales, bool needs_x) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _gradients,
    _new_gradients,
)


@register_flop_formula(torch.ops.lightning_d9d.adapted_linears)
def _flops(x: Any, a: Any, *pairs: Any, **_: Any) -> int:
    weights, bs = pairs[:-1:2], pairs[1:-1:2]
    return 2 * x[0] * (a[0] * a[1] + sum(w[0] * (w[1] + b[1]) for w, b in zip(weights, bs, strict=True) if w))


@register_flop_formula(torch.ops.lightning_d9d.adapted_linears_backward)
def _backward_flops(x: Any, h: Any, a: Any, *others: Any, **_: Any) -> int:
    pairs, needs_x = others[: 2 * MOST_LAYERS], others[-1]
    layers = [(w, b) for w, b in zip(pairs[::2], pairs[1::2], strict=True) if w]
    wide = sum(w[0] * w[1] for w, _ in layers) + a[0] * a[1]
    return 2 * x[0] * (wide * needs_x + a[0] * a[1] + sum(2 * b[0] * b[1] for _, b in layers))
