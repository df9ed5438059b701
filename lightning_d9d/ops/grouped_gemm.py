from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_NATIVE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def grouped_gemm(x: Tensor, weight: Tensor, offsets: Tensor, *, padded: bool = False) -> Tensor:
    """Multiplies each group of rows with its own matrix: row r of group g becomes `weight[g] @ x[r]`.

    Runs on `torch.nn.functional.grouped_mm`, without reading `offsets` on the host where that has a grouped kernel;
    float64, rows whose stride is not a multiple of 16 bytes, and devices without it take an exact loop over the groups,
    which does read them. Differentiable in `x` and `weight`; a group without rows gives its matrix a zero gradient.
    Under autocast both factors are cast as `torch.nn.functional.linear` would.

    Args:
        x: rows sorted by group, shape `[rows, in]`.
        weight: one matrix a group, shape `[groups, out, in]`, in the dtype of `x`.
        offsets: int32 on the device of `x`, shape `[groups]`: the row after the last one of each group, not decreasing.
        padded: whether rows may follow `offsets[-1]`. They come out zero and get a zero gradient, at the price of two
            passes over `x` and the result; without the flag `offsets[-1]` must equal the number of rows.

    Returns:
        Shape `[rows, out]`, in the dtype of `x`.
    """
    device_type = x.device.type
    if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        x, weight = x.to(dtype), weight.to(dtype)
    if not _runs_natively(x, weight):
        return grouped_gemm_reference(x, weight, offsets)
    if not padded:
        return _native(x, weight, offsets)
    # grouped_mm leaves rows after the last group unwritten in the result and in the gradient of x: select in both.
    is_row = torch.arange(len(x), device=x.device).unsqueeze(-1) < offsets[-1]
    return torch.where(is_row, _native(torch.where(is_row, x, 0), weight, offsets), 0)


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


def _native(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    product = F.grouped_mm(x.contiguous(), weight.contiguous().transpose(-2, -1), offs=offsets)
    return _ContiguousGradient.apply(product)


class _ContiguousGradient(torch.autograd.Function):
    """Identity with a contiguous gradient: grouped_mm's backward rejects expanded ones, such as that of a sum."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor) -> Tensor:
        return grad_outputs[0].contiguous()
