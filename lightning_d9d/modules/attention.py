from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_d9d.errors import ConfigError
from lightning_d9d.modules.adapters import has_hooks, linears_of_one_input
from lightning_d9d.modules.initial_values import Constant, DrawnByRows, Normal
from lightning_d9d.modules.linear import Linear
from lightning_d9d.modules.norm import RMSNorm
from lightning_d9d.ops import attention, norm_rope_qk, rope_qk
from lightning_d9d.ops.sharded_weights import local_shard

Attend = Callable[..., Tensor]
"""Called with queries, keys, values and documents, like `lightning_d9d.ops.attention`; by name with a window and sinks
if the module has any."""


class GroupedQueryAttention(DrawnByRows):
    """Causal self-attention in which several query heads share one key and value head.

    Queries and keys are normalised per head (RMSNorm over head_dim), then rotated by their position. See
    https://arxiv.org/abs/2305.13245 for the grouping. One op does this for both, with the weights and the epsilon of
    `q_norm` and `k_norm`. These modules are called only in special cases: if they or their `forward` were replaced,
    have hooks, are sharded separately, or have different options.

    `attend` mixes values and is `lightning_d9d.ops.attention`; set it to another function with the same arguments.

    Args:
        hidden_size: Width of the residual stream.
        num_heads: query heads.
        num_key_value_heads: Number of heads of keys and values; divides `num_heads`.
        head_dim: Width of a head.
        norm_eps: Epsilon of the norms of queries and keys.
        bias: Whether the projections have a bias.
        initializer_range: Standard deviation of the initial matrices.
        window: Maximum number of tokens that a token sees, itself and those before it; None for all.
        sinks: Whether each head has a learned score of an additional key, whose value is zero
            (https://arxiv.org/abs/2309.17453). The score starts at 0.
        interleaved: Whether rotary positions rotate elements 2 i and 2 i + 1 of a head together; otherwise i and i +
            pairs.

    Raises:
        ConfigError: The window is empty.
    """

    sinks: nn.Parameter | None

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
        window: int | None = None,
        sinks: bool = False,
        interleaved: bool = False,
    ) -> None:
        super().__init__()
        if window is not None and window < 1:
            raise ConfigError(f"window={window} must be 1 or more, because a token sees itself; None sets no window")
        self.head_dim, self.window, self.interleaved = head_dim, window, interleaved

        def linear(in_features: int, out_features: int) -> Linear:
            return Linear(in_features, out_features, bias=bias, initializer_range=initializer_range)

        self.q_proj = linear(hidden_size, num_heads * head_dim)
        self.k_proj = linear(hidden_size, num_key_value_heads * head_dim)
        self.v_proj = linear(hidden_size, num_key_value_heads * head_dim)
        self.o_proj = linear(num_heads * head_dim, hidden_size)
        self.q_norm = RMSNorm(head_dim, norm_eps)
        self.k_norm = RMSNorm(head_dim, norm_eps)
        self.attend: Attend = attention
        self.register_parameter("sinks", nn.Parameter(torch.empty(num_heads)) if sinks else None)
        self.reset_parameters()

    def initial_values(self) -> dict[str, Normal | Constant]:
        """Return zeros for the sinks, if there are any."""
        return {} if self.sinks is None else {"sinks": Constant(0.0)}

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], documents: Tensor | None = None) -> Tensor:
        """Attend within each row of the batch, or within each of its documents.

        Args:
            x: Shape `[batch, seq, hidden]`.
            rope: Tables of `rope_tables` for the positions of `x`.
            documents: Documents for `attend`: integers, shape `[batch, seq]`, equal for tokens of one document.

        Returns:
            Shape `[batch, seq, hidden]`.
        """
        heads = (-1, self.head_dim)  # the number of heads is read off the projections: tensor parallelism leaves fewer
        projections = linears_of_one_input([self.q_proj, self.k_proj, self.v_proj], x)
        q, k, v = (projection.unflatten(-1, heads) for projection in projections)
        q_norm, k_norm = self.q_norm, self.k_norm
        if _is_plain(q_norm) and _is_plain(k_norm) and _are_alike(q_norm, k_norm):
            q, k = norm_rope_qk(
                q,
                k,
                q_norm.weight,
                k_norm.weight,
                q_norm.eps,
                *rope,
                interleaved=self.interleaved,
                zero_centered=q_norm.zero_centered,
            )
        else:
            q, k = rope_qk(q_norm(q), k_norm(k), *rope, interleaved=self.interleaved)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if self.window is None and self.sinks is None:  # any `attend` will do
            mixed = self.attend(q, k, v, documents)
        else:
            sinks = None if self.sinks is None else local_shard(self.sinks, q)
            mixed = self.attend(q, k, v, documents, window=self.window, sinks=sinks)
        return self.o_proj(mixed.transpose(1, 2).flatten(-2))


def _is_plain(norm: nn.Module) -> bool:
    """Return whether a norm is unchanged since it was built. FSDP2 replaces the class of a module that it gathers."""
    is_exchanged = type(norm) is not RMSNorm or "forward" in vars(norm)
    return not is_exchanged and not has_hooks(norm) and not isinstance(norm.weight, DTensor)


def _are_alike(norm: RMSNorm, other: RMSNorm) -> bool:
    return norm.eps == other.eps and norm.zero_centered == other.zero_centered
