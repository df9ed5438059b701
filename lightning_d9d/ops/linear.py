from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_d9d.ops.sharded_weights import is_sharded, local_shard
from lightning_d9d.ops.weight_gradients import AT_ONCE, WeightGradients, receiver


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    own_part: bool = False,
) -> Tensor:
    """Compute `torch.nn.functional.linear`, with a weight gradient that can be deferred.

    Inside `defer` and with a leaf as `weight`, the gradients of `weight` and `bias` are deferred; see
    `lightning_d9d.ops.weight_gradients`. They equal bit by bit those of `torch.nn.functional.linear`, also under
    autocast.

    Args:
        x: Shape `[..., in]`.
        weight: Shape `[out, in]`. It may be a DTensor. A replicated DTensor also takes a plain `x`. Its gradient is a
            DTensor with the same placements, to which only this rank's rows have contributed.
        bias: shape `[out]`.
        dtype: Dtype of the product, also under autocast; `x` and `weight` are then kept for the backward unchanged.
            Then `x` has two dims or more. For float32 without `bias`, bfloat16 arguments on CUDA are not cast. Products
            of such numbers are exact in float32, and are summed in float32. `ops/linear.py` describes the backward.
        own_part: Whether a plain `x` is multiplied with the part of a sharded DTensor that this rank holds; the result
            is then this rank's own. Otherwise torch refuses such a weight.

    Returns:
        Shape `[..., out]`.
    """
    gradients, leaves = receiver(x, weight, bias), (weight, bias)
    if own_part or not is_sharded(weight):  # torch refuses what is: a part of the result would pass for the whole
        weight, bias = local_shard(weight, x), None if bias is None else local_shard(bias, x)
    if dtype is None:
        if gradients is None or x.dim() < 2:
            return F.linear(x, weight, bias)
        x = x.to(autocast_dtype(x))
    if gradients is None or gradients is AT_ONCE:
        return _Linear.apply(x, weight, bias, None, dtype)
    trained_weight, trained_bias = leaves
    if trained_bias is not None and not trained_bias.requires_grad:
        trained_bias = None
    later = (gradients, trained_weight, trained_bias)
    return _Linear.apply(x, weight.detach(), None if bias is None else bias.detach(), later, dtype)


def autocast_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype to which `F.linear` casts `tensor`: its own without autocast, and for float64."""
    device_type = tensor.device.type
    # Meta tensors know no autocast. To ask whether others do is more than torch 2.11 can compile.
    if device_type != "meta" and torch.is_autocast_enabled(device_type):
        return tensor.dtype if tensor.dtype == torch.float64 else torch.get_autocast_dtype(device_type)
    return tensor.dtype


def _no_autocast(device_type: str) -> AbstractContextManager:
    # As in `autocast_dtype`: meta tensors know none, and to ask is more than torch 2.11 can compile.
    return nullcontext() if device_type == "meta" else torch.autocast(device_type, enabled=False)


def split_linears(module: nn.Module) -> Callable[[], None]:
    """Make every `torch.nn.Linear` in `module` call `linear`, so that its weight gradient can be deferred.

    It sets an attribute `forward` on each of them, except on those whose class or owner has replaced `forward`. Copies
    and pickles of `module` keep it; outside of `defer` it changes nothing.

    Returns:
        A function that removes the attributes.
    """
    split = [
        part
        for part in module.modules()
        if isinstance(part, nn.Linear) and type(part).forward is nn.Linear.forward and "forward" not in vars(part)
    ]
    for part in split:
        part.forward = partial(_forward, part)

    def undo() -> None:
        while split:
            del split.pop().forward

    return undo


def _forward(module: nn.Linear, input: Tensor) -> Tensor:
    return linear(input, module.weight, module.bias)


class _Linear(torch.autograd.Function):
    """`F.linear` and its gradients; `later` names leaves behind detached weights, and what gets their gradients."""

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        later: tuple[WeightGradients, Tensor, Tensor | None] | None,
        dtype: torch.dtype | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.later = later
        ctx.widens = bias is None and _widens(x, weight, dtype)
        if bias is not None:
            bias = bias.to(dtype or autocast_dtype(bias))
        with nullcontext() if dtype is None else _no_autocast(x.device.type):
            if ctx.widens:
                assert dtype is not None
                y = torch.mm(x.flatten(0, -2), weight.t(), out_dtype=dtype)
            else:
                y = F.linear(x.flatten(0, -2).to(dtype or x.dtype), weight.to(dtype or autocast_dtype(weight)), bias)
        # Detached, since autograd forbids to modify a view that a Function returns.
        return y.view(*x.shape[:-1], y.shape[-1]).detach()

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        shape = x.shape
        x, dy = x.flatten(0, -2), grad_outputs[0].flatten(0, -2)
        dx = dw = db = None
        widens = ctx.widens and not torch.is_grad_enabled()  # torch has no derivative of a product that widens
        if ctx.needs_input_grad[0]:
            if widens:
                dx = (_halves(dy).flatten(1) @ weight.repeat(2, 1)).view(shape)
            else:
                dx = (dy @ weight.to(dy.dtype)).view(shape)
        weight_gradient = _wide_weight_gradient if widens else _weight_gradient
        if ctx.later is not None:
            gradients, trained_weight, trained_bias = ctx.later
            gradients.add(trained_weight, weight_gradient, dy, x)
            if trained_bias is not None:
                gradients.add(trained_bias, _bias_gradient, dy)
        else:
            if ctx.needs_input_grad[1]:
                dw = weight_gradient(dy, x)
            if ctx.needs_input_grad[2]:
                db = _bias_gradient(dy)
        return dx, dw, db, None, None


def _weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    return dy.t() @ x.to(dy.dtype)


def _wide_weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    halves = _halves(dy)
    return torch.mm(halves.flatten(1).t(), x, out_dtype=dy.dtype).unflatten(0, halves.shape[1:]).sum(0)


def _widens(x: Tensor, weight: Tensor, dtype: torch.dtype | None) -> bool:
    """Return whether tensor cores compute the product in float32, for which DTensors have no rule."""
    is_plain = not isinstance(x, DTensor) and not isinstance(weight, DTensor)
    return is_plain and x.is_cuda and dtype == torch.float32 and x.dtype == weight.dtype == torch.bfloat16


def _halves(wide: Tensor) -> Tensor:
    """Return a float32 gradient as the sum of two in bfloat16.

    [Note: two halves] The second is the remainder after rounding to the first, so together they have 16 bits. A product
    with both is one product with twice as many columns. Numbers that are infinite, or rounded to infinity, become NaN.

    Args:
        wide: Shape `[rows, columns]`.

    Returns:
        Shape `[rows, 2, columns]`.
    """
    first = wide.bfloat16()
    return torch.stack([first, (wide - first).bfloat16()], 1)


def _bias_gradient(dy: Tensor) -> Tensor:
    return dy.sum(0)
