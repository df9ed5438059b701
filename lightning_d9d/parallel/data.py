"""Fully sharded data parallelism: which modules are gathered together, and when, with torch's FSDP2.

[Note: units] `fully_shard` gathers and reduces the parameters of a *unit* in one message. A block of the model is one;
its experts are one of their own, whose collectives run over other ranks; what is left is gathered with the stage.

[Note: kept or not] By itself FSDP2 lets go of a unit after its forward and again after its backward, where it also
reduces its gradients. That is right where a batch is one microbatch. In a pipeline it would gather a stage twice for
each microbatch, and of a split backward no hook would reduce what its weight backward computes. So there a stage is
*kept*: gathered before its first forward of the batch, let go of after its last backward, and reduced once, by the
hooks if that is a full backward, so that it overlaps, else by hand.

[Note: sums] Gradients are added up over ranks, in float32 at least, and not divided: a `D9DModule` divides all of them
once. A unit's reduction has every trained parameter in it, with zeros where this rank has no gradient: else ranks that
use different parameters would send messages of different sizes. So a parameter that no rank used gets zeros, where a
replicated one would get none.

FSDP2 keeps a sharded gradient in the dtype of its parameter, and has no public way to another one or to reduce outside
of its hooks. What is used of its inside here is pinned by `tests/parallel/test_data.py`.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from lightning_d9d.errors import ConfigError
from lightning_d9d.mesh import MeshDomains
from lightning_d9d.mesh.sharding import local
from lightning_d9d.parallel.config import ParallelConfig


def weight_mesh(mesh: MeshDomains) -> DeviceMesh | None:
    """What weights outside of experts are fully sharded over, behind an axis of copies if there are any.

    A part of `MeshDomains.weights`, so collective at the first use. None where no axis shards data.
    """
    if mesh.sizes["dp_cp_shard"] == 1:
        return None
    num_copies = mesh.sizes["dp_replicate"] * mesh.sizes["cp_replicate"]
    return mesh.weights[("dp_cp_replicate", "dp_cp_shard") if num_copies > 1 else ("dp_cp_shard",)]


def shard_data(
    stage: nn.Module,
    units: Iterable[nn.Module | list[nn.Module]],
    mesh: MeshDomains,
    parallel: ParallelConfig,
    *,
    casts_inputs: bool = True,
) -> None:
    """Shard the parameters of a stage over the data ranks, in place; nothing where no axis shards data.

    Parameters that already belong to a unit stay there, and experts that are spread over ranks are left alone.
    Collective in the way of `fully_shard`: every rank shards the same.

    Args:
        stage: On the meta device, or with equal values on all ranks.
        units: Its modules that are gathered one at a time, or lists of modules that are gathered together and run one
            after the other, in the order in which they run. The rest of the stage is gathered with the first of them
            and kept until its backward is done; with it those that are not `separable`.
        mesh: Of all ranks.
        parallel: Says when to let go, the dtype to gather in, and where to keep.
        casts_inputs: Whether floats that a unit is called with are cast to the dtype that it is gathered in.
    """
    over = weight_mesh(mesh)
    if over is None:
        return
    placed = functools.partial(place, mesh.sizes["dp_cp_shard"])
    experts = {parameter for parameter in stage.parameters() if is_of_experts(parameter)}
    for unit in (*separable(stage, units), stage):
        options = settings(unit, parallel, casts_inputs)
        fully_shard(as_unit(unit), mesh=over, shard_placement_fn=placed, ignored_params=experts, **options)


def separable(module: nn.Module, units: Iterable[nn.Module | list[nn.Module]]) -> list[nn.Module | list[nn.Module]]:
    """Those units that share no parameter with another one or with the rest of the module.

    Gathered apart from what has the same parameter they would be untied.
    """
    units = list(units)
    parameters = [{each for part in _parts(unit) for each in part.parameters()} for unit in units]
    inside = {each for unit in units for part in _parts(unit) for each in part.modules()}
    rest = {each for part in module.modules() if part not in inside for each in part.parameters(recurse=False)}
    num_holders = Counter(each for holder in (*parameters, rest) for each in holder)
    return [unit for unit, own in zip(units, parameters, strict=True) if all(num_holders[each] == 1 for each in own)]


def _parts(unit: nn.Module | list[nn.Module]) -> list[nn.Module]:
    return unit if isinstance(unit, list) else [unit]


def as_unit(unit: nn.Module | list[nn.Module]) -> nn.Module | list[nn.Module]:
    """A unit as `fully_shard` takes it: torch 2.11 refuses a `ModuleDict` by itself, even one with a forward."""
    return [unit] if isinstance(unit, nn.Module) and _is_run_list(unit) else unit


def _is_run_list(module: nn.Module) -> bool:
    """Whether it is a list or dictionary of modules with a forward of its own, such as a `BlockSequence`."""
    return isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is not nn.Module.forward


def settings(unit: nn.Module | list[nn.Module], parallel: ParallelConfig, casts_inputs: bool = True) -> dict[str, Any]:
    """The keyword arguments of `fully_shard` for a unit that follow from the configuration.

    Args:
        unit: What is gathered together.
        parallel: The configuration.
        casts_inputs: Whether tensors that the unit is called with are cast to the dtype that it is gathered in.
    """
    gathered, reduced = parallel.dtypes
    if reduced is None:
        reduced = torch.float32
        for module in _parts(unit):
            for parameter in module.parameters():
                reduced = torch.promote_types(reduced, parameter.dtype)
    return {
        "mp_policy": MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=reduced, cast_forward_inputs=casts_inputs),
        "offload_policy": CPUOffloadPolicy(pin_memory=torch.accelerator.is_available())
        if parallel.offload
        else OffloadPolicy(),
    }


def blocks_of(stage: nn.Module, class_names: Sequence[str] | None = None) -> list[nn.Module]:
    """The modules of a stage that are treated alike, one after the other.

    Args:
        stage: The stage.
        class_names: Of which classes they are; by default the entries of the outermost `ModuleList`s and `ModuleDict`s,
            which may be the stage itself if it has a forward, as `BlockSequence` has.

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


def class_name(module: nn.Module) -> str:
    """Of its class, which `fully_shard` exchanges for one that is derived from `FSDPModule` and it."""
    cls = type(module)
    return (cls.__bases__[1] if isinstance(module, FSDPModule) and len(cls.__bases__) > 1 else cls).__name__


def _entries(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from child.children()
        else:
            yield from _entries(child)


def is_of_experts(parameter: nn.Parameter) -> bool:
    """Whether it is spread over the ranks of an expert axis."""
    return isinstance(parameter, DTensor) and "ep_shard" in (parameter.device_mesh.mesh_dim_names or ())


def shard_dim(dims: Sequence[int], num_shards: int) -> int:
    """The dim along which a parameter of this shape is cut: 0, or 1 where dim 0 runs out and dim 1 divides evenly."""
    return 1 if dims[0] < num_shards and len(dims) > 1 and dims[1] % num_shards == 0 else 0


def place(num_shards: int, parameter: nn.Parameter) -> Shard:
    """`shard_dim` as `fully_shard` asks for it, of what other axes have left of a parameter."""
    return Shard(shard_dim(local(parameter).shape, num_shards))


def let_go(units: Iterable[FSDPModule]) -> None:
    """Let go of what units have gathered, behind forwards without a backward; what FSDP2 noted of them is forgotten."""
    for unit in units:
        state = _state_of(unit)
        if hasattr(state._comm_ctx, "post_forward_order"):  # there since the first forward
            state._comm_ctx.post_forward_order.clear()
        if state._fsdp_param_group is not None:
            state._fsdp_param_group._post_forward_indices.clear()
        unit.reshard()


def reset(units: Sequence[FSDPModule]) -> None:
    """Forget a forward or backward that was broken off by an exception, and let go."""
    for unit in units:
        state = _state_of(unit)
        state._training_state = type(state._training_state).IDLE
        state._state_ctx.iter_forward_root = None
        state._state_ctx.post_backward_final_callback_queued = False
        state._modules_to_run_forward.clear()
        if (group := state._fsdp_param_group) is not None:
            group._training_state = type(group._training_state).IDLE
            group._all_gather_result = None
    let_go(units)


class _Trained:
    """All parameters that get gradients now."""

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return parameter.requires_grad


def reduce_all(unit: FSDPModule) -> None:
    """Let the reduction of a unit have all of its trained parameters, used on this rank or not. [Note: sums].

    Gradients stay in the dtype of their parameters, and are divided as FSDP2 does.
    """
    if (group := _state_of(unit)._fsdp_param_group) is not None:
        group.post_backward = functools.partial(_post_backward, group, _Trained(), type(group).post_backward, False)


class FullySharded:
    """The units of one stage, gathered and reduced as the schedule says. [Note: kept or not].

    Args:
        stage: With units made by `fully_shard`.
        keeps: Whether the stage is kept over a batch. It always is if backwards come in two halves.
        reduces_each: Whether gradients are reduced after each microbatch, not after the last alone.
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
        self._roots = []
        self._groups: list[Any] = []
        for unit in self.units:
            state = _state_of(unit)
            state._lazy_init()  # as the first forward would: outer units come first, and take those inside as theirs
            if state._is_root and unit not in self._roots:
                self._roots.append(unit)
                states = dict.fromkeys(state._state_ctx.all_states)  # a unit of two modules is there twice
                state._state_ctx.all_states[:] = states
                self._groups += [each._fsdp_param_group for each in states if each._fsdp_param_group]
        self._post_forward = [group.post_forward_mesh_info for group in self._groups]
        self._reduced: set[nn.Parameter] = set()
        """Of this window: those that get gradients, or did when it began."""
        for group in self._groups:
            post_backward = type(group).post_backward
            group.post_backward = functools.partial(_post_backward, group, self._reduced, post_backward, True)
            for each in group.fsdp_params:
                each.sharded_param.grad_dtype = None  # lets .grad be wider than the parameter

    def begin(self, *, is_first: bool, reduces: bool, splits: bool) -> None:
        """A batch begins.

        Args:
            is_first: Of a window: gradients of an earlier one that met no step are forgotten.
            reduces: Whether gradients are reduced in this batch.
            splits: Whether backwards come in two halves.

        Raises:
            ConfigError: Gradients are to be reduced after each microbatch, but come in two halves.
        """
        if splits and self.reduces_each:
            raise ConfigError(
                "GradSyncConfig.reduce='every_microbatch' with a schedule that splits backwards, whose gradients come "
                "in two halves; choose 'last_microbatch', or a schedule with whole backwards such as '1f1b'"
            )
        self._reduces = reduces
        self._keeps_now = self.keeps or splits
        for group in self._groups:
            group._init_mp_dtypes()  # again, for what has been unfrozen
        self._has_announced_last = False
        let_go(self.units)
        if is_first:
            self._reduced.clear()
            self._forget_gradients()
        for each in self._parameters:
            is_trained = each.sharded_param.requires_grad
            if hasattr(each, "_unsharded_param"):
                each._unsharded_param.requires_grad_(is_trained)  # callbacks freeze the sharded one
            if is_trained:
                self._reduced.add(each.sharded_param)
        self._set(reduces=self.reduces_each, keeps=self._keeps_now)

    def unshard(self) -> None:
        """Start to gather what is kept; forwards wait for it."""
        if not self._keeps_now:
            return
        handles = [unit.unshard(async_op=True) for unit in self.units]
        if not self._is_gathered_once:  # from now on there are unsharded parameters, the same ones each time
            for handle in handles:
                if handle is not None:
                    handle.wait()
            self._is_gathered_once = True
        for each in self._parameters:
            if each.reduce_dtype is not None and hasattr(each, "_unsharded_param"):
                each._unsharded_param.grad_dtype = each.reduce_dtype  # weight backwards add up in it

    def reshard(self) -> None:
        """Let go of what is gathered."""
        for unit in self.units:
            unit.reshard()

    def last_backward(self) -> None:
        """The coming full backward is the last of the batch: its hooks may reduce and let go."""
        self._has_announced_last = True
        if self._keeps_now:
            for group in self._groups:  # all is there, but the first unit would prefetch the last of the forward before
                group._post_forward_indices.clear()
        self._set(reduces=self._reduces or self.reduces_each, keeps=False)
        for root in self._roots:
            root.set_is_last_backward(True)

    def reduce(self) -> None:
        """All gradients of the batch are there: reduce them, if no hook has."""
        if self._has_announced_last or not self._reduces:
            return
        self._set(reduces=True, keeps=False)
        for group in reversed(self._groups):
            group.post_backward()
        self.finish()

    def finish(self) -> None:
        """Wait for the reductions (on CUDA the stream waits, not the host)."""
        for root in self._roots:
            root.set_is_last_backward(True)
            _state_of(root)._root_post_backward_final_callback()

    def drop(self) -> None:
        """Forget a batch that was broken off."""
        reset(self.units)

    def close(self) -> None:
        """Leave the units as they were."""
        self.reshard()
        for group, post_forward in zip(self._groups, self._post_forward, strict=True):
            group.post_forward_mesh_info = post_forward
            vars(group).pop("post_backward", None)
        self._forget_gradients()

    def _forget_gradients(self) -> None:
        for each in self._parameters:
            if hasattr(each, "_unsharded_param"):
                each._unsharded_param.grad = each.unsharded_accumulated_grad = None

    @property
    def _parameters(self) -> Iterator[Any]:
        return (each for group in self._groups for each in group.fsdp_params)

    def _set(self, *, reduces: bool, keeps: bool) -> None:
        for root in self._roots:
            root.set_is_last_backward(not self._keeps_now)
        for unit in self.units:
            unit.set_reshard_after_backward(not keeps, recurse=False)
            unit.set_requires_gradient_sync(reduces, recurse=False)
        for group, post_forward in zip(self._groups, self._post_forward, strict=True):
            group.post_forward_mesh_info = None if self._keeps_now else post_forward


def _post_backward(
    group: Any, reduced: Container[nn.Parameter], post_backward: Callable[[Any], None], keeps_wide: bool, *_: object
) -> None:
    """FSDP2's own, with all reduced parameters, in one dtype, and kept in that of the reduction. [Note: sums]."""
    if group.reduce_grads:
        if keeps_wide and group._reduce_dtype is not None:
            group._orig_dtype = torch.promote_types(group._reduce_dtype, group._orig_dtype)
        members = [each for each in group.fsdp_params if hasattr(each, "_unsharded_param")]
        gradients = [each.unsharded_accumulated_grad for each in members] + [e._unsharded_param.grad for e in members]
        dtypes = [gradient.dtype for gradient in gradients if gradient is not None]
        dtype = functools.reduce(torch.promote_types, dtypes) if dtypes else None
        for each in members:
            if each.sharded_param in reduced and each.unsharded_accumulated_grad is None:
                unsharded, each._unsharded_param.grad_dtype = each._unsharded_param, None
                gradient = torch.zeros_like(unsharded) if unsharded.grad is None else unsharded.grad
                unsharded.grad = gradient if dtype is None else gradient.to(dtype)
    post_backward(group)


def _state_of(unit: FSDPModule) -> Any:
    return fully_shard.state(unit)  # type: ignore[attr-defined]
