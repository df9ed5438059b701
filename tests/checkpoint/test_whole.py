"""The groups of one process, from those of ranks."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

from lightning_d9d.checkpoint import group_records, optimizer_state, part_of_whole, whole_checkpoint, whole_groups
from lightning_d9d.checkpoint.whole import WholeGroup, _records_before
from lightning_d9d.errors import StateError
from tests.fuzz import MAX_SECONDS
from tests.harness.compare import assert_bitwise_equal

ORDER = ["embed", "head", "a", "b", "c", "d"]
"""An order that is not that of the stages."""


def record(names: str, decay: float = 0.0, repetition: int = 0) -> dict[str, Any]:
    return {"hyperparameters": {"decay": decay, "lr": 0.1}, "names": names.split(), "repetition": repetition}


def test_groups_of_stages_are_put_together_in_the_order_of_one_process() -> None:
    first = [record("embed a", 0.1), record("c")]  # of the first and the last stage
    second = [record("head b", 0.1), record(""), record("d", repetition=1)]
    groups = whole_groups([first, second], ORDER)
    assert [[*group.names] for group in groups] == [["embed", "head", "a", "b"], ["c"], ["d"]]
    assert [group.hyperparameters["decay"] for group in groups] == [0.1, 0.0, 0.0]


def test_groups_that_differ_in_sharding_alone_are_one() -> None:
    rank = [record("a c"), record("b d"), record("embed", repetition=1)]
    assert [[*group.names] for group in whole_groups([rank], ORDER)] == [["a", "b", "c", "d"], ["embed"]]


def test_tied_parameters_come_once() -> None:
    assert whole_groups([[record("embed a")], [record("b embed")]], ORDER)[0].names == ["embed", "a", "b"]
    assert whole_groups([[record("embed")], [record("b embed")]], ORDER)[0].names == ["embed", "b"]


def test_one_rank_may_have_an_order_of_its_own() -> None:
    assert whole_groups([[record("d a")], [record("")]], ORDER)[0].names == ["d", "a"]


def test_what_is_unknown_is_refused() -> None:
    with pytest.raises(StateError, match="different parameter groups"):
        whole_groups([[record("a", 0.1)], [record("b", 0.2)]], ORDER)
    with pytest.raises(StateError, match="another order than the module"):
        whole_groups([[record("a embed")], [record("b")]], ORDER)


def test_as_many_groups_as_a_file_has_room_for() -> None:
    names = [*map(str, range(5000))]
    different = [record(name, decay=place) for place, name in enumerate(names)]
    equal = [record(name) for name in names]
    grouped = {f"optimizer_0.{each['names'][0]}": {"group": each["hyperparameters"]} for each in different}
    expected: list[list[list[str]]] = [[[name] for name in names], [names], [[name] for name in names]]
    begin, found = time.process_time(), [whole_groups([records], names) for records in (different, equal)]
    found.append(
        [WholeGroup(each["hyperparameters"], each["names"]) for each in _records_before("optimizer_0", grouped)]
    )
    assert time.process_time() - begin < MAX_SECONDS
    assert [[[*group.names] for group in groups] for groups in found] == expected


def trained(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    optimizer = torch.optim.AdamW(
        [{"params": module[0].parameters(), "lr": 0.3}, {"params": module[1].parameters()}], lr=0.1
    )
    module(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    return module, optimizer


def test_checkpoints_without_records() -> None:
    """Those of one rank stay as they were. For several ranks nobody knows."""
    module, optimizer = trained()
    tensors, values = optimizer_state(optimizer, {p: n for n, p in module.named_parameters()}, "optimizer_0")
    [state] = whole_checkpoint({**values, "optimizer_states": 1}, tensors)["optimizer_states"]
    expected = optimizer.state_dict()
    assert state["param_groups"] == expected["param_groups"]
    for index, own in expected["state"].items():
        for key, value in own.items():
            assert_bitwise_equal(key, state["state"][index][key], value)
    values["optimizer_0.1.bias"] = {**values["optimizer_0.1.bias"], "group": values["optimizer_0.0.bias"]["group"]}
    with pytest.raises(StateError, match=r"not have a form .* optimizer_0: .* did not save their order"):
        whole_checkpoint({**values, "optimizer_states": 1}, tensors)


def test_part_of_another_optimizer_is_refused() -> None:
    module, optimizer = trained()
    names = {p: n for n, p in module.named_parameters()}
    whole = whole_groups([group_records(optimizer, names)], [*names.values()])
    part = part_of_whole(optimizer, names, optimizer.state_dict(), whole)
    assert part["param_groups"] == optimizer.state_dict()["param_groups"]
    fewer = [whole[0], WholeGroup(whole[1].hyperparameters, ["1.weight"])]
    with pytest.raises(StateError, match=r"groups of \[2, 2\] parameters, but those of this run have \[2, 1\]"):
        part_of_whole(optimizer, names, optimizer.state_dict(), fewer)
