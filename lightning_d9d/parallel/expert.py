"""Spreads experts over ranks: each rank has some experts whole, or a shard of each of some.

[Note: where experts lie] `expert_parallel` consecutive ranks of a pipeline stage hold one copy of the experts (axis
`ep_shard`). Tokens are sent between these ranks. The ranks that hold the same experts (axis `ep_replicate`) have copies
of them. If weights are fully sharded, these ranks share each copy within a replica instead. Then `ep_replicate` is
split into `ep_dp_replicate`, which holds copies as for all other weights, and `ep_fsdp`, which fully shards them. A
copy that spans as many ranks as a replica, or more, is not fully sharded. It is still a unit of FSDP2 if it is gathered
in another dtype, or kept in host memory.

[Note: units of their own] A block's gradients are reduced when all of its backward is done. If its experts' gradients
were among them, one rank could reduce between the two all-to-alls of another rank's backward, and both would wait. So
experts are a separate unit, reduced over their own ranks.
"""

from __future__ import annotations

from functools import partial

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard

from lightning_d9d.errors import ConfigError
from lightning_d9d.mesh import Axis, MeshDomains
from lightning_d9d.mesh.axes import submesh
from lightning_d9d.mesh.sharding import distribute
from lightning_d9d.modules import SparseMoE
from lightning_d9d.modules.dispatch import AllToAllDispatch, Dispatch
from lightning_d9d.modules.peer_dispatch import PeerDispatch, peer_exchange
from lightning_d9d.parallel.config import ParallelConfig
from lightning_d9d.parallel.data import place, settings


def shard_experts(module: nn.Module, mesh: MeshDomains, parallel: ParallelConfig) -> None:
    """Spread the experts of every `SparseMoE` in a module over ranks, in place; `parallel/expert.py` says where.

    Collective, like `fully_shard`: every rank must shard the same.

    Args:
        module: A module on the meta device, or with equal values on all ranks. Its data is not sharded yet.
        mesh: The mesh of all ranks.
        parallel: How tokens are sent; for fully sharded experts also when to reshard, and the dtypes.

    Raises:
        ConfigError: `expert_parallel` does not divide the number of experts, or the requested dispatch is not possible.
    """
    num_parts = mesh.sizes[Axis.EP_SHARD]
    _check_dispatch(parallel, num_parts)
    if num_parts * mesh.sizes[Axis.TP] * mesh.sizes[Axis.CP_REPLICATE] == 1:
        return  # they lie as all other weights do
    for moe in [each for each in module.modules() if isinstance(each, SparseMoE)]:
        if num_parts > 1:
            moe.dispatch = _dispatch(moe.experts.gate_up_proj.shape[0], mesh, parallel)
            moe.in_halves = parallel.overlap_experts
        _shard(moe.experts, mesh, parallel)


def are_units(mesh: MeshDomains, parallel: ParallelConfig) -> bool:
    """Return whether experts that are spread over ranks are units of FSDP2. See [Note: where experts lie]."""
    return mesh.sizes[Axis.DP_CP_SHARD] > 1 and (
        mesh.config.expert_weights()[Axis.EP_FSDP] > 1 or parallel.gather_dtype is not None or parallel.offload
    )


def _shard(experts: nn.Module, mesh: MeshDomains, parallel: ParallelConfig) -> None:
    if not are_units(mesh, parallel):
        _distribute(experts, mesh.for_axes(Axis.EP_REPLICATE, Axis.EP_SHARD), (Replicate(), Shard(0)))
        return
    whole = mesh.expert_weights
    if mesh.sizes[Axis.EP_SHARD] > 1:
        _distribute(experts, submesh(whole, Axis.EP_SHARD), (Shard(0),))
    axes = (Axis.EP_DP_REPLICATE, Axis.EP_FSDP) if submesh(whole, Axis.EP_DP_REPLICATE).size() > 1 else (Axis.EP_FSDP,)
    fully_shard(
        experts,
        mesh=submesh(whole, *axes),
        shard_placement_fn=partial(place, submesh(whole, Axis.EP_FSDP).size()),
        **settings(experts, parallel, casts_inputs=False),
    )


def _distribute(experts: nn.Module, device_mesh: DeviceMesh, placements: tuple[Replicate | Shard, ...]) -> None:
    for part in experts.modules():  # adapters are parts
        for name, _ in list(part.named_parameters(recurse=False)):
            distribute(part, name, device_mesh, placements)


def _dispatch(num_experts: int, mesh: MeshDomains, parallel: ParallelConfig) -> Dispatch:
    group = mesh.group(Axis.EP_SHARD, lane="moe")
    if parallel.expert_dispatch == "peer":
        return PeerDispatch(num_experts, group, peer_exchange(mesh, group, parallel.expert_capacity))
    return AllToAllDispatch(num_experts, group)


def _check_dispatch(parallel: ParallelConfig, num_parts: int) -> None:
    if parallel.expert_dispatch == "local" and num_parts > 1:
        raise ConfigError(
            f"ParallelConfig.expert_dispatch='local' with MeshConfig.expert_parallel={num_parts}: tokens must reach "
            "experts on other ranks; leave it 'auto'"
        )
