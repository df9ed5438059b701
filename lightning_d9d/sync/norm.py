"""The norm of all gradients as one number for the whole model, and clipping by it.

[Note: whole norm] A p-norm is the p-th root of the sum of |g|^p over elements. So each rank adds up what it holds, and
the sums are added over ranks. Every element must count once. A tensor that is sharded along a mesh axis has different
elements on each rank of that axis: their sums are all-reduced over it. Along an axis on which it is replicated, all
ranks hold the same elements: nothing is added. Gradients sharded over the same process groups share one message, a
single number. Its dtype is always float64. So pipeline stages with parameters of other dtypes, or without any, send the
same, and the p-th power does not overflow. For the infinity norm, the sum is a maximum, without a power.

Collectives depend on how parameters are sharded, not on which have a gradient or are frozen: ranks may differ in that.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_d9d.errors import ConfigError
from lightning_d9d.mesh.collectives import device_of_messages
from lightning_d9d.mesh.sharding import Sharding, local, sharding_of
from lightning_d9d.waits import waiting

_LARGE = 2**20
"""Elements of a gradient whose norm is that of the norms of its rows.

On an H200 this reads large tensors in bfloat16 at 3.1 TB/s, and one launch for many tensors at 2.2 TB/s. On a CPU,
torch's sum over a million numbers in float32 is off by 3e-5, and sums over rows by 4e-9."""


class SquaredNorms(dict[Sharding | None, Tensor]):
    """Squared norms, by sharding, of this rank's parts of gradients that are freed before `gradient_norm` is called."""

    @torch.no_grad()
    def add(self, parameters: Iterable[Tensor]) -> None:
        """Add the norms of gradients that still exist. Local; the host does not wait.

        Args:
            parameters: Parameters. Each gradient is added once, and its parameter later given to `gradient_norm`, when
                the gradient has been freed.
        """
        for sharding, gradients in _local_gradients(list(parameters)).items():
            if gradients:
                device = gradients[0].device
                part = _local_sum(gradients, 2.0, device)
                self[sharding] = part + self[sharding].to(device) if sharding in self else part


@torch.no_grad()
def gradient_norm(
    parameters: Iterable[Tensor],
    norm_type: float = 2.0,
    pipeline_group: dist.ProcessGroup | None = None,
    at_least: torch.dtype = torch.float32,
    gone: Mapping[Sharding | None, Tensor] | None = None,
) -> Tensor:
    """Return the p-norm of all gradients of the model taken as one vector. Collective.

    [Note: whole norm] describes which sums are taken over which ranks. All ranks of a pipeline stage give the same
    parameters in the same order, though only some may have gradients. The host does not wait, unless some gradients are
    on the CPU and others are not.

    Args:
        parameters: Parameters of this rank's stages: plain tensors and DTensors on any meshes, of any dtypes and
            devices. A parameter that is given twice counts once. Gradients of frozen parameters count, because
            optimizers apply them.
        norm_type: The order of the norm: p > 0, or infinity. For p < 1 this is not a norm, but is computed in the same
            way.
        pipeline_group: Ranks whose stages hold other parameters that count, too; None if this rank has all.
        at_least: Minimum dtype of the result; a rank without parameters may need that of other ranks.
        gone: `SquaredNorms` of parameters whose gradients have been freed, for the 2-norm.

    Returns:
        The same number on all ranks, of shape `[]`; 0 without gradients. It is float64 if a parameter or gradient is,
        else `at_least`. It is on the device of the first parameter, or without parameters on that of `pipeline_group`.

    Raises:
        ConfigError: `norm_type` is not positive, or a gradient is not sharded like its parameter, such as one that is
            still to be summed (`Partial`).
    """
    parameters = list(dict.fromkeys(parameters))
    return _norm(parameters, _local_gradients(parameters), norm_type, pipeline_group, at_least, gone or {})


@torch.no_grad()
def clip_gradients_by_norm(
    parameters: Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    pipeline_group: dist.ProcessGroup | None = None,
    norm: Tensor | None = None,
) -> Tensor:
    """Multiply all gradients in place by min(1, max_norm / (norm + 1e-6)), rounded to their dtype.

    Collective like `gradient_norm`, unless `norm` is given. The host does not wait.

    Args:
        parameters: As for `gradient_norm`.
        max_norm: The largest norm afterwards.
        norm_type: As for `gradient_norm`.
        pipeline_group: As for `gradient_norm`.
        norm: The norm, if it is known; then no message is sent.

    Returns:
        The norm before clipping.

    Raises:
        ConfigError: `gradient_norm` refuses the arguments.
    """
    parameters = list(dict.fromkeys(parameters))
    by_sharding = _local_gradients(parameters)
    if norm is None:
        norm = _norm(parameters, by_sharding, norm_type, pipeline_group)
    factor = clip_factor(norm, max_norm)
    gradients = [gradient for same_sharding in by_sharding.values() for gradient in same_sharding]
    for (device, dtype), same_type in _by_type(gradients).items():
        # in the gradients' own dtype: with another one each tensor takes a slow kernel of its own
        torch._foreach_mul_(same_type, factor.to(device, dtype))
    return norm


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor for gradients of this norm that makes it at most `max_norm`."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


@torch.no_grad()
def clip_gradients_by_value(parameters: Iterable[Tensor], max_value: float) -> None:
    """Clamp all elements of gradients, in place, to at most `max_value` away from 0. Local, also for DTensors."""
    by_sharding = _local_gradients(list(dict.fromkeys(parameters)))
    gradients = [gradient for same_sharding in by_sharding.values() for gradient in same_sharding]
    for same_type in _by_type(gradients).values():
        torch._foreach_clamp_min_(same_type, -max_value)
        torch._foreach_clamp_max_(same_type, max_value)


def _local_gradients(parameters: list[Tensor]) -> dict[Sharding | None, list[Tensor]]:
    """Return the parts of gradients that this rank holds, by sharding, in the order of the parameters."""
    by_sharding: dict[Sharding | None, list[Tensor]] = {}
    for parameter in parameters:
        sharding, gradient = sharding_of(parameter), parameter.grad
        same_sharding = by_sharding.setdefault(sharding, [])
        if gradient is None:
            continue
        if sharding_of(gradient) != sharding:
            raise ConfigError(
                f"a parameter of shape {tuple(parameter.shape)} is {_described(sharding)}, but its gradient is "
                f"{_described(sharding_of(gradient))}. Give it the sharding of the parameter before the norm: "
                "parameter.grad = parameter.grad.redistribute(placements=parameter.placements)"
            )
        same_sharding.append(local(gradient))
    return by_sharding


def _norm(
    parameters: list[Tensor],
    by_sharding: dict[Sharding | None, list[Tensor]],
    norm_type: float,
    pipeline_group: dist.ProcessGroup | None,
    at_least: torch.dtype = torch.float32,
    gone: Mapping[Sharding | None, Tensor] = MappingProxyType({}),
) -> Tensor:
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ConfigError(f"norm_type={norm_type} must be greater than 0; the usual ones are 2.0 and float('inf')")
    by_groups: dict[frozenset[dist.ProcessGroup], tuple[list[dist.ProcessGroup], list[Tensor], list[Tensor]]] = {}
    for sharding, gradients in by_sharding.items():
        groups = sharding_groups(sharding)
        _, same_groups, squares = by_groups.setdefault(frozenset(groups), (groups, [], []))
        same_groups.extend(gradients)
        squares += [gone[sharding]] if sharding in gone else []

    device = parameters[0].device if parameters else torch.device("cpu")
    for group in (pipeline_group, *(group for groups, *_ in by_groups.values() for group in groups)):
        if device.type == "cpu":  # a frozen stage, or gradients that are offloaded
            device = device_of_messages(group)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for groups, gradients, squares in by_groups.values():
        part = _local_sum(gradients, norm_type, device)
        for square in squares:
            part = part + square.to(device)
        for group in groups:
            part = _sum_over(group, part, norm_type)
        total = torch.maximum(total, part) if norm_type == math.inf else total + part
    if pipeline_group is not None:
        total = _sum_over(pipeline_group, total, norm_type)
    if norm_type != math.inf:
        total = total ** (1 / norm_type)
    gradients = [gradient for same_sharding in by_sharding.values() for gradient in same_sharding]
    return total if any(t.dtype == torch.float64 for t in (*parameters, *gradients)) else total.to(at_least)


def _local_sum(gradients: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Return the sum of |g|^p in float64, or the maximum, from norms in at least float32."""
    norms: list[Tensor] = []
    for (_, dtype), same_type in _by_type(gradients).items():
        wide = torch.float32 if dtype.itemsize < 4 else None
        large, small = [], []
        for gradient in same_type:
            (large if gradient.numel() >= _LARGE else small).append(gradient)
        for gradient in large:
            of_rows = torch.linalg.vector_norm(gradient, norm_type, dim=-1, dtype=wide)
            norms.append(torch.linalg.vector_norm(of_rows, norm_type))
        norms += torch._foreach_norm(small, norm_type, dtype=wide) if small else []
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    stacked = torch.stack([norm.to(device) for norm in norms])
    norm = torch.linalg.vector_norm(stacked, norm_type).double()
    return norm if norm_type == math.inf else norm**norm_type


def _sum_over(group: dist.ProcessGroup, part: Tensor, norm_type: float) -> Tensor:
    if group.size() == 1:
        return part
    if norm_type != math.inf:
        with waiting():
            dist.all_reduce(part, group=group)
        return part
    # Backends may lose NaN in a maximum. The bits of floats that are not negative are ordered as integers, NaN on top;
    # a NaN may have a sign, which abs() leaves on CUDA.
    bits = part.view(torch.int64) & torch.iinfo(torch.int64).max
    with waiting():
        dist.all_reduce(bits, dist.ReduceOp.MAX, group=group)
    return bits.view(torch.float64)


def sharding_groups(sharding: Sharding | None) -> list[dist.ProcessGroup]:
    """Return the groups of the axes along which ranks hold different elements."""
    if sharding is None:
        return []
    device_mesh, placements = sharding
    if any(placement.is_partial() for placement in placements):
        raise ConfigError(f"a parameter is {_described(sharding)}; parameters must be sharded or replicated")
    axes = [axis for axis, placement in enumerate(placements) if not placement.is_replicate()]
    return [device_mesh.get_group(axis) for axis in axes if device_mesh.size(axis) > 1]


def _by_type(tensors: Iterable[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    """Group tensors for foreach operators, one list for each call, without empty shards, which have no maximum."""
    by_type: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        if tensor.numel() > 0:
            by_type[tensor.device, tensor.dtype].append(tensor)
    return by_type


def _described(sharding: Sharding | None) -> str:
    return "a plain tensor" if sharding is None else f"placed {sharding.placements} on {sharding.device_mesh}"
