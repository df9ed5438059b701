"""Collectives on plain tensors through which gradients flow.

Together the ranks may compute one scalar loss, each from its own part. A rank's gradient of a tensor is the derivative
of this loss with respect to its own copy or part of the tensor. The backward of each collective follows from this.

All are collective over the group, in the backward too, so its ranks must agree on whether `x` requires a gradient. In a
group of one rank, the result is `x` itself without a message. The host does not wait. Each collective with a message in
the forward is one operator (`torch.ops.lightning_d9d.<name>`). So selective recomputation can keep its result by name,
and `torch.compile` takes it whole.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_d9d.errors import ConfigError
from lightning_d9d.ops.operator import define
from lightning_d9d.waits import waiting

# Torch 2.12 and earlier have only the second names, which later versions deprecate.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather_dim(x: Tensor, dim: int, group_name: str, *, sums_gradients: bool = True) -> Tensor:
    """Join the parts of all ranks along a dim, in the order of ranks. Collective.

    Its backward is `scatter_sum`, or takes this rank's part. If all dims before `dim` have length 1, only the message
    is copied.

    Args:
        x: This rank's part, with an equal shape and dtype on all ranks.
        dim: Dim along which the parts are joined.
        group_name: `group_name` of a process group of torch.
        sums_gradients: True if ranks compute different things with the whole, so that the gradient of a part is the sum
            over ranks. False if all compute the same: then the backward does not need a message.

    Returns:
        The whole, `group size` times as long along `dim`.
    """
    return x if group_size(group_name) == 1 else _gather_op(x, dim, group_name, sums_gradients)


def scatter_sum(x: Tensor, dim: int, group_name: str) -> Tensor:
    """Sum over the ranks, and return this rank's part of the sum along a dim, in the order of ranks. Collective.

    Its backward is `gather_dim`. If all dims before `dim` have length 1, only the message is copied.

    Args:
        x: This rank's summand, with an equal shape and dtype on all ranks.
        dim: Dim to split; its length is a multiple of the group's size.
        group_name: `group_name` of a process group of torch.

    Returns:
        This rank's part, in the dtype of `x`.

    Raises:
        ConfigError: The length of `dim` is not a multiple of the group's size.
    """
    size = group_size(group_name)
    if size == 1:
        return x
    if x.shape[dim] % size:
        raise ConfigError(
            f"dim {dim} of a tensor {list(x.shape)} has length {x.shape[dim]}, which {size} ranks cannot share "
            f"equally; pad it to a multiple of {size}"
        )
    return _scatter_op(x, dim, group_name)


def sum_over(x: Tensor, group_name: str, *, sums_gradients: bool) -> Tensor:
    """Return the sum over the ranks, on each of them. Collective.

    Args:
        x: This rank's summand, with an equal shape and dtype on all ranks.
        group_name: `group_name` of a process group of torch.
        sums_gradients: True if ranks compute different things with the sum. The gradient of a summand is then the sum
            over ranks, with one more message in the backward. False if all compute the same: each rank's gradient of
            the sum is that of its summand.

    Returns:
        Shape and dtype are those of `x`.
    """
    return x if group_size(group_name) == 1 else _sum_op(x, group_name, sums_gradients)


def group_size(group_name: str) -> int:
    """Return the number of ranks of a process group of torch, by its `group_name`."""
    return dist.distributed_c10d._get_group_size_by_name(group_name)  # type: ignore[arg-type]


def group_named(group_name: str) -> dist.ProcessGroup:
    """Return a process group of torch, by its `group_name`."""
    return dist.distributed_c10d._resolve_process_group(group_name)  # type: ignore[arg-type]


def _new_whole(x: Tensor, dim: int, group_name: str, sums_gradients: bool) -> Tensor:
    shape = list(x.shape)
    shape[dim] *= group_size(group_name)
    return x.new_empty(shape)


def _gather(x: Tensor, dim: int, group_name: str, sums_gradients: bool) -> Tensor:
    whole = _new_whole(x, dim, group_name, sums_gradients)
    dim %= x.dim()
    # A message has the ranks as its first dim. If all dims before are of length 1, this is the order of the whole.
    is_in_order = x.shape[:dim].numel() == 1
    parts = whole if is_in_order else torch.empty_like(whole)
    flat = x.contiguous().view(-1)
    with waiting():
        all_gather_single(parts.view(-1), flat, group=group_named(group_name))
    if not is_in_order:
        size = group_size(group_name)
        whole.unflatten(dim, (size, -1)).copy_(parts.view(size, *x.shape).movedim(0, dim))
    return whole


def _new_shard(x: Tensor, dim: int, group_name: str) -> Tensor:
    shape = list(x.shape)
    shape[dim] //= group_size(group_name)
    return x.new_empty(shape)


def _scatter(x: Tensor, dim: int, group_name: str) -> Tensor:
    part = _new_shard(x, dim, group_name)
    parts = x.unflatten(dim, (group_size(group_name), -1)).movedim(dim % x.dim(), 0).contiguous()
    with waiting():
        reduce_scatter_single(part.view(-1), parts.view(-1), group=group_named(group_name))
    return part


def _new_sum(x: Tensor, group_name: str, sums_gradients: bool) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _sum(x: Tensor, group_name: str, sums_gradients: bool) -> Tensor:
    result = x.clone(memory_format=torch.contiguous_format)
    with waiting():
        dist.all_reduce(result, group=group_named(group_name))
    return result


def _keep_dim(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.dim, ctx.group_name = inputs


def _keep_gather(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.dim, ctx.group_name, ctx.sums_gradients = inputs


def _gather_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
    if ctx.sums_gradients:
        return scatter_sum(gradient, ctx.dim, ctx.group_name), None, None, None
    rank, size = dist.get_rank(group_named(ctx.group_name)), group_size(ctx.group_name)
    return gradient.chunk(size, ctx.dim)[rank].contiguous(), None, None, None


def _scatter_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return gather_dim(gradient, ctx.dim, ctx.group_name), None, None


def _keep_sums_gradients(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.group_name, ctx.sums_gradients = inputs


def _sum_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    if ctx.sums_gradients:
        gradient = sum_over(gradient, ctx.group_name, sums_gradients=True)
    return gradient, None, None


_gather_op = define(
    "gather_dim",
    "(Tensor x, int dim, str group_name, bool sums_gradients) -> Tensor",
    _gather,
    _new_whole,
    setup_context=_keep_gather,
    backward=_gather_backward,
)
_scatter_op = define(
    "scatter_sum",
    "(Tensor x, int dim, str group_name) -> Tensor",
    _scatter,
    _new_shard,
    setup_context=_keep_dim,
    backward=_scatter_backward,
)
_sum_op = define(
    "sum_over",
    "(Tensor x, str group_name, bool sums_gradients) -> Tensor",
    _sum,
    _new_sum,
    setup_context=_keep_sums_gradients,
    backward=_sum_backward,
)
