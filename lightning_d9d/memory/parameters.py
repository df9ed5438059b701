"""Bytes of weights, gradients and optimizer states, counted from the parameters on this rank."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer, RAdam

from lightning_d9d.mesh.sharding import local
from lightning_d9d.ops.eight_bits import scale_shape
from lightning_d9d.optim import MuonAdamW, StochasticAdamW, muon
from lightning_d9d.optim.state_dtypes import SCALES, dtype_of_states, has_codes
from lightning_d9d.parallel.data import num_shards

_MOST_PARTS = 64
_STEP_BYTES = 4
"""Bytes of the step counter that optimizers keep for each parameter, a float32 scalar."""


def weight_bytes(tensors: Iterable[Tensor]) -> int:
    """Count the bytes of parameters and buffers on this rank, each tensor once. Local."""
    held = {id(tensor): local(tensor) for tensor in tensors}
    return sum(tensor.nbytes for tensor in held.values())


def gradient_bytes(
    parameters: Iterable[nn.Parameter],
    dtype_of: Callable[[nn.Parameter], torch.dtype] = lambda parameter: parameter.dtype,
    gathered: Collection[nn.Parameter] = (),
) -> int:
    """Count the bytes of all gradients on this rank. Local.

    Args:
        parameters: Parameters; frozen ones have no gradients.
        dtype_of: Returns the dtype in which the gradient of a parameter is kept.
        gathered: Parameters whose gradients have the whole shape, not that of this rank's shard of FSDP2.
    """
    return sum(
        local(parameter).numel()
        * (num_shards(parameter) if parameter in gathered else 1)
        * dtype_of(parameter).itemsize
        for parameter in parameters
        if parameter.requires_grad
    )


def part_bytes(num_bytes: int, bucket_bytes: int) -> int:
    """Return the bytes of gradients in one part of an update inside of the backward. Local.

    Args:
        num_bytes: Bytes of all gradients. Large models have 64 parts: each part costs launches and memory.
        bucket_bytes: The size of a full bucket, which is the least size of a part.
    """
    return max(bucket_bytes, num_bytes // _MOST_PARTS)


def gathered_bytes(parameters: Iterable[nn.Parameter], dtype: torch.dtype | None) -> int:
    """Count the bytes of gathered parameters. Local.

    Args:
        parameters: Sharded parameters. The axes of tensor and expert parallelism stay sharded.
        dtype: The dtype in which they are gathered. None: their own.
    """
    return sum(
        local(parameter).numel() * num_shards(parameter) * (dtype or parameter.dtype).itemsize
        for parameter in parameters
    )


def state_bytes(optimizer: Optimizer, *, eight_bits: bool = False) -> int | None:
    """Count the bytes of the states that an optimizer will have for trained parameters. Local.

    It knows torch's Adam, AdamW, NAdam, RAdam and SGD, and this package's StochasticAdamW and MuonAdamW.

    Args:
        optimizer: It need not have stepped.
        eight_bits: Count the states of `StochasticAdamW(state_dtype=torch.uint8)` instead.

    Returns:
        The number of bytes; None for another optimizer. Subclasses count as other ones.
    """
    count = _of_stochastic_adamw if eight_bits else _STATES.get(type(optimizer))
    if count is None:
        return None
    return sum(
        count(parameter, {**group, "state_dtype": torch.uint8} if eight_bits else group)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad
    )


def states_of(optimizer: Optimizer, *, eight_bits: bool = False) -> Callable[[Tensor], int] | None:
    """Return a function that counts the bytes of states for a tensor trained by an optimizer. Local.

    Args:
        optimizer: Its first group has the settings of states.
        eight_bits: Count states of eight bits instead of those configured.

    Returns:
        None for an optimizer that `state_bytes` does not know, or that has no states of eight bits.
    """
    if eight_bits and type(optimizer) is not StochasticAdamW:
        return None
    count = _STATES.get(type(optimizer))
    group = optimizer.param_groups[0] | ({"state_dtype": torch.uint8} if eight_bits else {})
    return None if count is None else lambda tensor: count(tensor, group)


def _of_adam(parameter: Tensor, group: Mapping[str, Any]) -> int:
    return (3 if group.get("amsgrad") else 2) * local(parameter).nbytes + _STEP_BYTES


def _of_nadam(parameter: Tensor, group: Mapping[str, Any]) -> int:
    return 2 * local(parameter).nbytes + 2 * _STEP_BYTES  # and the product of momenta


def _of_sgd(parameter: Tensor, group: Mapping[str, Any]) -> int:
    return local(parameter).nbytes if group["momentum"] else 0


def _of_muon(parameter: Tensor, group: Mapping[str, Any]) -> int:
    num_states = 1 if muon.is_matrix(parameter, group) else 2
    return num_states * local(parameter).numel() * muon.dtype_of_states(parameter).itemsize


def _of_stochastic_adamw(parameter: Tensor, group: Mapping[str, Any]) -> int:
    dtype, held = group["state_dtype"], local(parameter)
    averages = 2 * held.numel() * dtype_of_states(parameter, dtype).itemsize + _STEP_BYTES
    if not has_codes(parameter, dtype) or held.numel() == 0:
        return averages
    return averages + len(SCALES) * _numel(scale_shape(tuple(held.shape)))  # blocks lie on one rank each


def _numel(shape: Iterable[int]) -> int:
    return torch.Size(shape).numel()


_STATES: dict[type[Optimizer], Callable[[Tensor, Mapping[str, Any]], int]] = {
    Adam: _of_adam,
    AdamW: _of_adam,
    RAdam: _of_adam,
    NAdam: _of_nadam,
    SGD: _of_sgd,
    MuonAdamW: _of_muon,
    StochasticAdamW: _of_stochastic_adamw,
}
