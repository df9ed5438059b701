from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from lightning_d9d.modules.linear import Linear
from lightning_d9d.modules.norm import HeadNorm
from lightning_d9d.ops import attention

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""Of queries, keys, values and documents, as `lightning_d9d.ops.attention`."""


class GroupedQueryAttention(nn.Module):
    """Causal self-attention in which several query heads share one key and value head.

    Queries and keys are normalised per head (RMSNorm over head_dim), then turned by their position. See
    https://arxiv.org/abs/2305.13245 for the grouping.

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
        self.q_norm = HeadNorm(head_dim, norm_eps)
        self.k_norm = HeadNorm(head_dim, norm_eps)
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
        q = self.q_norm(self.q_proj(x).unflatten(-1, heads), *rope)
        k = self.k_norm(self.k_proj(x).unflatten(-1, heads), *rope)
        v = self.v_proj(x).unflatten(-1, heads)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return self.o_proj(self.attend(q, k, v, documents).transpose(1, 2).flatten(-2))
