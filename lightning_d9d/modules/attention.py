from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_d9d.modules.linear import Linear
from lightning_d9d.modules.norm import RMSNorm
from lightning_d9d.ops import attention, norm_rope_qk, rope_qk

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""Of queries, keys, values and documents, as `lightning_d9d.ops.attention`."""


class GroupedQueryAttention(nn.Module):
    """Causal self-attention in which several query heads share one key and value head.

    Queries and keys are normalised per head (RMSNorm over head_dim), then turned by their position. See
    https://arxiv.org/abs/2305.13245 for the grouping. One op does it for both, with the weights and the epsilon of
    `q_norm` and `k_norm`; these modules are called only if they or their `forward` were exchanged for others, have
    hooks, are sharded by themselves, or have two epsilons.

    `attend` is what mixes values, `lightning_d9d.ops.attention`; set it to something else that is called alike.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_key_value_heads: int,
        head_dim: int,
        *,
        norm_eps: float,
        bias: bool = False,
        initializer_range: float,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim

        def linear(in_features: int, out_features: int) -> Linear:
            return Linear(in_features, out_features, bias=bias, initializer_range=initializer_range)

        self.q_proj = linear(hidden_size, num_heads * head_dim)
        self.k_proj = linear(hidden_size, num_key_value_heads * head_dim)
        self.v_proj = linear(hidden_size, num_key_value_heads * head_dim)
        self.o_proj = linear(num_heads * head_dim, hidden_size)
        self.q_norm = RMSNorm(head_dim, norm_eps)
        self.k_norm = RMSNorm(head_dim, norm_eps)
        self.attend: Attend = attention

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], documents: Tensor | None = None) -> Tensor:
        """Attends within each row of the batch, or within each of its documents.

        Args:
            x: shape `[batch, seq, hidden]`.
            rope: tables of `rope_tables` for the positions of `x`.
            documents: what `attend` takes: integers, shape `[batch, seq]`, equal for tokens of one document.

        Returns:
            Shape `[batch, seq, hidden]`.
        """
        heads = (-1, self.head_dim)  # the number of heads is read off the projections: tensor parallelism leaves fewer
        q, k, v = (proj(x).unflatten(-1, heads) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if _is_plain(self.q_norm) and _is_plain(self.k_norm) and self.q_norm.eps == self.k_norm.eps:
            q, k = norm_rope_qk(q, k, self.q_norm.weight, self.k_norm.weight, self.q_norm.eps, *rope)
        else:
            q, k = rope_qk(self.q_norm(q), self.k_norm(k), *rope)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return self.o_proj(self.attend(q, k, v, documents).transpose(1, 2).flatten(-2))


def _is_plain(norm: nn.Module) -> bool:
    """Whether it is what it was made as. FSDP2 exchanges the class of what it gathers in a call of the module."""
    has_hooks = norm._forward_hooks or norm._forward_pre_hooks or norm._backward_hooks or norm._backward_pre_hooks
    is_exchanged = type(norm) is not RMSNorm or "forward" in vars(norm)
    return not is_exchanged and not has_hooks and not isinstance(norm.weight, DTensor)
