"""Who sums each gradient over the ranks that have a part in it: one table for all kinds of parallelism.

Tokens are split over the ranks of a pipeline stage. The gradient of the whole batch is the sum of what each rank's
tokens contribute, so for each parameter every axis of the ranks must be summed over exactly once: by somebody, and by
nobody else.
"""

from __future__ import annotations

import math
from enum import StrEnum

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from lightning_d9d.errors import ConfigError
from lightning_d9d.mesh import MeshDomains
from lightning_d9d.parallel.config import ParallelConfig
from lightning_d9d.parallel.data import blocks_of, is_of_experts, shard_data
from lightning_d9d.parallel.expert import shard_experts
from lightning_d9d.parallel.recompute import recompute_activations


class Layout(StrEnum):
    """How a parameter lies on the ranks of its stage."""

    REPLICATED = "replicated"
    FULLY_SHARDED = "fully sharded"
    EXPERTS = "experts"
    EXPERTS_FULLY_SHARDED = "experts, fully sharded"


class Summed(StrEnum):
    """Who sums a gradient over an axis."""

    IN_BUCKETS = "the all-reduce of gradient buckets"
    BY_REDUCE_SCATTER = "the reduce-scatter of its FSDP2 unit"
    BY_ALL_REDUCE = "the all-reduce of its FSDP2 unit"
    WITH_TOKENS = "the all-to-alls, which bring the tokens of all these ranks"


WHO_SUMS: dict[Layout, dict[str, Summed]] = {
    Layout.REPLICATED: {"dp": Summed.IN_BUCKETS},
    Layout.FULLY_SHARDED: {"dp_replicate": Summed.BY_ALL_REDUCE, "dp_cp_shard": Summed.BY_REDUCE_SCATTER},
    Layout.EXPERTS: {"ep_replicate": Summed.IN_BUCKETS, "ep_shard": Summed.WITH_TOKENS},
    Layout.EXPERTS_FULLY_SHARDED: {
        "ep_dp_replicate": Summed.BY_ALL_REDUCE,
        "ep_fsdp": Summed.BY_REDUCE_SCATTER,
        "ep_shard": Summed.WITH_TOKENS,
    },
}
"""For each layout the axes that make up the ranks of a stage, and who sums over each."""


def parallelize(stage: nn.Module, mesh: MeshDomains | None, parallel: ParallelConfig) -> None:
    """Spread a stage over the ranks, in place, in the order in which the kinds of parallelism go together.

    Args:
        stage: On the meta device.
        mesh: Of all ranks; None for one process.
        parallel: The configuration; it may name the classes of the stage's blocks.
    """
    blocks = blocks_of(stage, parallel.shard_blocks)
    if mesh is not None:
        shard_experts(stage, mesh, parallel)
    recompute_activations(stage, parallel, blocks)
    if mesh is not None:
        shard_data(stage, blocks, mesh, parallel)


def fully_sharded(module: nn.Module) -> set[nn.Parameter]:
    """The parameters that FSDP2 reduces, in their sharded form."""
    units = [unit for unit in module.modules() if isinstance(unit, FSDPModule)]
    groups = [fully_shard.state(unit)._fsdp_param_group for unit in units]  # type: ignore[attr-defined]
    return {each.sharded_param for group in groups if group is not None for each in group.fsdp_params}


def layout_of(parameter: nn.Parameter, fully_sharded: set[nn.Parameter]) -> Layout:
    """How a parameter of a stage lies.

    Args:
        parameter: In its sharded form.
        fully_sharded: What FSDP2 reduces.

    Raises:
        ConfigError: It lies in a way that the table does not know.
    """
    axes = parameter.device_mesh.mesh_dim_names or () if isinstance(parameter, DTensor) else ()
    if parameter in fully_sharded:
        of_experts = is_of_experts(parameter) or "ep_fsdp" in axes
        return Layout.EXPERTS_FULLY_SHARDED if of_experts else Layout.FULLY_SHARDED
    if not isinstance(parameter, DTensor):
        return Layout.REPLICATED
    if is_of_experts(parameter):
        return Layout.EXPERTS
    raise ConfigError(
        f"a parameter of shape {tuple(parameter.shape)} is a DTensor placed {parameter.placements} on the axes "
        f"{', '.join(axes)}, and nothing would sum its gradient over the data-parallel ranks: apply fully_shard too"
    )


def bucket_group(layout: Layout, mesh: MeshDomains) -> dist.ProcessGroup | None:
    """The ranks over which gradient buckets sum parameters of this layout; None where they need not."""
    axes = [axis for axis, summed in WHO_SUMS[layout].items() if summed is Summed.IN_BUCKETS]
    num_ranks = math.prod(mesh.sizes[axis] for axis in axes)
    if num_ranks == 1:
        return None
    return dist.group.WORLD if num_ranks == mesh.config.world_size else mesh.group(*axes)
