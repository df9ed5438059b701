from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from lightning_d9d.errors import ConfigError
from lightning_d9d.ops.backend import runs_triton
from lightning_d9d.ops.operator import define


def swiglu(gate_up: Tensor | tuple[Tensor, Tensor], weights: Tensor | None = None) -> Tensor:
    """Compute `silu(gate) * up`, times a weight for each row (https://arxiv.org/abs/2002.05202).

    On CUDA it is one operator, `torch.ops.lightning_d9d.swiglu`, which computes in float32, rounds once, and reads and
    writes memory once. So does its backward, which keeps only the arguments. In torch each product is rounded, and
    weights are rounded to the dtype of `up` before. Gradients that are not requested are not computed. Rows are
    independent: values in padding between groups of rows, NaN included, do not spread to other rows.

    Args:
        gate_up: Shape `[..., 2 * inner]`, the gate first, or gate and up, of shape `[..., inner]` each.
        weights: Shape `[...]`, in any dtype: the router's weights for rows of experts, if their down projections come
            next.

    Returns:
        Shape `[..., inner]`, in the dtype of `gate_up`.

    Raises:
        ConfigError: Shapes do not fit.
    """
    gate, up = (gate_up, None) if isinstance(gate_up, Tensor) else gate_up
    if up is None and gate.shape[-1] % 2:
        raise ConfigError(f"gate_up {list(gate.shape)} must have an even last dim, or be given as (gate, up)")
    if up is not None and gate.shape != up.shape:
        raise ConfigError(f"gate {list(gate.shape)} and up {list(up.shape)} must have one shape")
    if weights is not None and weights.shape != gate.shape[:-1]:
        raise ConfigError(f"weights {list(weights.shape)} must have one number for each row of {list(gate.shape)}")
    has_one_dtype = up is None or up.dtype == gate.dtype
    if not has_one_dtype or not runs_triton(gate, up, weights):
        return swiglu_reference(gate_up, weights)
    return _activate_op(gate, up, weights)


def swiglu_reference(gate_up: Tensor | tuple[Tensor, Tensor], weights: Tensor | None = None) -> Tensor:
    """Compute `swiglu` without checks."""
    gate, up = gate_up.chunk(2, dim=-1) if isinstance(gate_up, Tensor) else gate_up
    activated = F.silu(gate) * up
    return activated if weights is None else activated * weights.unsqueeze(-1).to(activated.dtype)


def _activate(gate: Tensor, up: Tensor | None, weights: Tensor | None) -> Tensor:
    from lightning_d9d.ops.kernels.swiglu import forward

    result = _new_result(gate, up, weights)
    if result.numel():
        forward(gate, up, weights, result)
    return result


def _new_result(gate: Tensor, up: Tensor | None, weights: Tensor | None) -> Tensor:
    return gate.new_empty(gate.shape if up is not None else (*gate.shape[:-1], gate.shape[-1] // 2))


def _gradients(
    dy: Tensor,
    gate: Tensor,
    up: Tensor | None,
    weights: Tensor | None,
    needs_gate: bool,
    needs_up: bool,
    needs_weights: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    from lightning_d9d.ops.kernels.swiglu import backward

    result = _new_gradients(dy, gate, up, weights, needs_gate, needs_up, needs_weights)
    if dy.numel():
        backward(dy, gate, up, weights, *result)
    else:
        result[2].zero_()
    return result


def _new_gradients(
    dy: Tensor,
    gate: Tensor,
    up: Tensor | None,
    weights: Tensor | None,
    needs_gate: bool,
    needs_up: bool,
    needs_weights: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return memory for gradients; those not requested are empty."""
    dgate = gate.new_empty(gate.shape if needs_gate else 0)
    dup = gate.new_empty(dy.shape if needs_up else 0)
    dweights = dy.new_empty(0) if weights is None else weights.new_empty(weights.shape if needs_weights else 0)
    return dgate, dup, dweights


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    needed = ctx.needs_input_grad
    gradients = _gradient_op(dy, *ctx.saved_tensors, *needed)
    return tuple(gradient if needs else None for gradient, needs in zip(gradients, needed, strict=True))


_activate_op = define(
    "swiglu",
    "(Tensor gate, Tensor? up, Tensor? weights) -> Tensor",
    _activate,
    _new_result,
    setup_context=_setup_context,
    backward=_backward,
    compiles_ahead=True,
)
_gradient_op = define(
    "swiglu_backward",
    "(Tensor dy, Tensor gate, Tensor? up, Tensor? weights, bool needs_gate, bool needs_up, bool needs_weights) "
    "-> (Tensor, Tensor, Tensor)",
    _gradients,
    _new_gradients,
)
