"""Loads weights of a checkpoint, whole or in part, and converts between whole and sharded tensors."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from lightning_d9d.checkpoint import (
    MODEL,
    Differences,
    StoredTensor,
    check_saved_tied_parameters,
    check_tied_parameters,
    compare,
    is_directory,
    lies_by_block,
    open_directory,
    tied_names,
)
from lightning_d9d.errors import StateError, printable
from lightning_d9d.mesh.agreement import Ranks, first_of
from lightning_d9d.mesh.collectives import all_gather_object, device_of_messages
from lightning_d9d.mesh.sharding import zeros_beside
from lightning_d9d.strategy.checkpoint_files import mapped, read_checkpoint


def overwrite_weights(module: nn.Module, path: str | Path, *, prefix: str = "", strict: bool = True) -> Differences:
    """Overwrite only a module's parameters and buffers, in place, by those of a checkpoint. Collective.

    Args:
        module: Allocated module; its tensors may be plain or DTensors on any mesh. In a pipeline this is a module with
            each rank's own stages.
        path: A checkpoint directory or a Lightning file.
        prefix: Prefix of the names to load.
        strict: Whether the module and the checkpoint must have the same of these names.

    Returns:
        If it is not strict, the names that only one of them has.

    Raises:
        StateError: The checkpoint is damaged, names or shapes do not fit, or nothing in the module has the prefix.
            Raised on every rank, before any change.
    """
    tensors = {name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)}
    own = {name: value for name, value in tensors.items() if name.startswith(prefix)}
    if prefix and not any(Ranks().all_gather(bool(own))):
        raise StateError(
            f"prefix={prefix!r}: no name in the module begins with it; the names are {first_of([*tensors])}"
        )
    if Ranks().all_gather(is_directory(path))[0]:
        named = {f"{MODEL}{name}": value for name, value in own.items()}
        opened = open_directory(path)
        check_saved_tied_parameters(module, own, opened)
        found = opened.load(named, strict=strict, prefix=MODEL + prefix)
        return Differences(*([name.removeprefix(MODEL) for name in names] for names in found))
    failure = f"checkpoint {str(path)!r} cannot be loaded"
    with Ranks().agreed("weights cannot be loaded"):  # the error names the checkpoint
        state = read_checkpoint(functools.partial(mapped, path), path)["state_dict"]
    saved = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    stored = {name: StoredTensor(value.shape, value.dtype) for name, value in saved.items()}
    differences = compare(own, stored, Ranks(), failure, strict=strict, prefix=prefix)
    Ranks().together(
        failure, lambda: check_tied_parameters(tied_names(module), {name: saved.get(name) for name in own})
    )
    with torch.no_grad():
        for name in own.keys() & saved.keys():
            own[name].copy_(shard_like(saved[name], own[name]))
    return differences


def report(differences: Differences, path: str | Path) -> None:
    """Warn about names that were not loaded."""
    for names, where in zip(differences, ("not in it, and stay as they are", "not in the model"), strict=True):
        if names:
            rank_zero_warn(
                f"of checkpoint {str(path)!r} not all was loaded: {len(names)} are {where}: "
                f"{printable(first_of(names))}"
            )


def gathered_on_first(tensors: Mapping[str, Tensor], pipeline: dist.ProcessGroup | None) -> dict[str, Tensor]:
    """Return all ranks' tensors, whole and on the CPU, on the first rank; nothing on the others. Collective.

    They are gathered and sent one by one.

    Args:
        tensors: Tensors by name; plain ones, not DTensors, are equal on all ranks that have the name.
        pipeline: The ranks that have the other stages at the same place of the mesh; None if this rank has all stages.
    """
    if pipeline is None:
        is_first = Ranks().is_first
        return {name: whole for name, tensor in tensors.items() if (whole := _whole(tensor, is_first)) is not None}
    ranks, device, place = dist.get_process_group_ranks(pipeline), device_of_messages(pipeline), dist.get_rank(pipeline)
    of_stages = all_gather_object({name: (each.shape, each.dtype) for name, each in tensors.items()}, pipeline)
    sources: dict[str, int] = {}
    for stage, specs in enumerate(of_stages):
        sources = dict.fromkeys(specs, stage) | sources
    is_on_line = ranks[0] == 0  # of ranks to the first one; others only help to gather
    kept: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if sources[name] == place and (whole := _whole(tensor, is_on_line)) is not None:
            if place == 0:
                kept[name] = whole
            else:
                dist.send(whole.to(device).contiguous(), ranks[0], group=pipeline)
    if is_on_line and place == 0:
        for stage, specs in enumerate(of_stages):
            for name, (shape, dtype) in specs.items():
                if 0 < stage == sources[name]:
                    received = torch.empty(shape, dtype=dtype, device=device)
                    dist.recv(received, ranks[stage], group=pipeline)
                    kept[name] = received.cpu()
    return kept


def _whole(tensor: Tensor, keep: bool) -> Tensor | None:
    """Return the whole tensor on the CPU, if it is kept. Collective over the mesh of a DTensor."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().cpu() if keep else None


def sharded_weights(present: Mapping[str, Any], whole: Mapping[str, Any]) -> dict[str, Any]:
    """Return a whole model's tensors, sharded as the model's are. Local: each rank has all of it."""
    return {
        name: shard_like(value, present[name]) if isinstance(present.get(name), DTensor) else value
        for name, value in whole.items()
    }


def sharded_state(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's whole state, sharded as its parameters are."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not any(isinstance(parameter, DTensor) for parameter in parameters):
        return state
    of_parameters = {
        index: {key: _sharded(optimizer, parameters[index], key, value) for key, value in entries.items()}
        for index, entries in state["state"].items()
    }
    return {**state, "state": of_parameters}


def _sharded(optimizer: Optimizer, parameter: Tensor, key: Any, value: Any) -> Any:
    by_block = lies_by_block(optimizer, parameter, key)
    return shard_like(value, zeros_beside(parameter, value.shape, value.dtype) if by_block else parameter)


def shard_like(value: Any, like: Tensor) -> Any:
    """Shard a whole tensor like another tensor of its shape; other values and shapes stay unchanged. Local."""
    if not isinstance(like, DTensor) or isinstance(value, DTensor) or not isinstance(value, Tensor):
        return value
    if value.shape != like.shape:  # what differs is refused later, or it is a step count
        return value
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
