from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_d9d.modules.dispatch import LocalDispatch
from lightning_d9d.modules.experts import GroupedExperts
from lightning_d9d.modules.initial_values import Constant, DrawnByRows, Normal
from lightning_d9d.ops import linear


class TopKRouter(DrawnByRows):
    """Chooses the experts of each token: softmax over all experts, then the `top_k` most probable."""

    def __init__(
        self, hidden_size: int, num_experts: int, top_k: int, *, normalize: bool, initializer_range: float
    ) -> None:
        super().__init__()
        self.top_k = top_k
        self.normalize = normalize
        self.initializer_range = initializer_range
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        self.reset_parameters()

    def initial_values(self) -> dict[str, Normal | Constant]:
        """A normal weight."""
        return {"weight": Normal(self.initializer_range)}

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Routes tokens.

        Args:
            x: shape `[tokens, hidden]`.

        Returns:
            Indices of the experts and their weights, both `[tokens, top_k]`. The weights are probabilities, in float32
            at least, scaled to sum to one for each token if `normalize` was set.
        """
        logits = linear(x, self.weight)
        probabilities = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        weights, indices = probabilities.topk(self.top_k, dim=-1)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return indices, weights


class SparseMoE(nn.Module):
    """Mixture of SwiGLU experts: each token visits `top_k` of them and gets their weighted sum."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        *,
        normalize: bool,
        initializer_range: float,
    ) -> None:
        super().__init__()
        self.gate = TopKRouter(
            hidden_size, num_experts, top_k, normalize=normalize, initializer_range=initializer_range
        )
        self.experts = GroupedExperts(num_experts, hidden_size, intermediate_size, initializer_range=initializer_range)
        self.dispatch = LocalDispatch(num_experts)

    def forward(self, x: Tensor) -> Tensor:
        """Shape `[..., hidden]` to the same shape; any number of tokens, also none."""
        flat = x.flatten(0, -2)
        tokens = self.dispatch.dispatch(flat, *self.gate(flat))
        results = self.experts(tokens.x, tokens.weights, tokens.offsets)
        return self.dispatch.combine(results, tokens).view_as(x)
