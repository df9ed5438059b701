"""Optimizer state by parameter name: stages, frozen parts and other parameter groups do not matter."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from lightning_d9d.checkpoint.directory import Checkpoint
from lightning_d9d.errors import ConfigError, StateError
from lightning_d9d.mesh.sharding import zeros_beside

_NOT_HYPERPARAMETERS = {"params", "param_names"}
_FROM_GROUPS = {"base_lrs": "initial_lr", "_last_lr": "lr"}
"""Values of each parameter group that torch's learning rate schedulers keep as well: their key, and the group's key."""
_PER_GROUP = {*_FROM_GROUPS, "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums"}
"""All values that the schedulers keep for each group. Other lists (milestones, phases, nested schedulers) apply to all
groups."""
_OF_ADAM = {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
_STATE_KEYS: dict[type[Optimizer], set[str]] = {Adam: _OF_ADAM, AdamW: _OF_ADAM, SGD: {"momentum_buffer"}}
"""The states that torch's optimizers keep for a parameter."""
_NEEDED = {"exp_avg", "exp_avg_sq", "momentum"}
"""If one of these is missing, the optimizer fails in its next step."""


def optimizer_state(
    optimizer: Optimizer, names: Mapping[nn.Parameter, str], prefix: str
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return an optimizer's state by names, for `save_directory`. Not collective.

    Args:
        optimizer: An optimizer that keeps its state like torch's; the hooks of its `state_dict` run.
        names: Global names of this rank's parameters.
        prefix: Prefix that distinguishes this optimizer from others and from the model.

    Returns:
        Tensors `{prefix}.{parameter name}.{key}`, and a named value `{prefix}.{parameter name}` for each parameter. The
        value has the names of its tensors, the rest of its state, and the hyperparameters of its group.

    Raises:
        ConfigError: A parameter of the optimizer has no name.
    """
    packed = optimizer.state_dict()
    parameter_names = names_by_position(optimizer, names)
    states = packed.pop("state")
    tensors: dict[str, Tensor] = {}
    named_values: dict[str, Any] = {}
    for group in packed.pop("param_groups"):
        hyperparameters = hyperparameters_of(group)
        for index in group["params"]:
            name = f"{prefix}.{parameter_names[index]}"
            state = states.pop(index, {})
            own = {key: value for key, value in state.items() if isinstance(value, Tensor)}
            tensors |= {f"{name}.{key}": value for key, value in own.items()}
            values = {key: value for key, value in state.items() if key not in own}
            named_values[name] = {"tensors": list(own), "values": values, "group": hyperparameters}
    named_values[prefix] = {"state": states, "other": packed}
    return tensors, named_values


def load_optimizer_state(
    optimizer: Optimizer, names: Mapping[nn.Parameter, str], prefix: str, checkpoint: Checkpoint
) -> None:
    """Load the saved state of the parameters with these names into an optimizer. Collective, like `Checkpoint.load`.

    State tensors of a parameter's shape are sharded like the parameter; so are those with `lies_by_block`. Others are
    plain tensors on the CPU, which the optimizer's own `load_state_dict` moves (its hooks run). A parameter stays
    without state if it had none when saved, or was not in the optimizer. A group takes the saved hyperparameters of its
    parameters.

    Args:
        optimizer: An optimizer of the same kind.
        names: Global names of this rank's parameters; as for `optimizer_state`.
        prefix: Prefix of the save.
        checkpoint: An open checkpoint.

    Raises:
        StateError: None of the parameters was saved with the optimizer, or parameters of one group had different
            hyperparameters. Or tensors are missing, or the optimizer was of another kind. Every rank raises it.
    """
    prepared: list[tuple[dict[str, Any], dict[str, Tensor]]] = []
    failure = f"optimizer state {prefix!r} of checkpoint {str(checkpoint.path)!r} cannot be loaded"

    def prepare() -> int:
        prepared.append(_prepare(optimizer, names, prefix, checkpoint))
        return sum(f"{prefix}.{name}" in checkpoint.values for name in names_by_position(optimizer, names))

    if not any(checkpoint.ranks.together(failure, prepare)):
        raise StateError(
            f"{failure}: the checkpoint has none of the parameters' names; give the checkpoint of this model"
        )
    [(state, tensors)] = prepared
    checkpoint.load(tensors, strict=False)
    checkpoint.ranks.together(failure, lambda: give_state(optimizer, state))


def give_state(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load a state into an optimizer. Local.

    Raises:
        ValueError: The state has other groups.
        StateError: The state is of another kind of optimizer: hyperparameters are missing, or parameters have other
            states.
    """
    needed = [optimizer.defaults.keys() & group.keys() for group in optimizer.param_groups]
    _check_keys(optimizer, state)
    optimizer.load_state_dict(state)
    for names, group in zip(needed, optimizer.param_groups, strict=True):
        if lacking := sorted(names - group.keys()):
            raise StateError(
                f"the checkpoint lacks {', '.join(lacking)} of {type(optimizer).__name__}: another kind of optimizer "
                "was saved. Return that optimizer from configure_optimizers, or start from the weights only "
                "(callbacks.InitialWeights)"
            )


def _check_keys(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Check that states have the names that an optimizer keeps, if these are known. Local.

    An optimizer may have a method `state_keys`, which returns them for a group and a parameter.
    """
    known = getattr(optimizer, "state_keys", lambda *_: _STATE_KEYS.get(type(optimizer)))
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=False):
        for parameter, index in zip(group["params"], saved["params"], strict=False):
            keys, expected = state["state"].get(index, {}).keys(), known(group, parameter)
            if expected is None or not keys or _NEEDED & expected <= keys <= expected:
                continue
            remedy = "Return that one from configure_optimizers"
            if "exp_avg_scale" in keys:
                remedy = "StochasticAdamW(state_dtype=torch.float32) takes its eight bits"
            raise StateError(
                f"a parameter of shape {list(parameter.shape)} was saved with {', '.join(sorted(keys))}, and "
                f"{type(optimizer).__name__} keeps {', '.join(sorted(expected))}: another kind of optimizer was "
                f"saved. {remedy}, or start from the weights only (callbacks.InitialWeights)"
            )


def fit_scheduler_state(state: dict[str, Any], groups: Sequence[Mapping[str, Any]]) -> None:
    """Change the state of a learning rate scheduler, in place, to the parameter groups that its optimizer has now.

    Groups may differ from the saved ones, since `parameter_groups` depends on the mesh. The values that a scheduler
    keeps for each group follow from the groups, or are the same for all. The groups' learning rates have been loaded
    before, by the names of parameters.

    Raises:
        StateError: Other values differ between groups, or the state is not that of a scheduler.
    """
    left, known = [state], set[int]()  # schedulers, and lists of them, may be held several times
    while left:
        each = left.pop()
        if id(each) not in known:
            _fit_per_group(each, groups)
            nested = _list_of(each, "_schedulers")
            left += nested if id(nested) not in known else []
            known |= {id(each), id(nested)}


def _fit_per_group(state: dict[str, Any], groups: Sequence[Mapping[str, Any]]) -> None:
    if not isinstance(state, dict):
        raise StateError(f"the checkpoint has {reprlib.repr(state)} in place of the state of a learning rate scheduler")
    for key in sorted(_PER_GROUP & state.keys()):
        values = _list_of(state, key)
        if key in _FROM_GROUPS and all(_FROM_GROUPS[key] in group for group in groups):
            state[key] = [group[_FROM_GROUPS[key]] for group in groups]
        elif len(values) != len(groups):
            if any(value != values[0] for value in values):
                raise StateError(
                    f"a learning rate scheduler was saved with {key}={reprlib.repr(values)}, one for each of the "
                    f"optimizer's groups, but there are {len(groups)} now. Group the parameters as in the saved run"
                )
            state[key] = values[:1] * len(groups)


def _list_of(state: dict[str, Any], key: str) -> list[Any] | tuple[Any, ...]:
    values = state.get(key, ())
    if not isinstance(values, list | tuple):
        raise StateError(f"a learning rate scheduler was saved with {key}={reprlib.repr(values)}, which must be a list")
    return values


def _prepare(
    optimizer: Optimizer, names: Mapping[nn.Parameter, str], prefix: str, checkpoint: Checkpoint
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the argument of `load_state_dict`, and the tensors in it that must be filled."""
    values = checkpoint.values
    parameter_names = [f"{prefix}.{name}" for name in names_by_position(optimizer, names)]
    if prefix not in values:
        raise StateError(
            "no state was saved under this prefix; give the checkpoint of a run with the same number of optimizers"
        )
    parameters = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
    tensors: dict[str, Tensor] = {}
    states: dict[Any, dict[Any, Any]] = {}
    for index, (parameter, name) in enumerate(zip(parameters, parameter_names, strict=True)):
        stored = values.get(name, {"tensors": [], "values": {}})
        own = {key: _room(optimizer, parameter, key, f"{name}.{key}", checkpoint) for key in stored["tensors"]}
        tensors |= {f"{name}.{key}": tensor for key, tensor in own.items()}
        if own or stored["values"]:
            states[index] = {**own, **stored["values"]}
    groups = groups_with(optimizer, parameter_names, values)
    other = values[prefix]
    return {**other["other"], "state": {**other["state"], **states}, "param_groups": groups}, tensors


def _room(optimizer: Optimizer, parameter: nn.Parameter, key: Any, name: str, checkpoint: Checkpoint) -> Tensor:
    if name not in checkpoint.tensors:
        raise StateError(f"{name} is not in the checkpoint; give another one")
    shape, dtype = checkpoint.tensors[name]
    if shape == parameter.shape and key != "step":  # `step` is a plain scalar even if the parameter is a scalar
        return torch.empty_like(parameter.detach(), dtype=dtype)
    if lies_by_block(optimizer, parameter, key):
        return zeros_beside(parameter.detach(), shape, dtype)
    return torch.empty(shape, dtype=dtype)


def lies_by_block(optimizer: Optimizer, parameter: Tensor, key: Any) -> bool:
    """Return True if a state of another shape is sharded like its parameter, one element a block of a row. Local.

    An optimizer that has such states has a method of this name.
    """
    method = getattr(optimizer, "lies_by_block", None)
    return method is not None and method(parameter, key)


def groups_with(optimizer: Optimizer, names: Sequence[str], values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return an optimizer's groups for `load_state_dict`, with the saved hyperparameters. Local.

    Args:
        optimizer: The optimizer in its current state.
        names: Names of its parameters, by position.
        values: A mapping for each saved parameter, by name, with the hyperparameters under `group`.

    Raises:
        StateError: Parameters of one group had different hyperparameters.
    """
    groups: list[dict[str, Any]] = []
    rest = iter(enumerate(names))
    for group in optimizer.param_groups:
        members = [next(rest) for _ in group["params"]]
        hyperparameters = _saved_hyperparameters(group, [name for _, name in members], values)
        groups.append({**hyperparameters, "params": [index for index, _ in members]})
    return groups


def hyperparameters_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a parameter group other than its parameters."""
    return {key: value for key, value in group.items() if key not in _NOT_HYPERPARAMETERS}


def _saved_hyperparameters(group: Mapping[str, Any], names: list[str], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters that the group's parameters were saved with; the group's own if none was saved."""
    own = hyperparameters_of(group)
    saved = [(name, values[name]["group"]) for name in names if name in values]
    if not saved:
        return own
    first_name, first = saved[0]
    for name, other in saved:
        if other is first:
            continue
        for key in first.keys() | other.keys():
            if key not in first or key not in other or not _equal(first[key], other[key]):
                raise StateError(
                    f"{first_name} and {name} are in one group of the optimizer, but were saved with "
                    f"{key}={reprlib.repr(first.get(key))} and {reprlib.repr(other.get(key))}. Group the "
                    "parameters as in the saved run"
                )
    return {key: _beside(value, own.get(key)) for key, value in first.items()}


def _beside(value: Any, present: Any) -> Any:
    """Move a value to the device of the tensor that it replaces."""
    return value.to(present.device) if isinstance(value, Tensor) and isinstance(present, Tensor) else value


def _equal(first: Any, second: Any) -> bool:
    return bool(first == second)


def names_by_position(optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> list[str]:
    """Return the names of an optimizer's parameters in the order in which torch numbers them.

    Raises:
        ConfigError: A parameter does not have a name.
    """
    found = []
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter not in names:
                raise ConfigError(
                    f"a parameter of shape {list(parameter.shape)} in group {number} of {type(optimizer).__name__} "
                    "is not in the module, so its state cannot be named. Give the optimizer the module's parameters"
                )
            found.append(names[parameter])
    return found
