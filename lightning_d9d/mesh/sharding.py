"""Shards of DTensors: the part that this rank holds, and how parameters become DTensors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Placement


class Sharding(NamedTuple):
    """The device mesh and placements of a DTensor."""

    device_mesh: DeviceMesh
    placements: tuple[Placement, ...]


def sharding_of(tensor: object) -> Sharding | None:
    """Return the sharding of a DTensor; None for a plain tensor, which is the same on all ranks. Local."""
    return Sharding(tensor.device_mesh, tuple(tensor.placements)) if isinstance(tensor, DTensor) else None


def local(tensor: Tensor) -> Tensor:
    """Return the shard of a DTensor that this rank holds, without a graph; a plain tensor is returned unchanged."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def distribute(module: nn.Module, name: str, device_mesh: DeviceMesh, placements: Sequence[Placement]) -> None:
    """Turn a module's parameter into a DTensor, in place; each rank keeps its shard of its own values. Local."""
    parameter = module.get_parameter(name)
    distributed = distribute_tensor(parameter.data, device_mesh, placements, src_data_rank=None)
    setattr(module, name, nn.Parameter(distributed, parameter.requires_grad))


def local_ranges(tensor: Tensor) -> list[range]:
    """Return the global indices that this rank holds in each dim: all of them unless `tensor` is a DTensor.

    Raises:
        RuntimeError: The shards of the DTensor differ from those that `distribute_tensor` and `fully_shard` make.
    """
    if not isinstance(tensor, DTensor):
        return list(map(range, tensor.shape))
    ranges = ranges_on(tensor.shape, tensor.device_mesh, tensor.placements)
    if tuple(map(len, ranges)) != tuple(tensor.to_local().shape):
        raise RuntimeError(
            f"rank {dist.get_rank()} holds {tuple(tensor.to_local().shape)} of a tensor of shape "
            f"{tuple(tensor.shape)}, but its placements {tensor.placements} on {tensor.device_mesh} give "
            f"{tuple(map(len, ranges))}"
        )
    return ranges


def ranges_on(shape: Sequence[int], device_mesh: DeviceMesh, placements: Sequence[Placement]) -> list[range]:
    """Return the global indices that this rank holds in each dim of a tensor with this mesh and placements."""
    coordinate = device_mesh.get_coordinate()
    assert coordinate is not None, "a rank holds only tensors of meshes that it is in"
    return [_local_range(length, dim, device_mesh, placements, coordinate) for dim, length in enumerate(shape)]


def ranges_of_ranks(tensor: Tensor, dim: int) -> Iterator[tuple[int, range]]:
    """Return the ranges of one dim of a DTensor that ranks hold, each with the first rank that holds it. Local."""
    assert isinstance(tensor, DTensor)
    mesh, placements = tensor.device_mesh, tensor.placements
    shards = [getattr(placement, "dim", None) == dim for placement in placements]
    sizes = [size if is_sharded else 1 for size, is_sharded in zip(mesh.shape, shards, strict=True)]
    for coordinate in itertools.product(*map(range, sizes)):
        yield int(mesh.mesh[coordinate]), _local_range(tensor.shape[dim], dim, mesh, placements, coordinate)


def zeros_beside(tensor: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Make zeros of another shape with the same number of dims, on the tensor's device and with the same sharding.

    Local.
    """
    if not isinstance(tensor, DTensor):
        return torch.zeros(shape, dtype=dtype, device=tensor.device)
    held = [len(each) for each in ranges_on(shape, tensor.device_mesh, tensor.placements)]
    part = torch.zeros(held, dtype=dtype, device=tensor.device_mesh.device_type)
    stride = torch.empty(shape, device="meta").stride()
    whole = {"shape": torch.Size(shape), "stride": stride}
    placed = DTensor.from_local(part, tensor.device_mesh, tensor.placements, run_check=False, **whole)
    return placed.to(tensor.device)  # the CPU where parameters are offloaded


def _local_range(
    length: int, dim: int, device_mesh: DeviceMesh, placements: Sequence[Placement], coordinate: Sequence[int]
) -> range:
    held = range(length)
    shards = [
        (device_mesh.size(axis), coordinate[axis], placement)
        for axis, placement in enumerate(placements)
        if getattr(placement, "dim", None) == dim
    ]
    # `fully_shard` shards the result of tensor or expert parallelism, though its axis comes first: it has a split
    # factor.
    for parts, part, _ in sorted(shards, key=lambda shard: hasattr(shard[2], "split_factor")):
        size = math.ceil(len(held) / parts)
        held = held[part * size : (part + 1) * size]
    return held
