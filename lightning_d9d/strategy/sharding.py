"""Checks a module that shards itself, and finds gradients that are still to be summed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from lightning_d9d.errors import ConfigError
from lightning_d9d.mesh import Axis, MeshConfig, MeshDomains
from lightning_d9d.mesh.collectives import (
    all_gather_object,
    broadcast_tensors,
    check_equal_tensors,
    digest,
    first_difference,
)
from lightning_d9d.parallel import (
    ParallelConfig,
    blocks_of,
    capture_blocks,
    compile_blocks,
    recompute_activations,
    weight_mesh,
)
from lightning_d9d.parallel.data import as_unit, class_name, is_of_experts, separable, settings
from lightning_d9d.parallel.fsdp import reduce_unused
from lightning_d9d.pipeline.types import StageInfo
from lightning_d9d.strategy.offload import move

_FIELDS = {Axis.DP_SHARD: "data_parallel_shard", Axis.TP: "tensor_parallel", Axis.EP_SHARD: "expert_parallel"}
"""Axes over which a module's parameters must be sharded, and the degrees that they come from."""
_REMEDIES = {
    Axis.DP_SHARD: 'Shard it in configure_model by fully_shard(block, mesh=self.trainer.strategy.mesh.for_axes("dp_cp_'
    'shard")), or name the class of its blocks by ParallelConfig(shard_blocks=["Block"])',
    Axis.TP: "Shard it in configure_model by torch's parallelize_module(block, self.trainer.strategy.mesh.for_axes("
    '"tp"), plan)',
    Axis.EP_SHARD: "Build its experts as lightning_d9d.modules.SparseMoE, and spread them in configure_model by "
    "lightning_d9d.parallel.shard_experts(self, self.trainer.strategy.mesh, ParallelConfig())",
}
"""The remedy for an axis that shards nothing of a plain LightningModule."""
_REMEDIES_OF_STAGES = {
    Axis.DP_SHARD: "Call super().parallelize_stage(stage, mesh, parallel) in its parallelize_stage, or "
    "lightning_d9d.parallel.shard_data(stage, blocks, mesh, parallel)",
    Axis.TP: "Call lightning_d9d.parallel.shard_tensors(stage, mesh) in its parallelize_stage; that shards "
    "GroupedQueryAttention, SwiGLU, TokenEmbedding and LMHead of lightning_d9d.modules. For other layers use a plain "
    "LightningModule, which calls torch's parallelize_module in configure_model",
    Axis.EP_SHARD: "Build its experts as lightning_d9d.modules.SparseMoE; if it has its own parallelize_stage, call "
    "lightning_d9d.parallel.shard_experts(stage, mesh, parallel) there",
}
"""The remedy for an axis that shards nothing of a D9DModule."""

_SHARDED_WITH = "_sharded_with"
"""The attribute in which a block of a plain module keeps the configuration of its sharding."""


def is_sharded(module: nn.Module) -> bool:
    """Return whether some parameter or buffer is a DTensor."""
    return any(isinstance(tensor, DTensor) for tensor in (*module.parameters(), *module.buffers()))


def stage_places(infos: Iterable[StageInfo]) -> list[tuple[int, int, range | None]]:
    """Return values that identify stages: their places in the pipeline, and the layers of each."""
    return [(info.index, info.num_stages, info.layers if info.num_stages > 1 else None) for info in infos]


def spread_with(mesh: MeshConfig, parallel: ParallelConfig) -> tuple[MeshConfig, ParallelConfig]:
    """Return the settings that change how stages are spread, without those that have no effect if no axis shards."""
    plain = MeshConfig(pipeline_parallel=mesh.pipeline_parallel, data_parallel_replicate=mesh.data_parallel_replicate)
    if mesh != plain:
        return mesh, parallel
    return MeshConfig(), ParallelConfig(recompute=parallel.recompute, shard_blocks=parallel.shard_blocks)


def differing(
    one: tuple[MeshConfig, ParallelConfig], other: tuple[MeshConfig, ParallelConfig]
) -> tuple[list[str], list[str]]:
    """Return the fields in which two configurations differ, with the values of each.

    The dispatch of experts is left out: it changes no tensor, and the strategy chooses it.
    """
    pairs = [
        (f"{type(a).__name__}.{field.name}=", getattr(a, field.name), getattr(b, field.name))
        for a, b in zip(one, other, strict=True)
        for field in fields(a)
        if field.name != "expert_dispatch" and getattr(a, field.name) != getattr(b, field.name)
    ]
    return [f"{name}{a!r}" for name, a, _ in pairs], [f"{name}{b!r}" for name, _, b in pairs]


def check_sharding(module: nn.Module, mesh: MeshDomains, group: dist.ProcessGroup | None, *, is_staged: bool) -> None:
    """Check that tensors which differ between ranks are DTensors, and that degrees above 1 are used. Collective.

    A plain tensor means a copy. Ranks that read the same samples must hold the same values, since a checkpoint would
    keep only one of several. (Ranks that read other samples get rank 0's copy afterwards, as under DDP.)

    Args:
        module: Built.
        mesh: Mesh of all ranks.
        group: Group of the ranks that hold the same stages; None for all.
        is_staged: Whether the module is a D9DModule.

    Raises:
        RankError: Names, shapes, dtypes or placements differ between ranks.
        ConfigError: The values of a plain tensor differ, or no parameter is sharded over an axis; raised on every rank.
    """
    tensors = dict([*module.named_parameters(), *module.named_buffers()])
    check_equal_tensors(tensors, group)
    if mesh.sizes[Axis.CP] * mesh.sizes[Axis.TP] > 1:
        plain = {name: tensor for name, tensor in tensors.items() if not isinstance(tensor, DTensor)}
        _check_copies(plain, mesh)
    meshes = [parameter.device_mesh for parameter in module.parameters() if isinstance(parameter, DTensor)]
    for axis, field in _FIELDS.items():
        if mesh.sizes[axis] == 1:
            continue
        ranks = set(dist.get_process_group_ranks(mesh.group(axis)))
        if axis == Axis.EP_SHARD:  # its ranks are those of other axes, too
            lies_on_it = any(axis in (each.mesh_dim_names or ()) for each in meshes)
        else:  # the ranks of experts are tensor ranks, too, without being sharded over them
            lies_on_it = any(ranks <= _ranks(each) for each in meshes if axis != Axis.TP or not _is_of_experts(each))
        if mesh.sizes[Axis.PP] > 1:  # a stage may have no such parameter
            lies_on_it = any(all_gather_object(lies_on_it, mesh.group(Axis.PP)))
        if not lies_on_it:
            remedy = (_REMEDIES_OF_STAGES if is_staged else _REMEDIES)[axis]
            instead = f"leave {field} at 1" if axis == Axis.EP_SHARD else "give these ranks to data_parallel_replicate"
            raise ConfigError(
                f"MeshConfig.{field}={len(ranks)}, but no parameter of {type(module).__name__} is a DTensor over the "
                f"axis {axis!r}: ranks would train copies. {remedy}. Or {instead}"
            )


def _is_of_experts(mesh: DeviceMesh) -> bool:
    return any(axis.startswith("ep_") for axis in mesh.mesh_dim_names or ())


def _check_copies(tensors: Mapping[str, Tensor], mesh: MeshDomains) -> None:
    """Compare hashes of values between the ranks that read the same samples. Collective over them."""
    lines = [f"{name} with hash {digest([tensor])[:16]}" for name, tensor in tensors.items()]
    if difference := first_difference(lines, mesh.group(Axis.CP, Axis.TP)):
        raise ConfigError(
            f"ranks that read the same samples hold different values of a plain tensor: {difference} (ranks of the "
            f"group of {mesh.rank_name}). Tensors that are sharded must be DTensors; for copies use the same seed on "
            "all ranks (seed_everything) before the module is built"
        )


def make_replicas_equal(tensors: Iterable[Tensor]) -> None:
    """Overwrite copies of shards with the first one, along each axis on which a DTensor is replicated. Collective."""
    by_group: dict[dist.ProcessGroup, list[Tensor]] = {}
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            for axis, placement in enumerate(tensor.placements):
                if placement.is_replicate() and mesh.size(axis) > 1:
                    by_group.setdefault(mesh.get_group(axis), []).append(tensor.to_local())
    for group, copies in by_group.items():
        broadcast_tensors(copies, group, dist.get_process_group_ranks(group)[0])


def prepare_blocks(module: nn.Module, parallel: ParallelConfig, mesh: MeshDomains | None) -> None:
    """Compile, recompute or capture the blocks of a plain module that `parallel.shard_blocks` names, in place. Local.

    Raises:
        ConfigError: One of these is configured, but `parallel.shard_blocks` is None or names a missing class.
    """
    asked = {
        f"recompute={parallel.recompute!r}": ("recompute_activations", parallel.recompute != "none"),
        "compile=True": ("compile_blocks", parallel.compile),
        "cuda_graphs=True": ("capture_blocks", parallel.cuda_graphs),
    }
    names = {setting: function for setting, (function, is_asked) in asked.items() if is_asked}
    if not names:
        return
    if parallel.shard_blocks is None:
        raise ConfigError(
            f"ParallelConfig.{' and '.join(names)}: {type(module).__name__} is a plain LightningModule, whose blocks "
            'are unknown. Name their classes, as in shard_blocks=["Block"], or call '
            f"lightning_d9d.parallel.{' and '.join(names.values())} in configure_model"
        )
    compile_blocks(module, parallel)
    recompute_activations(module, parallel)
    capture_blocks(module, parallel, mesh)


def shard_blocks(module: nn.Module, mesh: MeshDomains, parallel: ParallelConfig, device: torch.device) -> None:
    """Move a plain module to the device and shard the blocks that `parallel.shard_blocks` names, in place. Collective.

    Values are rank 0's. Each block is gathered for its forward and again for its backward. Gradients are means over the
    data ranks, the default of FSDP2; parameters outside of blocks are replicated. Blocks that an earlier run has
    sharded stay unchanged.

    Raises:
        ConfigError: The module lacks such blocks, no axis shards data, or a block has no values, shares a parameter
            with another part, or was sharded differently.
    """
    over = weight_mesh(mesh)
    if over is None:
        raise ConfigError(
            f"ParallelConfig.shard_blocks={parallel.shard_blocks} with MeshConfig.data_parallel_shard=1: the mesh has "
            "no ranks to shard over; set data_parallel_shard, such as to -1"
        )
    configuration = (mesh.config, parallel)
    blocks = blocks_of(module, parallel.shard_blocks)
    apart = separable(module, blocks)
    if tied := [class_name(block) for block in blocks if block not in apart]:
        raise ConfigError(
            f"ParallelConfig.shard_blocks names {tied[0]}, of which one shares a parameter with another part of the "
            "module: sharding them separately would untie them. Leave the class out, or name one that contains all "
            "modules which share the parameter"
        )
    for block in blocks:
        if isinstance(block, FSDPModule):
            _check_sharded_alike(block, configuration)
            continue
        if any(tensor.is_meta for tensor in (*block.parameters(), *block.buffers())):
            raise ConfigError(
                f"ParallelConfig.shard_blocks: a {type(block).__name__} is on the meta device, and nothing would give "
                "it values. Build it on the CPU, or shard it in configure_model and give it values there"
            )
        block.to(device)
        broadcast_tensors([*block.parameters(), *block.buffers()])
        reshard = parallel.reshard_after_forward
        fully_shard(
            as_unit(block),
            mesh=over,
            reshard_after_forward=True if reshard == "auto" else reshard,
            **settings(block, parallel),
        )
        reduce_unused(cast(FSDPModule, block))
        vars(block)[_SHARDED_WITH] = configuration
    move(module, device, offloads=parallel.offload)


def _check_sharded_alike(block: nn.Module, configuration: tuple[MeshConfig, ParallelConfig]) -> None:
    earlier = vars(block).get(_SHARDED_WITH)
    name = class_name(block)
    if earlier is None:
        raise ConfigError(
            f"ParallelConfig.shard_blocks names {name}, but the module has applied fully_shard to a {name} itself; "
            "leave out one of the two"
        )
    if earlier != configuration:
        before, now = differing(earlier, configuration)
        raise ConfigError(
            f"a {name} is sharded for {', '.join(before)} of an earlier run, but this run has {', '.join(now)}. Give "
            "it a new module, and a checkpoint of the earlier run as ckpt_path"
        )


def not_yet_summed(
    parameters: Iterable[nn.Parameter], mesh: MeshDomains, fully_sharded: set[nn.Parameter]
) -> list[nn.Parameter]:
    """Return the parameters of a plain module whose gradients are this data rank's own after the backward.

    Gradients of DTensors over all data ranks have been summed by `fully_shard`, except those of experts.

    Args:
        parameters: Parameters that get gradients.
        mesh: Mesh of all ranks.
        fully_sharded: Parameters that FSDP2 reduces.

    Raises:
        ConfigError: A DTensor is only on other axes, and there are several data ranks; or experts are fully sharded.
    """
    left = []
    for parameter in parameters if mesh.dp_size > 1 else ():
        if is_of_experts(parameter) and parameter in fully_sharded:
            raise ConfigError(
                "experts of a plain LightningModule are spread over ranks and fully sharded. FSDP2 would divide their "
                "gradients by the wrong number of ranks. Make it a D9DModule, or leave the experts out of fully_shard"
            )
        if not isinstance(parameter, DTensor) or is_of_experts(parameter):
            left.append(parameter)
        elif not (data_ranks := set(dist.get_process_group_ranks(mesh.group(Axis.DP)))) <= _ranks(
            parameter.device_mesh
        ):
            raise ConfigError(
                f"a parameter of shape {tuple(parameter.shape)} is a DTensor on {parameter.device_mesh}, which leaves "
                f"out some of the data-parallel ranks {sorted(data_ranks)}. Nothing would sum its gradient over them. "
                'Apply fully_shard too, over for_axes("dp_cp_shard") or for_axes("dp_replicate", "dp_cp_shard")'
            )
    return left


def _ranks(mesh: DeviceMesh) -> set[int]:
    return set(mesh.mesh.flatten().tolist())
