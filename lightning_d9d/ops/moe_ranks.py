from __future__ import annotations

import torch
from torch import Tensor

from lightning_d9d.ops.backend import runs_triton
from lightning_d9d.ops.operator import define


def ranks_once(experts: Tensor, num_local: int, num_ranks: int) -> Tensor:
    """Return the ranks of each token's experts, where only the first of equal ones is kept. The host does not wait.

    Args:
        experts: The experts of each token, int32 or int64 `[tokens, top_k]`.
        num_local: Number of experts of a rank. Rank r has those from `r * num_local` on.
        num_ranks: Number of ranks.

    Returns:
        Int32 `[tokens, top_k]`, with `num_ranks` in place of a rank that is already in the row.
    """
    return (_ranks_op if runs_triton(experts) else ranks_once_reference)(experts, num_local, num_ranks)


def ranks_once_reference(experts: Tensor, num_local: int, num_ranks: int) -> Tensor:
    """Compute `ranks_once` with torch's own operators."""
    ranks = experts // num_local
    is_equal = ranks.unsqueeze(2) == ranks.unsqueeze(1)  # [tokens, top_k, top_k]
    return torch.where(is_equal.tril(-1).any(2), num_ranks, ranks).int()


def _new_ranks(experts: Tensor, num_local: int, num_ranks: int) -> Tensor:
    return experts.new_empty(experts.shape, dtype=torch.int32)


def _ranks(experts: Tensor, num_local: int, num_ranks: int) -> Tensor:
    from lightning_d9d.ops.kernels import moe_ranks as kernels

    ranks = _new_ranks(experts, num_local, num_ranks)
    kernels.ranks_once(experts.contiguous(), num_local, num_ranks, ranks)
    return ranks


_ranks_op = define("moe_ranks", "(Tensor experts, int num_local, int num_ranks) -> Tensor", _ranks, _new_ranks)
