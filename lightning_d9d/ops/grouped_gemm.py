from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_d9d.ops.linear import autocast_dtype
from lightning_d9d.ops.sharded_weights import local_part
from lightning_d9d.ops.weight_gradients import AT_ONCE, WeightGradients, receiver

_NATIVE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def grouped_gemm(x: Tensor, weight: Tensor, offsets: Tensor, *, padded: bool = False) -> Tensor:
    """Multiplies each group of rows with its own matrix: row r of group g becomes `weight[g] @ x[r]`.

    Runs on `torch.nn.functional.grouped_mm`, without reading `offsets` on the host where that has a grouped kernel;
    float64, rows whose stride is not a multiple of 16 bytes, and devices without it take an exact loop over the groups,
    which does read them. Differentiable in `x` and `weight`; a group without rows gives its matrix a zero gradient.
    Under autocast both factors are cast as `torch.nn.functional.linear` would. Inside `put_off`, and with a leaf as
    `weight`, the gradient of `weight` is put off; see `lightning_d9d.ops.weight_gradients`.

    Args:
        x: rows sorted by group, shape `[rows, in]`.
        weight: one matrix a group, shape `[groups, out, in]`, in the dtype of `x`. Or a DTensor that is cut along its
            first dim: then the groups are those that this rank holds, and its gradient is a DTensor placed alike, to
            which this rank's rows alone have contributed.
        offsets: int32 on the device of `x`, shape `[groups]`: the row after the last one of each group, not decreasing.
        padded: whether rows may follow `offsets[-1]`. They come out zero and get a zero gradient, at the price of two
            passes over `x` and the result; without the flag `offsets[-1]` must equal the number of rows.

    Returns:
        Shape `[rows, out]`, in the dtype of `x`.
    """
    gradients, leaf, weight = receiver(x, weight), weight, local_part(weight, x)
    x = x.to(autocast_dtype(x))
    native = _runs_natively(x, weight)

    def product(x: Tensor) -> Tensor:
        if gradients is None or gradients is AT_ONCE:
            return _GroupedProduct.apply(x, weight, offsets, native, None)
        return _GroupedProduct.apply(x, weight.detach(), offsets, native, (gradients, leaf))

    if not native:
        return product(x)
    x = x.contiguous()
    if not padded:
        return product(x)
    # grouped_mm leaves rows after the last group unwritten in the result and in the gradient of x: select in both.
    is_row = torch.arange(len(x), device=x.device).unsqueeze(-1) < offsets[-1]
    return torch.where(is_row, product(torch.where(is_row, x, 0)), 0)


def grouped_gemm_reference(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """`grouped_gemm` as a loop of ordinary products; any dtype and size, rows after the last group come out zero."""
    ends = offsets.tolist()
    sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    *groups, rest = x.split([*sizes, len(x) - ends[-1]])
    results = [F.linear(rows, matrix) for rows, matrix in zip(groups, weight.unbind(), strict=True)]
    return torch.cat([*results, rest.new_zeros(len(rest), weight.shape[1])])


def _runs_natively(x: Tensor, weight: Tensor) -> bool:
    _, out_features, in_features = weight.shape
    aligned = all(width * x.element_size() % 16 == 0 for width in (in_features, out_features))
    return aligned and x.dtype in _NATIVE_DTYPES and x.device.type in ("cpu", "cuda", "meta")


class _GroupedProduct(torch.autograd.Function):
    """Groups of rows times matrices; `later` names the leaf behind a detached weight, and who takes its gradient."""

    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, offsets: Tensor, native: bool, later: tuple[WeightGradients, Tensor] | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight, offsets)
        ctx.native, ctx.later = native, later
        weight = weight.to(autocast_dtype(weight))
        if not native:
            return grouped_gemm_reference(x, weight, offsets)
        return F.grouped_mm(x, weight.contiguous().transpose(-2, -1), offs=offsets)

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, offsets = ctx.saved_tensors
        dy = grad_outputs[0].contiguous()  # grouped_mm rejects expanded ones, such as the gradient of a sum
        dx = dw = None
        if ctx.needs_input_grad[0]:
            weight = weight.to(dy.dtype)
            if ctx.native:
                dx = F.grouped_mm(dy, weight.contiguous(), offs=offsets)
            else:
                dx = grouped_gemm_reference(dy, weight.transpose(-2, -1), offsets)
        weight_gradient = _native_weight_gradient if ctx.native else _weight_gradient
        if ctx.needs_input_grad[1]:
            dw = weight_gradient(dy, x, offsets)
        elif ctx.later is not None:
            gradients, trained_weight = ctx.later
            gradients.add(trained_weight, weight_gradient, dy, x, offsets)
        return dx, dw, None, None, None


def _native_weight_gradient(dy: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    return F.grouped_mm(dy.transpose(0, 1), x, offs=offsets)


def _weight_gradient(dy: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    ends = offsets.tolist()
    groups = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    return torch.stack([dy[rows].t() @ x[rows] for rows in groups])
