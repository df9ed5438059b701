"""The private names of FSDP2 that `lightning_d9d/parallel/fsdp.py` uses, with the versions of torch that have them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from packaging.version import Version
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import lightning_d9d
from lightning_d9d.parallel import fsdp
from tests.harness.ranks import RankContext

SOURCE = Path(lightning_d9d.__file__).parent
VERSION = Version(torch.__version__).release[:2]


class Name(NamedTuple):
    owner: str
    name: str
    first: tuple[int, int] = (2, 11)
    last: tuple[int, int] = (2, 15)


NAMES = [
    Name("unit", "_get_fsdp_state"),
    Name("state", "_lazy_init"),
    Name("state", "_is_root"),
    Name("state", "_training_state"),
    Name("state", "_state_ctx"),
    Name("state", "_comm_ctx"),
    Name("state", "_modules_to_run_forward"),
    Name("state", "_root_post_backward_final_callback"),
    Name("state", "_fsdp_param_group"),
    Name("state", "_fsdp_param_groups", first=(2, 12)),
    Name("context", "all_states"),
    Name("context", "iter_forward_root"),
    Name("context", "post_backward_final_callback_queued"),
    Name("context", "manual_backward_finalization_active", first=(2, 15)),
    Name("messages", "post_forward_order"),
    Name("group", "fsdp_params"),
    Name("group", "post_forward_mesh_info"),
    Name("group", "post_backward"),
    Name("group", "wait_for_unshard"),
    Name("group", "finalize_backward"),
    Name("group", "reduce_grads"),
    Name("group", "_init_mp_dtypes"),
    Name("group", "_init_reduce_scatter_param_order", first=(2, 15)),
    Name("group", "_post_forward_indices"),
    Name("group", "_training_state"),
    Name("group", "_all_gather_result"),
    Name("group", "_reduce_dtype"),
    Name("group", "_orig_dtype", last=(2, 14)),
    Name("parameter", "sharded_param"),
    Name("parameter", "_unsharded_param"),
    Name("parameter", "unsharded_accumulated_grad"),
    Name("parameter", "reduce_dtype"),
    Name("parameter", "orig_dtype"),
    Name("parameter", "sharded_grad_dtype", first=(2, 15)),
    Name("parameter", "_has_sharded_grad_dtype_override", first=(2, 15)),
]
PUBLIC = {Name("unit", "set_reduce_scatter_unused_params", first=(2, 13))}
"""Public, but not in all versions."""


@pytest.mark.ranks(2)
def test_each_version_has_the_names_that_it_was_seen_with(rank: RankContext) -> None:
    unit: Any = nn.Sequential(nn.Linear(4, 4)).to(rank.device)
    fully_shard(unit, mesh=init_device_mesh(rank.device.type, (2,)))
    unit(torch.ones(1, 4, device=rank.device)).sum().backward()
    state = unit._get_fsdp_state()
    group = state._fsdp_param_group
    owners = {
        "unit": unit,
        "state": state,
        "context": state._state_ctx,
        "messages": state._comm_ctx,
        "group": group,
        "parameter": group.fsdp_params[0],
    }
    differing = [
        f"{each.owner}.{each.name}"
        for each in (*NAMES, *PUBLIC)
        if hasattr(owners[each.owner], each.name) != (each.first <= VERSION <= each.last)
    ]
    assert not differing
    assert isinstance(unit, FSDPModule)
    assert (VERSION >= (2, 15)) == fsdp.ACCUMULATES_IN_LEAF


def test_they_are_all_that_is_used_and_used_nowhere_else() -> None:
    private = {each.name for each in NAMES if each.name.startswith("_")} | {"fsdp_params", "unsharded_accumulated_grad"}
    adapters = SOURCE / "parallel" / "fsdp.py"
    code = adapters.read_text()
    assert not [each.name for each in NAMES if not re.search(rf"\b{each.name}\b", code)]
    used = set(re.findall(r"(?:state|context|group|each|unit|_group|_state)\.(_[a-z]\w+)", code))
    assert used - {"_group", "_state", "_post_forward_mesh"} <= private
    elsewhere = [
        f"{path.relative_to(SOURCE)}: {name}"
        for path in SOURCE.rglob("*.py")
        if path != adapters
        for name in private
        if re.search(rf"\.{name}\b", path.read_text())
    ]
    assert not elsewhere
    assert "fully_shard.state" not in "".join(path.read_text() for path in SOURCE.rglob("*.py"))
