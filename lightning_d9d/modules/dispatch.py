from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class DispatchedTokens(NamedTuple):
    """A copy of each token for each expert that it visits, sorted by expert and, within an expert, by token."""

    x: Tensor
    """The copies, shape `[copies, hidden]`; copies = tokens * top_k."""

    weights: Tensor
    """Factor of each copy's result, shape `[copies]`."""

    offsets: Tensor
    """The row after the last one of each expert, int32, shape `[experts]`."""

    token_of_row: Tensor
    """Which token each row of `x` copies, shape `[copies]`."""

    row_of_copy: Tensor
    """Where in `x` the copies of each token are, shape `[tokens, top_k]`."""


class LocalDispatch:
    """Brings tokens to experts that are all on this device, and their results back. Nothing waits for the host."""

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts

    def dispatch(self, x: Tensor, indices: Tensor, weights: Tensor) -> DispatchedTokens:
        """Copies and sorts the tokens.

        Args:
            x: shape `[tokens, hidden]`.
            indices: the experts of each token, shape `[tokens, top_k]`.
            weights: factors of these experts' results, shape `[tokens, top_k]`.
        """
        sorted_indices, order = indices.flatten().sort(stable=True)
        experts = torch.arange(self.num_experts, device=x.device)
        offsets = torch.searchsorted(sorted_indices, experts, right=True, out_int32=True)
        token_of_row = order // indices.shape[1]
        row_of_copy = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
        row_of_copy = row_of_copy.view_as(indices)
        rows = _CopyRows.apply(x, token_of_row, row_of_copy)
        return DispatchedTokens(rows, weights.flatten().index_select(0, order), offsets, token_of_row, row_of_copy)

    def combine(self, results: Tensor, tokens: DispatchedTokens) -> Tensor:
        """Sums the results of each token's copies, shape `[tokens, hidden]`."""
        return _SumRows.apply(results, tokens.token_of_row, tokens.row_of_copy)


# Copying and summing are each other's backward. Left to autograd, the backward of the copy would add the gradients of a
# token one by one in the model's dtype, in no fixed order on CUDA.


class _CopyRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, token_of_row: Tensor, row_of_copy: Tensor) -> Tensor:
        ctx.save_for_backward(token_of_row, row_of_copy)
        return x.index_select(0, token_of_row)

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        return _SumRows.apply(*grad_outputs, *ctx.saved_tensors), None, None


class _SumRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, token_of_row: Tensor, row_of_copy: Tensor) -> Tensor:
        ctx.save_for_backward(token_of_row, row_of_copy)
        copies = rows.index_select(0, row_of_copy.flatten())
        return copies.view(*row_of_copy.shape, rows.shape[-1]).sum(1)

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        return _CopyRows.apply(*grad_outputs, *ctx.saved_tensors), None, None
