"""Checkpoints of many ranks in the format of one process: Lightning's own, with optimizer state by position.

torch numbers an optimizer's parameters by their places in its groups. Each rank has its own groups. In a pipeline these
groups have the parameters of the rank's stages. A rank may also have more groups than one process, since fused steps do
not mix tensors of different shardings (see `parameter_groups`). The groups of one process follow from those of all
pipeline ranks and from the order in which one process names parameters.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from itertools import chain, count, takewhile
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_d9d.checkpoint.optimizers import (
    fit_scheduler_state,
    groups_with,
    hyperparameters_of,
    names_by_position,
)
from lightning_d9d.errors import StateError
from lightning_d9d.mesh.agreement import Ranks

MODEL = "model."
"""Prefix of the model's names in a directory."""
OPTIMIZER = "optimizer_{}"
"""Prefix of an optimizer's names in a directory."""
AVERAGES = "lightning_d9d_weight_averages"
"""Key of the averages of weights in a file, by the weights' names; prefix of their names in a directory."""
GROUPS = "optimizer_{}_groups.{}"
"""Name of the `group_records` of an optimizer and a pipeline rank."""
ONE_PROCESS = "lightning_d9d_one_process"
"""Name of a record with `parameters`, all names in the order of one process, and `scheduled`, the index of each
scheduler's optimizer (or None).
"""
_OF_DIRECTORIES = re.compile(rf"{re.escape(MODEL)}|optimizer_\d+(_groups)?(\.|$)|{ONE_PROCESS}$")


class WholeGroup(NamedTuple):
    """A parameter group of an optimizer that has all parameters."""

    hyperparameters: Mapping[str, Any]
    names: Sequence[str]


def group_records(optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> list[dict[str, Any]]:
    """Return a rank's parameter groups, for `whole_groups`. Not collective.

    Args:
        optimizer: This rank's optimizer.
        names: Global names of its parameters.

    Returns:
        For each group its `hyperparameters`, the `names` of its parameters, and its `repetition`: the number of groups
        before it with the same hyperparameters and sharding. Groups that differ only in sharding are one group in one
        process.

    Raises:
        ConfigError: A parameter of the optimizer has no name.
    """
    rest = iter(names_by_position(optimizer, names))
    records: list[dict[str, Any]] = []
    num_alike: Counter[Hashable] = Counter()
    for group in optimizer.param_groups:
        hyperparameters, names_of_group = hyperparameters_of(group), [next(rest) for _ in group["params"]]
        meshes = {repr(each.device_mesh) if isinstance(each, DTensor) else "" for each in group["params"]}
        kind = (_hashable(hyperparameters), frozenset(meshes))
        records.append({"hyperparameters": hyperparameters, "names": names_of_group, "repetition": num_alike[kind]})
        num_alike[kind] += 1
    return records


def whole_groups(ranks: Sequence[Sequence[Mapping[str, Any]]], order: Sequence[str]) -> list[WholeGroup]:
    """Return the groups that one process makes.

    Args:
        ranks: `group_records` of one rank for each place in the pipeline.
        order: All parameters, as one process names them.

    Raises:
        StateError: The groups of one process cannot be derived.
    """
    places = {name: place for place, name in enumerate(order)}
    of_ranks = [_regardless_of_sharding(records) for records in ranks]
    whole = {kind: list[Mapping[str, Any]]() for kind in max(of_ranks, key=len)}
    for groups in of_ranks:
        rest = iter(whole.items())
        for kind, records in groups.items():
            same = next((found for first, found in rest if first == kind), None)
            if same is None:
                raise StateError(
                    "pipeline ranks had different parameter groups, so the groups of one process are unknown"
                )
            same += records
    return [
        WholeGroup(records[0]["hyperparameters"], _in_order([record["names"] for record in records], places))
        for records in whole.values()
    ]


def _regardless_of_sharding(records: Sequence[Mapping[str, Any]]) -> dict[Hashable, list[Mapping[str, Any]]]:
    groups: dict[Hashable, list[Mapping[str, Any]]] = {}
    for record in records:
        groups.setdefault((record["repetition"], _hashable(record["hyperparameters"])), []).append(record)
    return groups


def _hashable(value: Any) -> Hashable:
    """Return a hashable that is equal for equal values: a file may have too many groups to compare in pairs."""
    if isinstance(value, Tensor):
        return _hashable(value.tolist())
    if isinstance(value, list | tuple):
        return type(value), *map(_hashable, value)
    if isinstance(value, Mapping):
        return frozenset((key, _hashable(inner)) for key, inner in value.items())
    return value if isinstance(value, Hashable) else repr(value)


def _in_order(sequences: Sequence[Sequence[str]], places: Mapping[str, int]) -> Sequence[str]:
    num_holders = Counter(chain.from_iterable(sequences))
    for names in sequences:
        own = [name for name in names if num_holders[name] == 1]  # tied parameters follow other ones on other ranks
        if not places.keys() >= {*own} or own != sorted(own, key=places.__getitem__):
            break
    else:
        return sorted(num_holders.keys() & places.keys(), key=places.__getitem__)
    for names in sequences:
        if len(names) == len(num_holders):  # in the order the user gave
            return names
    raise StateError(
        f"an optimizer has parameters in another order than the module ({', '.join(names[:3])}, ...), so their "
        "order in one process is unknown"
    )


def whole_checkpoint(values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return Lightning's own checkpoint, which stock strategies load.

    Args:
        values: Values and named values of a directory. Without `optimizer_states`, optimizers are left out.
        tensors: Whole tensors of model and optimizers.

    Raises:
        StateError: The order of an optimizer's parameters in one process is unknown, or the values are damaged.
    """
    with Ranks(alone=True).agreed("its optimizers do not have a form that stock strategies load"):
        return _whole_checkpoint(values, tensors)


def _whole_checkpoint(values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    of_lightning = {name: value for name, value in values.items() if not _OF_DIRECTORIES.match(name)}
    checkpoint = {**of_lightning, "state_dict": {**_below(MODEL, values), **_below(MODEL, tensors)}}
    if averages := _below(f"{AVERAGES}.", tensors):
        checkpoint[AVERAGES] = averages
    if "optimizer_states" in values:
        states = [_by_position(index, values, tensors) for index in range(values["optimizer_states"])]
        scheduled = values.get(ONE_PROCESS, {}).get("scheduled", [])
        for state, index in zip(values.get("lr_schedulers", []), scheduled, strict=False):
            if index is not None:
                fit_scheduler_state(state, states[index]["param_groups"])
        checkpoint["optimizer_states"] = states
    return checkpoint


def _below(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}


def _by_position(index: int, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    prefix = OPTIMIZER.format(index)
    keys = takewhile(values.__contains__, (GROUPS.format(index, rank) for rank in count()))
    try:
        records = [values[key] for key in keys] or [_records_before(prefix, values)]
        groups = whole_groups(records, values.get(ONE_PROCESS, {}).get("parameters", []))
    except StateError as error:
        raise StateError(f"{prefix}: {error}") from error
    states: dict[Any, Any] = {}
    param_groups: list[dict[str, Any]] = []
    positions = count()
    for hyperparameters, names in groups:
        params = [next(positions) for _ in names]
        param_groups.append({**hyperparameters, "params": params})
        for position, name in zip(params, names, strict=True):
            saved = values[f"{prefix}.{name}"]
            state = {key: tensors[f"{prefix}.{name}.{key}"] for key in saved["tensors"]} | saved["values"]
            if state:
                states[position] = state
    other = values[prefix]
    return {**other["other"], "state": {**other["state"], **states}, "param_groups": param_groups}


def _records_before(prefix: str, values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Derive the records of an older checkpoint of one rank: parameters of one group share their hyperparameters."""
    records: list[dict[str, Any]] = []
    last: Any = None
    for name, saved in _below(f"{prefix}.", values).items():
        if saved["group"] is not last:
            last = saved["group"]
            records.append({"hyperparameters": last, "names": [], "repetition": 0})
        records[-1]["names"].append(name)
    if len({_hashable(record["hyperparameters"]) for record in records}) < len(records):
        raise StateError(
            "it was saved by several stages, or has equal groups, and by a version that did not save their order"
        )
    return records


def part_of_whole(
    optimizer: Optimizer, names: Mapping[nn.Parameter, str], state: Mapping[str, Any], whole: Sequence[WholeGroup]
) -> dict[str, Any]:
    """Return a rank's part of the state by position that one process saved. Not collective.

    Args:
        optimizer: This rank's optimizer.
        names: Global names of its parameters.
        state: The saved state.
        whole: The groups that one process would have in this run.

    Returns:
        The state for `load_state_dict`; tensors are whole.

    Raises:
        StateError: The groups differ, or parameters in one group had different hyperparameters.
    """
    sizes = [len(group["params"]) for group in state["param_groups"]]
    if sizes != [len(group.names) for group in whole]:
        raise StateError(
            f"an optimizer was saved with groups of {sizes} parameters, but those of this run have "
            f"{[len(group.names) for group in whole]} in one process. Group the parameters as in the saved run"
        )
    places: dict[str, Any] = {}
    groups: dict[str, Any] = {}
    for saved, group in zip(state["param_groups"], whole, strict=True):
        places |= zip(group.names, saved["params"], strict=True)
        shared = {"group": hyperparameters_of(saved)}
        groups |= dict.fromkeys(group.names, shared)
    own = names_by_position(optimizer, names)
    numbered = {*places.values()}
    states = {place: value for place, value in state["state"].items() if place not in numbered}
    for position, name in enumerate(own):
        if places[name] in state["state"]:
            states[position] = state["state"][places[name]]
    return {**state, "state": states, "param_groups": groups_with(optimizer, own, groups)}
