from __future__ import annotations

import torch
from torch import Tensor


def multihot_from_indices(indices: Tensor, weights: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Convert the experts of tokens to a map over all experts, as other libraries for mixtures of experts expect it.

    It is differentiable in `weights`. The host does not wait.

    Args:
        indices: The experts of each token, int64 `[tokens, top_k]`, without repetitions.
        weights: Weights of these experts, `[tokens, top_k]`.
        num_experts: Number of all experts.

    Returns:
        A bool `[tokens, experts]`, True if a token visits an expert, and its weight there, otherwise 0.
    """
    shape = len(indices), num_experts
    visits = torch.zeros(shape, dtype=torch.bool, device=indices.device).scatter(1, indices, True)
    return visits, weights.new_zeros(shape).scatter(1, indices, weights)


def indices_from_multihot(visits: Tensor, weights: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Convert back from `multihot_from_indices`; experts are then in ascending order.

    Args:
        visits: Bool `[tokens, experts]`, true for `top_k` experts of each token.
        weights: Shape `[tokens, experts]`.
        top_k: Number of experts that a token visits.

    Returns:
        Indices, int64, and weights, both `[tokens, top_k]`.
    """
    num_experts = visits.shape[1]
    visited = torch.where(visits, torch.arange(num_experts, device=visits.device), num_experts)
    indices = visited.topk(top_k, dim=1, largest=False).values
    return indices, weights.gather(1, indices)
