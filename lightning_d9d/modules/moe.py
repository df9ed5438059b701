from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from lightning_d9d.modules.balance import BalanceConfig, ExpertBalance
from lightning_d9d.modules.dispatch import Dispatch, LocalDispatch
from lightning_d9d.modules.experts import GroupedExperts
from lightning_d9d.modules.halves import Halves, SideStream
from lightning_d9d.modules.initial_values import Constant, DrawnByRows, Normal
from lightning_d9d.modules.linear import Linear
from lightning_d9d.modules.mlp import SwiGLU
from lightning_d9d.ops import linear, moe_route


class TopKRouter(DrawnByRows):
    """Chooses the experts of each token: softmax over all experts, then the `top_k` most probable; see `moe_route`.

    All computation is float32 (float64 in float64), whatever the model's dtype and also under autocast.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        normalize: bool,
        initializer_range: float,
        balance: BalanceConfig | None = None,
    ) -> None:
        super().__init__()
        self.top_k = top_k
        self.normalize = normalize
        self.initializer_range = initializer_range
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        self.balance = None if balance is None else ExpertBalance(num_experts, balance)
        self.reset_parameters()

    def initial_values(self) -> dict[str, Normal | Constant]:
        """Return a normal weight."""
        return {"weight": Normal(self.initializer_range)}

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Routes tokens.

        Args:
            x: Shape `[..., tokens, hidden]`.

        Returns:
            Indices of the experts and their weights, both `[all tokens, top_k]`, and the router's loss, a scalar. The
            loss is None if none is configured, and without gradient. The weights are probabilities, scaled to sum to
            one for each token if `normalize` was set.
        """
        logits = self.logits(x)
        if self.balance is not None:
            return self.balance(logits, self.top_k, normalize=self.normalize)
        routes = moe_route(logits.flatten(0, -2), self.top_k, normalize=self.normalize)
        return routes.indices, routes.weights, None

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits of all experts `[..., experts]` for tokens `[..., hidden]`."""
        return linear(x, self.weight, dtype=torch.promote_types(self.weight.dtype, torch.float32))


class SparseMoE(nn.Module):
    """Mixture of SwiGLU experts: each token visits `top_k` of them and gets their weighted sum.

    Args:
        hidden_size: Width of tokens.
        intermediate_size: Inner width of an expert.
        num_experts: Number of experts.
        top_k: Number of experts that each token visits.
        normalize: Whether the weights of a token's experts are scaled to sum to one.
        initializer_range: Standard deviation of the initial matrices.
        shared_intermediate_size: Inner width of an additional expert that all tokens visit, scaled by a sigmoid for
            each token; 0 for none.
        balance: How tokens are balanced over experts; None neither balances nor counts.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        *,
        normalize: bool,
        initializer_range: float,
        shared_intermediate_size: int = 0,
        balance: BalanceConfig | None = None,
    ) -> None:
        super().__init__()
        std = initializer_range
        self.gate = TopKRouter(
            hidden_size, num_experts, top_k, normalize=normalize, initializer_range=std, balance=balance
        )
        self.experts = GroupedExperts(num_experts, hidden_size, intermediate_size, initializer_range=std)
        self.dispatch: Dispatch = LocalDispatch(num_experts)
        self.in_halves = False
        """True if tokens go to experts on other ranks in two halves. [Note: two halves] in `halves`."""
        self.has_loss = balance is not None and balance.has_losses
        self.has_shared_expert = shared_intermediate_size > 0
        if self.has_shared_expert:
            self.shared_expert = SwiGLU(hidden_size, shared_intermediate_size, initializer_range=std)
            self.shared_expert_gate = Linear(hidden_size, 1, initializer_range=std)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor | None]:
        """Apply the mixture: shape `[..., hidden]` to the same shape; any number of tokens, including none.

        If a loss of the router is configured, it is returned, too: a scalar, or None without gradient.
        """
        flat = x.flatten(0, -2)
        indices, weights, loss = self.gate(x)
        if self.in_halves:
            y, shared = self._in_halves(flat, indices, weights)
        else:
            y, shared = self._at_once(flat, indices, weights)
        if shared is not None:
            y = y + shared
        y = y.view_as(x)
        return (y, loss) if self.has_loss else y

    def _shared(self, flat: Tensor) -> Tensor | None:
        return self.shared_expert_gate(flat).sigmoid() * self.shared_expert(flat) if self.has_shared_expert else None

    def _at_once(self, flat: Tensor, indices: Tensor, weights: Tensor) -> tuple[Tensor, Tensor | None]:
        # Before the rest: a recomputation ends with the last product, and need not bring the results back for this.
        shared = self._shared(flat)
        if isinstance(self.dispatch, LocalDispatch) and self.experts.has_adapters:
            tokens = self.dispatch.sort(flat, indices, weights)
            return self.experts(tokens.x, tokens.weights, tokens.offsets, tokens.copies), shared
        tokens = self.dispatch.dispatch(flat, indices, weights)
        results = self.experts(tokens.x, tokens.weights, tokens.offsets)
        return self.dispatch.combine(results, tokens), shared

    def _in_halves(self, flat: Tensor, indices: Tensor, weights: Tensor) -> tuple[Tensor, Tensor | None]:
        side, num_first = SideStream(flat.device), (len(flat) + 1) // 2
        sizes = [num_first, len(flat) - num_first]
        parts = [*zip(flat.split(sizes), indices.split(sizes), weights.split(sizes), strict=True)]
        tokens = [side.run(partial(self.dispatch.dispatch, *part), part, half) for half, part in enumerate(parts)]
        shared = self._shared(flat)

        def begin(half: int) -> None:
            side.wait(half, tokens[half][:3])

        def end(half: int, results: Tensor) -> Tensor:
            return side.run(partial(self.dispatch.combine, results, tokens[half]), [results], half)

        second = Halves(*tokens[1][:3], begin, end)
        sums = self.experts(*tokens[0][:3], second=second)
        for half, part in enumerate(sums):
            side.wait(half, [part])
        return torch.cat(sums), shared
