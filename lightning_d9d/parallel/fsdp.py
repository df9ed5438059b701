"""Adapts all private names of FSDP2 that this package uses. Everything else here calls public functions.

FSDP2 has no public way to reduce the gradients of a unit outside of its hooks. Before torch 2.15 it has none to keep
sharded gradients wider than their parameters. It has none to forget a forward without waiting for its messages:
`reset_iter_state` waits for an all-gather that a failed rank may never have joined. `tests/parallel/test_fsdp.py` pins
each private name, with the versions of torch that it was seen in.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from lightning_d9d.waits import waiting

ACCUMULATES_IN_LEAF = isinstance(getattr(FSDPParam, "unsharded_accumulated_grad", None), property)
"""True if unreduced gradients are summed in `.grad` of the unsharded parameter (torch 2.15), not in another tensor."""

_WAITS = ("wait_for_unshard", "finalize_backward")
"""Methods of FSDP2's groups that wait for an all-gather, and for the last reductions."""


class _TrainedParameters:
    """A container of every parameter that requires a gradient at the moment."""

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return parameter.requires_grad


class ParameterGroup:
    """The parameters of a unit that are gathered and reduced in one message.

    Args:
        group: FSDP2's own object.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._post_forward_mesh = group.post_forward_mesh_info

    @property
    def sharded_parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters in the form that the optimizer sees."""
        return (each.sharded_param for each in self._group.fsdp_params)

    def reduce_all(self, reduced: Container[nn.Parameter], *, keeps_wide: bool) -> None:
        """Make each reduction have the same parameters on all ranks, with zeros for those that this rank has not used.

        Args:
            reduced: Sharded parameters that a reduction includes; looked up at each reduction.
            keeps_wide: Whether sharded gradients stay in the dtype of the reduction if that is the wider one.
        """
        if keeps_wide:
            for each in self._group.fsdp_params:
                each.sharded_param.grad_dtype = None  # lets .grad be wider than the parameter
        original = type(self._group).post_backward
        self._group.post_backward = functools.partial(_post_backward, self._group, reduced, original, keeps_wide)
        for name in _WAITS:
            setattr(self._group, name, functools.partial(_wait, getattr(type(self._group), name), self._group))

    def restore(self) -> None:
        """Undo `reduce_all` and `keep_after_forward`."""
        self.keep_after_forward(False)
        for name in ("post_backward", *_WAITS):
            vars(self._group).pop(name, None)

    def keep_after_forward(self, keeps: bool) -> None:
        """Keep parameters gathered after a forward, or reshard as `fully_shard` was configured."""
        self._group.post_forward_mesh_info = None if keeps else self._post_forward_mesh

    def update_dtypes(self) -> None:
        """Update the dtypes after parameters have been frozen or unfrozen since the last batch."""
        self._group._init_mp_dtypes()
        for each in self._group.fsdp_params:
            if hasattr(each, "_unsharded_param"):
                each._unsharded_param.requires_grad_(each.sharded_param.requires_grad)
            if ACCUMULATES_IN_LEAF:
                each._has_sharded_grad_dtype_override = True
                each.sharded_grad_dtype = torch.promote_types(each.reduce_dtype or each.orig_dtype, each.orig_dtype)
        if ACCUMULATES_IN_LEAF:
            self._group._init_reduce_scatter_param_order()

    def accumulate_wide(self) -> None:
        """Accumulate gradients of weight backwards, which no hook of FSDP2 handles, in the dtype of the reduction."""
        for each in self._group.fsdp_params:
            if each.reduce_dtype is not None and hasattr(each, "_unsharded_param"):
                each._unsharded_param.grad_dtype = each.reduce_dtype

    def forget_gradients(self) -> None:
        """Drop gradients that were not reduced."""
        for each in self._group.fsdp_params:
            if hasattr(each, "_unsharded_param"):
                each._unsharded_param.grad = None
                if not ACCUMULATES_IN_LEAF:
                    each.unsharded_accumulated_grad = None

    def forget_forward_order(self) -> None:
        """Prefetch nothing in the next backward."""
        self._group._post_forward_indices.clear()

    def reduce(self) -> None:
        """Reduce the gradients that exist, and reshard if the unit is set to."""
        self._group.post_backward()


def parameter_groups(unit: FSDPModule) -> list[ParameterGroup]:
    """Return the groups of a unit: none if it has no parameters of its own, several if they are on several meshes."""
    return [ParameterGroup(group) for group in _groups(_state_of(unit))]


def reduce_unused(unit: FSDPModule) -> None:
    """Make each reduction of a unit include all of its trained parameters, used on this rank or not.

    Gradients stay in the dtype of their parameters, and are divided as FSDP2 divides them.
    """
    if hasattr(unit, "set_reduce_scatter_unused_params"):  # since torch 2.13
        unit.set_reduce_scatter_unused_params(True, recurse=False)
        return
    for group in parameter_groups(unit):
        group.reduce_all(_TrainedParameters(), keeps_wide=False)


class Root:
    """The outermost unit of a module, which ends backwards for all units inside.

    Args:
        unit: The unit.
    """

    def __init__(self, unit: FSDPModule) -> None:
        self.unit = unit
        self._state = _state_of(unit)
        all_states = self._state._state_ctx.all_states
        all_states[:] = dict.fromkeys(all_states)  # before torch 2.13 a unit of two modules is there twice
        self.groups = [ParameterGroup(group) for state in all_states for group in _groups(state)]

    def finish(self) -> None:
        """End the backwards of a batch: wait for the reductions (on CUDA the stream waits, not the host)."""
        self.unit.set_is_last_backward(True)
        context = self._state._state_ctx
        if getattr(context, "manual_backward_finalization_active", False) is None:  # no hook has run since the last end
            context.manual_backward_finalization_active = False
        self._state._root_post_backward_final_callback()


def roots(units: Sequence[FSDPModule]) -> list[Root]:
    """Return the outermost ones of these units, each before the units inside, as in `Module.modules()`.

    They are initialised as in the first forward: each takes over the units inside.
    """
    found = []
    for unit in units:
        state = _state_of(unit)
        state._lazy_init()
        if state._is_root and all(state is not root._state for root in found):
            found.append(Root(unit))
    return found


def forget_forward(units: Iterable[FSDPModule]) -> None:
    """Reshard units after forwards without a backward, and forget in which order they ran."""
    for unit in units:
        state = _state_of(unit)
        if hasattr(state._comm_ctx, "post_forward_order"):  # there since the first forward
            state._comm_ctx.post_forward_order.clear()
        for group in _groups(state):
            group._post_forward_indices.clear()
        unit.reshard()


def reset(units: Sequence[FSDPModule]) -> None:
    """Forget a forward or backward that an exception has ended, and reshard. Local; it does not wait for messages."""
    for unit in units:
        state = _state_of(unit)
        state._training_state = type(state._training_state).IDLE
        context = state._state_ctx
        context.iter_forward_root = None
        context.post_backward_final_callback_queued = False
        if hasattr(context, "manual_backward_finalization_active"):
            context.manual_backward_finalization_active = None
        state._modules_to_run_forward.clear()
        for group in _groups(state):
            group._training_state = type(group._training_state).IDLE
            group._all_gather_result = None
    forget_forward(units)


def fully_sharded(module: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that FSDP2 reduces, in their sharded form."""
    units = [unit for unit in module.modules() if isinstance(unit, FSDPModule)]
    return {parameter for unit in units for group in parameter_groups(unit) for parameter in group.sharded_parameters}


def _wait(original: Callable[[Any], None], group: Any) -> None:
    with waiting():
        original(group)


def _post_backward(
    group: Any, reduced: Container[nn.Parameter], original: Callable[[Any], None], keeps_wide: bool, *_: object
) -> None:
    """Run FSDP2's own method with all reduced parameters, and keep gradients in the dtype of the reduction."""
    if group.reduce_grads:
        members = [each for each in group.fsdp_params if hasattr(each, "_unsharded_param")]
        if ACCUMULATES_IN_LEAF:
            for parameter in (each._unsharded_param for each in members if each.sharded_param in reduced):
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
        else:
            _give_one_dtype(group, members, reduced, keeps_wide)
    original(group)


def _give_one_dtype(group: Any, members: Sequence[Any], reduced: Container[nn.Parameter], keeps_wide: bool) -> None:
    """Give all gradients of a reduction one dtype, as FSDP2 requires before torch 2.15; add zeros for missing ones."""
    if keeps_wide and group._reduce_dtype is not None:
        group._orig_dtype = torch.promote_types(group._reduce_dtype, group._orig_dtype)
    gradients = [each.unsharded_accumulated_grad for each in members] + [e._unsharded_param.grad for e in members]
    dtypes = [gradient.dtype for gradient in gradients if gradient is not None]
    dtype = functools.reduce(torch.promote_types, dtypes) if dtypes else None
    for each in members:
        if each.sharded_param in reduced and each.unsharded_accumulated_grad is None:
            unsharded, each._unsharded_param.grad_dtype = each._unsharded_param, None
            gradient = torch.zeros_like(unsharded) if unsharded.grad is None else unsharded.grad
            unsharded.grad = gradient if dtype is None else gradient.to(dtype)


def _groups(state: Any) -> list[Any]:
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _state_of(unit: FSDPModule) -> Any:
    return unit._get_fsdp_state()
