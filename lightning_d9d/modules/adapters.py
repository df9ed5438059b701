"""Low-rank adapters of matrices: two thin matrices beside a frozen one (https://arxiv.org/abs/2106.09685).

[Note: adapters] A layer with an adapter computes `y = base(x) + scale * b(a(dropout(x)))`. The adapter is a module
inside the layer. So the base's parameters keep their names, and both are initialized by their own rules. `b` starts at
zero, so the layer's result does not change at first. `a` has the standard deviation of torch's linear layers.

[Note: adapters of experts] The gates and up projections of experts are one tensor, `[experts, 2 * inter, hidden]`.
Their adapters are one `a` `[experts, 2 * rank, hidden]` and one `b` `[experts, 2 * inter, rank]`. The gate's rows come
first in both, so there are two parts (`num_parts`): each multiplies its rows of `b` only with its rows of `a`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_d9d.errors import ConfigError
from lightning_d9d.modules.initial_values import Constant, DrawnByRows, Normal
from lightning_d9d.ops import adapted_linears, linear
from lightning_d9d.ops.adapted_experts import thin_product
from lightning_d9d.ops.adapted_linears import can_adapt
from lightning_d9d.ops.sharded_weights import is_sharded, local_shard


class Adapter(DrawnByRows):
    """Two thin matrices whose product is added to a weight `[..., out, in]`. [Note: adapters].

    Args:
        weight: The weight; the adapter has its dtype and device.
        rank: Number of columns of `b`, and of rows of each part of `a`.
        scale: Factor of the product.
        dropout: Probability with which an element of the input is dropped, in training.
        num_parts: Number of parts of the weight's rows; see [Note: adapters of experts].
    """

    is_merged = False
    """True while the weight includes the product, so that the adapter adds nothing."""

    def __init__(self, weight: Tensor, rank: int, *, scale: float, dropout: float = 0.0, num_parts: int = 1) -> None:
        super().__init__()
        self.rank, self.scale, self.dropout, self.num_parts = rank, scale, dropout, num_parts
        *experts, num_out, num_in = weight.shape
        self.a = nn.Parameter(weight.new_empty(*experts, num_parts * rank, num_in))
        self.b = nn.Parameter(weight.new_empty(*experts, num_out, rank))
        self.register_state_dict_post_hook(_leave_out_merged)

    def initial_values(self) -> dict[str, Normal | Constant]:
        """Return zeros for `b`; `a` scales the variance of a hidden state by 1/3, as torch's linear layers do."""
        return {"a": Normal(1 / math.sqrt(3 * self.a.shape[-1])), "b": Constant(0.0)}

    def dropped(self, x: Tensor) -> Tensor:
        """Apply dropout to the input, in training."""
        return F.dropout(x, self.dropout, self.training) if self.dropout else x

    def product(self, index: Sequence[int | slice] = ()) -> Tensor:
        """Return an indexed part of `scale * b @ a`, in float64. Local.

        With this precision, a slice equals the same part of the whole, once it is rounded to the weight's dtype.

        Args:
            index: A slice for each dim of the weight; for experts it may also be a number. By default the whole
                product.
        """
        a, b = self.a.detach(), self.b.detach()
        *experts, rows, columns = index or (slice(None),) * a.dim()
        assert isinstance(rows, slice), "rows are picked by a slice"
        a, b = a[tuple(experts)][..., columns].double(), b[tuple(experts)].double()
        start, stop, _ = rows.indices(b.shape[-2])
        length = b.shape[-2] // self.num_parts
        products = [
            part_of_b[..., max(start - first, 0) : max(stop - first, 0), :] @ part_of_a
            for first, part_of_a, part_of_b in zip(
                range(0, b.shape[-2], length), a.split(self.rank, -2), b.split(length, -2), strict=True
            )
        ]
        return torch.cat(products, -2) * self.scale

    def whole(self) -> Adapter:
        """Return this adapter with whole matrices, for `product`. Collective if the matrices are sharded."""
        return self.with_matrices(_whole(self.a), _whole(self.b))

    def with_matrices(self, a: Tensor, b: Tensor) -> Adapter:
        """Return this adapter with different matrices, for `product`. Local."""
        twin = copy(self)
        twin._parameters = {"a": nn.Parameter(a, False), "b": nn.Parameter(b, False)}
        return twin

    def train(self, mode: bool = True) -> Adapter:
        """Set the mode, as `torch.nn.Module.train`.

        Raises:
            ConfigError: The adapter is merged, but training is requested.
        """
        if mode and self.is_merged:
            raise ConfigError("the adapters of this module are merged into its weights; call unmerge(module) to train")
        return super().train(mode)


class LinearAdapter(Adapter):
    """The adapter of a linear layer."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the adapter's summand for the layer's result: shape `[..., in]` to `[..., out]`.

        With this rank's part of a sharded `a` or `b`, it is this rank's summand, or its outputs.
        """
        return linear(linear(self.dropped(x), self.a, own_part=True) * self.scale, self.b, own_part=True)


class EmbeddingAdapter(Adapter):
    """The adapter of an embedding, whose weight `[in, out]` is that of a linear layer transposed.

    `a` has shape `[rank, vocab]` and `b` has `[hidden, rank]`, so the weight gets `scale * (b @ a).T`.
    """

    def __init__(self, weight: Tensor, rank: int, *, scale: float, dropout: float = 0.0) -> None:
        super().__init__(weight.t(), rank, scale=scale, dropout=dropout)

    def initial_values(self) -> dict[str, Normal | Constant]:
        """Return zeros for `b`; the input has a single 1, so a hidden state has the variance of `a`."""
        return {"a": Normal(1 / math.sqrt(3)), "b": Constant(0.0)}

    def forward(self, ids: Tensor, look_up: Callable[[Tensor, Tensor], Tensor] = F.embedding) -> Tensor:
        """Return the adapter's summand for the embedding: ids `[...]` to `[..., hidden]`.

        Args:
            ids: Ids, as for the embedding.
            look_up: Function called with ids and rows `[vocab, rank]`: this rank's rows of a sharded `a`.
        """
        rows = look_up(ids, local_shard(self.a, ids).t())
        if self.dropout and self.training:  # of the 1 in a token's input
            rows = rows * self.dropped(rows.new_ones(*ids.shape, 1))
        return linear(rows * self.scale, self.b, own_part=True)

    def product(self, index: Sequence[int | slice] = ()) -> Tensor:
        """Return `Adapter.product` for the embedding's weight `[vocab, hidden]`."""
        return super().product(index[::-1]).t()


class HeadAdapter(Adapter):
    """The adapter of a head, whose products are computed together with its loss."""

    def extend(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs and a weight whose product is that of the head with its adapter.

        The weight is copied, and gradients are computed for the whole copy. So an adapter of the head costs more than
        its size suggests.

        Args:
            x: Shape `[..., hidden]`.
            weight: The head's weight, or this rank's rows of it.

        Returns:
            Shapes `[..., hidden + rank]` and `[vocab, hidden + rank]`.
        """
        hidden = linear(self.dropped(x), self.a, own_part=True) * self.scale
        return torch.cat([x, hidden], -1), torch.cat([local_shard(weight, x), local_shard(self.b, x)], 1)


class ExpertsAdapter(Adapter):
    """The adapters of experts that run as one grouped product; see `GroupedExperts` and [Note: adapters of experts].

    Dropout is drawn for each copy of a token; the gate and up projections of an expert share it.
    """

    @property
    def drops(self) -> bool:
        """True while dropout is applied."""
        return self.training and self.dropout > 0

    def hidden(self, x: Tensor, offsets: Tensor) -> Tensor:
        """Return `scale * a @ dropout(x)` of each row, with `x` and `offsets` of `grouped_gemm`.

        The shape is `[rows, num_parts * rank]`.
        """
        return thin_product(self.dropped(x), self.a, offsets) * self.scale


def adapter_of(module: nn.Module, name: str = "lora") -> Any:
    """Return a module's adapter of a name, if it must be applied; None if there is none, or a merged one."""
    adapter = module._modules.get(name)
    return None if adapter is None or adapter.is_merged else adapter


def adapted_linear(module: nn.Linear, input: Tensor, *, own_part: bool = False, with_bias: bool = True) -> Tensor:
    """Apply a linear layer with its adapter, if it has one.

    Args:
        module: The layer.
        input: Shape `[..., in]`.
        own_part: As in `lightning_d9d.ops.linear`.
        with_bias: Whether the layer's bias is added.
    """
    adapter = adapter_of(module)
    bias = module.bias if with_bias else None
    if bias is None and (matrices := _joined_matrices(module, adapter, input, own_part)) is not None:
        weight, a, b = matrices
        return adapted_linears(input, [weight], [a], [b], [adapter.scale])[0]
    y = linear(input, module.weight, bias, own_part=own_part)
    return y if adapter is None else y + adapter(input)


def linears_of_one_input(modules: Sequence[nn.Linear], input: Tensor) -> list[Tensor]:
    """Apply linear layers to the same input; those with adapters share common products.

    Args:
        modules: Layers, at most `lightning_d9d.ops.adapted_linears.MOST_LAYERS`.
        input: Shape `[..., in]`.

    Returns:
        The result of each layer.
    """
    matrices: dict[nn.Linear, tuple[Tensor, Tensor, Tensor]] = {}
    for module in modules:
        forward = vars(module).get("forward")
        if isinstance(forward, partial) and forward.func is adapted_linear and module.bias is None:
            own = None if has_hooks(module) else _joined_matrices(module, adapter_of(module), input, **forward.keywords)
            if own is not None:
                matrices[module] = own
    results: dict[nn.Linear, Tensor] = {}
    if matrices:
        scales = [adapter_of(module).scale for module in matrices]
        weights, a, b = zip(*matrices.values(), strict=True)
        joined = adapted_linears(input, weights, a, b, scales)
        results = dict(zip(matrices, joined, strict=True))
    return [results[module] if module in results else module(input) for module in modules]


def has_hooks(module: nn.Module) -> bool:
    """Return whether a hook is called around the module's forward."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def _joined_matrices(
    module: nn.Linear, adapter: Any, input: Tensor, own_part: bool = False
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return the weight, `a` and `b` of a layer that `adapted_linears` supports; None for other layers."""
    if adapter is None or (adapter.dropout and adapter.training) or (is_sharded(module.weight) and not own_part):
        return None
    matrices = local_shard(module.weight, input), local_shard(adapter.a, input), local_shard(adapter.b, input)
    return matrices if can_adapt(input, *matrices) else None


def adapted_embedding(module: nn.Embedding, input: Tensor) -> Tensor:
    """Apply an embedding with its adapter, if it has one."""
    y = type(module).forward(module, input)
    adapter = adapter_of(module)
    return y if adapter is None else y + adapter(input)


def _whole(parameter: Tensor) -> Tensor:
    return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach()


def _leave_out_merged(adapter: Adapter, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    """Drop the matrices of a merged adapter: the state is that of a model without adapters."""
    if adapter.is_merged:
        for name in ("a", "b"):
            state.pop(prefix + name, None)
