"""The names of all axes along which ranks are split. No other file has them as literals."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Axis(StrEnum):
    """The name of a mesh axis, equal to the plain string: `mesh.sizes["tp"]` and `mesh.sizes[Axis.TP]` are the same.

    Messages and `repr` show the plain string. Dictionaries that leave the package, and torch meshes, have plain
    strings as keys and names, so that checkpoints with them load with `weights_only=True`.
    """

    PP = "pp"
    """Pipeline parallelism: ranks hold different stages."""
    DP = "dp"
    """Data parallelism: ranks read different samples. It combines `DP_REPLICATE` and `DP_SHARD`."""
    DP_REPLICATE = "dp_replicate"
    """Data parallelism with replicated weights."""
    DP_SHARD = "dp_shard"
    """Data parallelism with sharded weights (FSDP)."""
    CP = "cp"
    """Context parallelism: ranks hold different chunks of the same sequences. It combines `CP_SHARD` and
    `CP_REPLICATE`."""
    CP_SHARD = "cp_shard"
    """Context parallelism with sharded weights."""
    CP_REPLICATE = "cp_replicate"
    """Context parallelism with replicated weights."""
    DP_CP_SHARD = "dp_cp_shard"
    """Full sharding (FSDP) of all weights except experts: `DP_SHARD` and `CP_SHARD` combined."""
    DP_CP_REPLICATE = "dp_cp_replicate"
    """Replicas of all weights except experts: `DP_REPLICATE` and `CP_REPLICATE` combined."""
    TP = "tp"
    """Tensor parallelism: ranks hold different shards of each matrix."""
    TP_SHARD = "tp_shard"
    """Part of tensor parallelism if a matrix has fewer shards than `TP` has ranks: along this axis, shards differ."""
    TP_REPLICATE = "tp_replicate"
    """Part of tensor parallelism if a matrix has fewer shards than `TP` has ranks: along this axis, shards are
    replicated."""
    EP_SHARD = "ep_shard"
    """Expert parallelism: ranks hold different experts."""
    EP_REPLICATE = "ep_replicate"
    """Expert-data parallelism: ranks hold the same experts. It combines `EP_DP_REPLICATE` and `EP_FSDP`."""
    EP_DP_REPLICATE = "ep_dp_replicate"
    """Replicas of the same experts."""
    EP_FSDP = "ep_fsdp"
    """Full sharding (FSDP) of the same experts."""
    WORLD = "world"
    """All ranks."""

    def __repr__(self) -> str:
        return repr(self.value)


def plain(sizes: Mapping[Axis, int]) -> dict[str, int]:
    """Return the same sizes with plain strings as keys, for use outside of the package. Local."""
    return {axis.value: size for axis, size in sizes.items()}


def submesh(device_mesh: DeviceMesh, *axes: Axis | str) -> DeviceMesh:
    """Take some axes of a mesh as a separate mesh, which has plain strings as names. Local.

    Args:
        device_mesh: A mesh that has these axes.
        axes: The axes, in the order of the mesh.
    """
    return device_mesh[tuple(map(str, axes))]
