"""Fully sharded data parallelism with torch's FSDP2: which modules are gathered together, and when.

[Note: units] `fully_shard` gathers and reduces the parameters of a *unit* in one message. Each block of the model is a
unit. The experts of a block are a separate unit, whose collectives run over other ranks. The remaining parameters are
gathered with the stage.

[Note: kept or not] By default FSDP2 reshards a unit after its forward. It reshards it again after its backward, where
it also reduces its gradients. This is right if a batch is one microbatch. In a pipeline it would gather a stage twice
for each microbatch. Also, no hook would reduce the gradients that the weight backward of a split backward computes. So
a pipeline *keeps* a stage: it gathers the stage before its first forward of the batch, and reshards it after its last
backward. Gradients are reduced once. If the last backward is a full one, the hooks reduce them, which overlaps;
otherwise `FullySharded.reduce` does.

[Note: sums] Gradients are summed over ranks, in float32 at least, and not divided: a `D9DModule` divides all of them
once. A unit's reduction includes every trained parameter, with zeros where this rank has no gradient. Otherwise ranks
that use different parameters would send messages of different sizes. So a parameter that no rank used gets zeros, while
a replicated one would get none.

FSDP2 keeps a sharded gradient in the dtype of its parameter, and has no public way to reduce outside of its hooks.
`fsdp.py` holds all uses of its private names.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from lightning_d9d.errors import ConfigError
from lightning_d9d.mesh import Axis, MeshDomains
from lightning_d9d.mesh.axes import submesh
from lightning_d9d.mesh.sharding import local
from lightning_d9d.parallel.config import ParallelConfig
from lightning_d9d.parallel.fsdp import forget_forward, reset, roots


def weight_mesh(mesh: MeshDomains) -> DeviceMesh | None:
    """Return the mesh that shards weights outside of experts, after an axis of copies if there are any.

    The result is a part of `MeshDomains.weights`, so the first use is collective. None if no axis shards data.
    """
    if mesh.sizes[Axis.DP_CP_SHARD] == 1:
        return None
    num_copies = mesh.sizes[Axis.DP_REPLICATE] * mesh.sizes[Axis.CP_REPLICATE]
    copies = [Axis.DP_CP_REPLICATE] if num_copies > 1 else []
    return submesh(mesh.weights, *copies, Axis.DP_CP_SHARD)


def shard_data(
    stage: nn.Module,
    units: Iterable[nn.Module | list[nn.Module]],
    mesh: MeshDomains,
    parallel: ParallelConfig,
    *,
    casts_inputs: bool = True,
) -> None:
    """Shard the parameters of a stage over the data ranks, in place; does nothing if no axis shards data.

    Parameters that already belong to a unit stay there, and experts that are spread over ranks are skipped. Collective,
    like `fully_shard`: every rank must shard the same.

    Args:
        stage: A stage on the meta device, or with equal values on all ranks.
        units: Modules of the stage, in the order in which they run. Each unit is gathered separately; the modules of a
            list, which run one after the other, are gathered together. The rest of the stage, with units that are not
            `separable`, is gathered with the first of them. These parameters are kept until the backward of the stage
            is done.
        mesh: The mesh of all ranks.
        parallel: When to reshard, the dtype to gather in, and where to keep shards.
        casts_inputs: Whether floating-point inputs of a unit are cast to the dtype in which it is gathered.
    """
    over = weight_mesh(mesh)
    if over is None:
        return
    placed = functools.partial(place, mesh.sizes[Axis.DP_CP_SHARD])
    experts = {parameter for parameter in stage.parameters() if is_of_experts(parameter)}
    for unit in (*separable(stage, units), stage):
        options = settings(unit, parallel, casts_inputs)
        fully_shard(as_unit(unit), mesh=over, shard_placement_fn=placed, ignored_params=experts, **options)


def separable(module: nn.Module, units: Iterable[nn.Module | list[nn.Module]]) -> list[nn.Module | list[nn.Module]]:
    """Return the units that share no parameter with another one or with the rest of the module.

    A unit that is gathered separately from another holder of its parameter would untie the two.
    """
    units = list(units)
    parameters = [{each for part in _modules_of(unit) for each in part.parameters()} for unit in units]
    inside = {each for unit in units for part in _modules_of(unit) for each in part.modules()}
    rest = {each for part in module.modules() if part not in inside for each in part.parameters(recurse=False)}
    num_holders = Counter(each for holder in (*parameters, rest) for each in holder)
    return [unit for unit, own in zip(units, parameters, strict=True) if all(num_holders[each] == 1 for each in own)]


def _modules_of(unit: nn.Module | list[nn.Module]) -> list[nn.Module]:
    return unit if isinstance(unit, list) else [unit]


def as_unit(unit: nn.Module | list[nn.Module]) -> nn.Module | list[nn.Module]:
    """Return a unit in the form for `fully_shard`: torch 2.11 refuses a bare `ModuleDict`, even one with a forward."""
    return [unit] if isinstance(unit, nn.Module) and _is_run_list(unit) else unit


def _is_run_list(module: nn.Module) -> bool:
    """Return whether a module is a list or dictionary of modules with its own forward, such as a `BlockSequence`."""
    return isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is not nn.Module.forward


def settings(unit: nn.Module | list[nn.Module], parallel: ParallelConfig, casts_inputs: bool = True) -> dict[str, Any]:
    """Return the keyword arguments of `fully_shard` for a unit that follow from the configuration.

    Args:
        unit: A module or modules that are gathered together.
        parallel: The configuration.
        casts_inputs: Whether inputs of the unit are cast to the dtype in which it is gathered.
    """
    gathered, reduced = parallel.dtypes
    if reduced is None:
        reduced = torch.float32
        for module in _modules_of(unit):
            for parameter in module.parameters():
                reduced = torch.promote_types(reduced, parameter.dtype)
    return {
        "mp_policy": MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=reduced, cast_forward_inputs=casts_inputs),
        "offload_policy": CPUOffloadPolicy(pin_memory=torch.accelerator.is_available())
        if parallel.offload
        else OffloadPolicy(),
    }


def blocks_of(stage: nn.Module, class_names: Sequence[str] | None = None) -> list[nn.Module]:
    """Return the blocks of a stage: modules with the same treatment, which run one after the other.

    Args:
        stage: The stage.
        class_names: The classes of the blocks. By default, blocks are the entries of the outermost `ModuleList`s and
            `ModuleDict`s. The stage itself may be one of these if it has a forward, as `BlockSequence` has.

    Raises:
        ConfigError: The stage has no module of one of these classes.
    """
    if class_names is None:
        return list(stage.children() if _is_run_list(stage) else _entries(stage))
    found = [module for module in stage.modules() if class_name(module) in class_names]
    missing = sorted({*class_names} - {class_name(module) for module in found})
    if missing:
        known = sorted({class_name(module) for module in stage.modules()})
        raise ConfigError(
            f"ParallelConfig.shard_blocks={list(class_names)}: the module has no {missing[0]}; its parts are of the "
            f"classes {', '.join(known)}"
        )
    return found


def check_blocks(module: nn.Module, blocks: Sequence[nn.Module], setting: str) -> None:
    """Check that a setting about blocks applies to some here, or could apply to some on other stages.

    Args:
        module: The module with the blocks. A stage of a pipeline may have an empty list of them.
        blocks: The blocks to which the setting applies.
        setting: The setting's name and value, such as `"ParallelConfig.compile=True"`.

    Raises:
        ConfigError: The module has neither blocks nor a list of modules that could hold some.
    """
    if not blocks and not has_lists(module):
        raise ConfigError(
            f"{setting} has no effect here: {type(module).__name__} has no blocks, which are the entries of a "
            'ModuleList or ModuleDict. Name their classes, as in ParallelConfig.shard_blocks=["Block"], or leave '
            f"{setting.split('=')[0].split('.')[-1]} out"
        )


def has_lists(module: nn.Module) -> bool:
    """Return whether a module has or is a list or dictionary of modules, even an empty one."""
    return any(isinstance(part, nn.ModuleList | nn.ModuleDict) for part in module.modules())


def class_name(module: nn.Module) -> str:
    """Return the name of a module's class before `fully_shard` replaced the class by a derived one."""
    cls = type(module)
    return (cls.__bases__[1] if isinstance(module, FSDPModule) and len(cls.__bases__) > 1 else cls).__name__


def _entries(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from child.children()
        else:
            yield from _entries(child)


def is_of_experts(parameter: nn.Parameter) -> bool:
    """Return whether a parameter is spread over the ranks of an expert axis."""
    return isinstance(parameter, DTensor) and Axis.EP_SHARD in (parameter.device_mesh.mesh_dim_names or ())


def num_shards(parameter: nn.Parameter) -> int:
    """Return the number of ranks over which `fully_shard` sharded a parameter, excluding other parallelism."""
    return math.prod(size for size, _ in _shards(parameter))


def gathered_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """Return the shape of a parameter as `fully_shard` gathers it, still cut by tensor and expert parallelism.

    Rows that ranks cannot share evenly count as this rank has them.
    """
    shape = list(local(parameter).shape)
    for size, placement in _shards(parameter):
        dim = placement.dim
        shape[dim] = min(shape[dim] * size, parameter.shape[dim])
    return tuple(shape)


def _shards(parameter: nn.Parameter) -> list[tuple[int, Any]]:
    """Return the number of ranks, and the placement, of each axis over which `fully_shard` sharded a parameter."""
    if not isinstance(parameter, DTensor):
        return []
    mesh, others = parameter.device_mesh, {Axis.TP, Axis.TP_SHARD, Axis.TP_REPLICATE, Axis.EP_SHARD}
    names = mesh.mesh_dim_names or ()
    return [
        (mesh.size(axis), placed)
        for axis, placed in enumerate(parameter.placements)
        if not placed.is_replicate() and names[axis] not in others
    ]


def shard_dim(dims: Sequence[int], num_shards: int) -> int:
    """Return the dim along which this shape is sharded: 0, or 1 if dim 0 is too short and dim 1 divides evenly."""
    return 1 if dims[0] < num_shards and len(dims) > 1 and dims[1] % num_shards == 0 else 0


def place(num_shards: int, parameter: nn.Parameter) -> Shard:
    """Return the `shard_dim` of this rank's part of a parameter on other axes, in the form for `fully_shard`."""
    return Shard(shard_dim(local(parameter).shape, num_shards))


class FullySharded:
    """Gathers and reduces the units of one stage as the schedule says. See [Note: kept or not].

    Args:
        stage: A stage with units made by `fully_shard`.
        keeps: Whether the stage is kept over a batch. It is always kept if backwards are split.
        reduces_each: Whether gradients are reduced after each microbatch, not only after the last.
    """

    def __init__(self, stage: nn.Module, *, keeps: bool, reduces_each: bool) -> None:
        self.units = [unit for unit in stage.modules() if isinstance(unit, FSDPModule)]
        self.keeps = keeps
        self._keeps_now = keeps
        self.reduces_each = reduces_each
        self._reduces = False
        self._has_announced_last = False
        self._is_gathered_once = False
        for unit in self.units:
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
        self._roots = roots(self.units)
        self._groups = [group for root in self._roots for group in root.groups]
        self._reduced: set[nn.Parameter] = set()
        """Parameters that require gradients, or did at the beginning of a batch of this window."""
        for group in self._groups:
            group.reduce_all(self._reduced, keeps_wide=True)

    def begin(self, *, is_first: bool, reduces: bool, splits_backward: bool) -> None:
        """Begin a batch.

        Args:
            is_first: Whether it is the first of a window. Gradients that an earlier window left are then dropped.
            reduces: Whether gradients are reduced in this batch.
            splits_backward: Whether backwards are split.

        Raises:
            ConfigError: Gradients are to be reduced after each microbatch, but backwards are split.
        """
        if splits_backward and self.reduces_each:
            raise ConfigError(
                "GradSyncConfig.reduce='every_microbatch' with a schedule that splits backwards, whose gradients come "
                "in two halves. Choose 'last_microbatch', or a schedule with whole backwards such as '1f1b'"
            )
        self._reduces = reduces
        self._keeps_now = self.keeps or splits_backward
        self._has_announced_last = False
        forget_forward(self.units)
        if is_first:
            self._reduced.clear()
            self._forget_gradients()
        for group in self._groups:
            group.update_dtypes()
            self._reduced |= {parameter for parameter in group.sharded_parameters if parameter.requires_grad}
        self._set(reduces=self.reduces_each, keeps=self._keeps_now)

    def unshard(self) -> None:
        """Start to gather the stage if it is kept; forwards wait for it."""
        if not self._keeps_now:
            return
        handles = [unit.unshard(async_op=True) for unit in self.units]
        if not self._is_gathered_once:  # from now on there are unsharded parameters, the same ones each time
            for handle in handles:
                if handle is not None:
                    handle.wait()
            self._is_gathered_once = True
        for group in self._groups:
            group.accumulate_wide()

    def reshard(self) -> None:
        """Reshard the stage."""
        for unit in self.units:
            unit.reshard()

    def last_backward(self) -> None:
        """Announce that the next full backward is the last of the batch: its hooks may reduce and reshard."""
        self._has_announced_last = True
        if self._keeps_now:
            for group in self._groups:  # all is there, but the first unit would prefetch the last of the forward before
                group.forget_forward_order()
        self._set(reduces=self._reduces or self.reduces_each, keeps=False)
        for root in self._roots:
            root.unit.set_is_last_backward(True)

    def reduce(self) -> None:
        """Reduce the gradients of the batch, which are complete, unless hooks reduce them."""
        if self._has_announced_last or not self._reduces:
            return
        self._set(reduces=True, keeps=False)
        for group in reversed(self._groups):
            group.reduce()
        for root in self._roots:
            root.finish()

    def drop(self) -> None:
        """Forget a batch that was interrupted."""
        reset(self.units)

    def close(self) -> None:
        """Reshard the units, restore their own hooks, and drop gradients that were not reduced."""
        self.reshard()
        for group in self._groups:
            group.restore()
        self._forget_gradients()

    def _forget_gradients(self) -> None:
        for group in self._groups:
            group.forget_gradients()

    def _set(self, *, reduces: bool, keeps: bool) -> None:
        for root in self._roots:
            root.unit.set_is_last_backward(not self._keeps_now)
        for unit in self.units:
            unit.set_reshard_after_backward(not keeps, recurse=False)
            unit.set_requires_gradient_sync(reduces, recurse=False)
        for group in self._groups:
            group.keep_after_forward(self._keeps_now)
