"""Defines who sums each gradient over its ranks: one table for all kinds of parallelism.

Tokens are split over the ranks of a pipeline stage. The gradient of the whole batch is the sum of the contributions of
all ranks' tokens. So each parameter's gradient must be summed exactly once over every axis of the ranks. With tensor
parallelism ranks compute one loss together, each for its slice of the tokens or its shard of the matrices. Then each
rank's gradient is a summand of the whole in the same way.
"""

from __future__ import annotations

import math
from enum import StrEnum

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_d9d.errors import ConfigError
from lightning_d9d.mesh import Axis, MeshDomains
from lightning_d9d.parallel.compiling import compile_blocks
from lightning_d9d.parallel.config import ParallelConfig
from lightning_d9d.parallel.data import blocks_of, is_of_experts, shard_data
from lightning_d9d.parallel.expert import shard_experts
from lightning_d9d.parallel.graphs import capture_blocks
from lightning_d9d.parallel.recompute import recompute_activations


class ShardingKind(StrEnum):
    """How a parameter is sharded or replicated over the ranks of its stage."""

    REPLICATED = "replicated"
    TENSOR = "sharded over tensor ranks"
    TENSOR_SHARED = "sharded over tensor ranks, of which several have the same part"
    FULLY_SHARDED = "fully sharded"
    TENSOR_FULLY_SHARDED = "sharded over tensor ranks, then fully sharded"
    TENSOR_SHARED_FULLY_SHARDED = "sharded over tensor ranks, of which several have the same part, then fully sharded"
    EXPERTS = "experts"
    EXPERTS_FULLY_SHARDED = "experts, fully sharded"


NOT_TENSOR_SHARDED = (ShardingKind.REPLICATED, ShardingKind.FULLY_SHARDED)
"""Kinds for which all tensor ranks have the same parameter, or the same shard of it."""


class Summed(StrEnum):
    """Who sums a gradient over an axis."""

    IN_BUCKETS = "the all-reduce of gradient buckets"
    BY_REDUCE_SCATTER = "the reduce-scatter of its FSDP2 unit"
    BY_ALL_REDUCE = "the all-reduce of its FSDP2 unit"
    AFTERWARDS = "an all-reduce of the shards, when their unit is reduced"
    WITH_TOKENS = "the messages of activations, which bring the tokens of all these ranks"


_BY_FSDP = {
    Axis.DP_REPLICATE: Summed.BY_ALL_REDUCE,
    Axis.DP_CP_SHARD: Summed.BY_REDUCE_SCATTER,
    Axis.CP_REPLICATE: Summed.BY_ALL_REDUCE,
}
WHO_SUMS: dict[ShardingKind, dict[Axis, Summed]] = {
    ShardingKind.REPLICATED: {Axis.DP: Summed.IN_BUCKETS, Axis.CP: Summed.IN_BUCKETS, Axis.TP: Summed.IN_BUCKETS},
    ShardingKind.TENSOR: {Axis.DP: Summed.IN_BUCKETS, Axis.CP: Summed.IN_BUCKETS, Axis.TP: Summed.WITH_TOKENS},
    ShardingKind.TENSOR_SHARED: {
        Axis.DP: Summed.IN_BUCKETS,
        Axis.CP: Summed.IN_BUCKETS,
        Axis.TP_SHARD: Summed.WITH_TOKENS,
        Axis.TP_REPLICATE: Summed.IN_BUCKETS,
    },
    ShardingKind.FULLY_SHARDED: {**_BY_FSDP, Axis.TP: Summed.AFTERWARDS},
    ShardingKind.TENSOR_FULLY_SHARDED: {**_BY_FSDP, Axis.TP: Summed.WITH_TOKENS},
    ShardingKind.TENSOR_SHARED_FULLY_SHARDED: {
        **_BY_FSDP,
        Axis.TP_SHARD: Summed.WITH_TOKENS,
        Axis.TP_REPLICATE: Summed.AFTERWARDS,
    },
    ShardingKind.EXPERTS: {Axis.EP_REPLICATE: Summed.IN_BUCKETS, Axis.EP_SHARD: Summed.WITH_TOKENS},
    ShardingKind.EXPERTS_FULLY_SHARDED: {
        Axis.EP_DP_REPLICATE: Summed.BY_ALL_REDUCE,
        Axis.EP_FSDP: Summed.BY_REDUCE_SCATTER,
        Axis.EP_SHARD: Summed.WITH_TOKENS,
    },
}
"""The axes that make up the ranks of a stage, and who sums over each, for each kind."""


def parallelize(stage: nn.Module, mesh: MeshDomains | None, parallel: ParallelConfig) -> None:
    """Spread experts and weights of a stage over the ranks, and compile, recompute or capture its blocks, in place.

    Tensor and context parallelism are left to `shard_tensors` and `shard_context`, which must know the model.

    Args:
        stage: A stage on the meta device.
        mesh: The mesh of all ranks; None for one process.
        parallel: The configuration; it may name the classes of the stage's blocks.
    """
    blocks = blocks_of(stage, parallel.shard_blocks)
    if mesh is not None:
        shard_experts(stage, mesh, parallel)
    compile_blocks(stage, parallel, blocks)
    recompute_activations(stage, parallel, blocks)
    capture_blocks(stage, parallel, mesh, blocks)
    if mesh is not None:
        shard_data(stage, blocks, mesh, parallel)


def sharding_kind(parameter: nn.Parameter, fully_sharded: set[nn.Parameter]) -> ShardingKind:
    """Return how a parameter of a stage is sharded.

    Args:
        parameter: A parameter in its sharded form.
        fully_sharded: Parameters that FSDP2 reduces.

    Raises:
        ConfigError: The parameter is sharded in a way that is not in the table.
    """
    axes = parameter.device_mesh.mesh_dim_names or () if isinstance(parameter, DTensor) else ()
    if parameter in fully_sharded:
        if is_of_experts(parameter) or Axis.EP_FSDP in axes:
            return ShardingKind.EXPERTS_FULLY_SHARDED
        return {
            None: ShardingKind.FULLY_SHARDED,
            ShardingKind.TENSOR: ShardingKind.TENSOR_FULLY_SHARDED,
            ShardingKind.TENSOR_SHARED: ShardingKind.TENSOR_SHARED_FULLY_SHARDED,
        }[_of_tensor_axes(parameter)]
    if not isinstance(parameter, DTensor):
        return ShardingKind.REPLICATED
    if is_of_experts(parameter):
        return ShardingKind.EXPERTS
    if (kind := _of_tensor_axes(parameter)) is not None and not {Axis.DP_CP_SHARD, Axis.DP_SHARD} & {*axes}:
        return kind
    raise ConfigError(
        f"a parameter of shape {tuple(parameter.shape)} is a DTensor placed {parameter.placements} on the axes "
        f"{', '.join(axes)}, so nothing would sum its gradient over the data-parallel ranks. Apply fully_shard too"
    )


def _of_tensor_axes(parameter: nn.Parameter) -> ShardingKind | None:
    """Return how a parameter is sharded over the axes of tensor parallelism; None if it is not."""
    if not isinstance(parameter, DTensor):
        return None
    names = parameter.device_mesh.mesh_dim_names or ()
    if Axis.TP in names:
        return ShardingKind.TENSOR
    if Axis.TP_REPLICATE not in names:
        return None
    is_shared = parameter.placements[names.index(Axis.TP_REPLICATE)].is_replicate()
    return ShardingKind.TENSOR_SHARED if is_shared else ShardingKind.TENSOR


def axes_left(kind: ShardingKind) -> list[Axis]:
    """Return the axes over which gradients of this kind remain to be summed after the backward of a stage."""
    return [axis for axis, by in WHO_SUMS[kind].items() if by in (Summed.IN_BUCKETS, Summed.AFTERWARDS)]


def group_of(kind: ShardingKind, mesh: MeshDomains, summed: Summed) -> dist.ProcessGroup | None:
    """Return the ranks over which gradients of this kind are summed in one of the ways; None for a single rank.

    Collective over all ranks if this group does not exist yet.
    """
    axes = [axis for axis, by in WHO_SUMS[kind].items() if by is summed and mesh.sizes[axis] > 1]
    num_ranks = math.prod(mesh.sizes[axis] for axis in axes)
    if num_ranks == 1:
        return None
    return mesh.everyone if num_ranks == mesh.config.world_size else mesh.group(*axes)
