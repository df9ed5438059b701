"""Weights that are DTensors, in ops that multiply a plain tensor with this rank's part."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


def local_shard(weight: Tensor, x: Tensor) -> Tensor:
    """Return the tensor to multiply with `x`: this rank's part of a DTensor, unless `x` is a DTensor as well.

    `as_gradient` converts the gradient.
    """
    return weight.to_local() if isinstance(weight, DTensor) and not isinstance(x, DTensor) else weight


def is_sharded(weight: Tensor) -> bool:
    """Return True if no rank holds the whole weight."""
    return isinstance(weight, DTensor) and not all(placement.is_replicate() for placement in weight.placements)


def as_gradient(gradient: Tensor, weight: Tensor) -> Tensor:
    """Return this rank's part of the gradient of `weight`, a DTensor with the same mesh and placements if that is one.

    Nothing is communicated. Also for a replicated weight, it is the summand of this rank alone.
    """
    if not isinstance(weight, DTensor) or isinstance(gradient, DTensor):
        return gradient
    return DTensor.from_local(
        gradient,
        weight.device_mesh,
        weight.placements,
        run_check=False,
        shape=weight.shape,
        stride=weight.stride(),
    )
