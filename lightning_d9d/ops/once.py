"""Side effects of a forward that a recomputation must not repeat.

An operator asks when it runs if it is in a recomputation, also inside of code that `torch.compile` has compiled.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_d9d.ops.collectives import group_named
from lightning_d9d.ops.operator import define
from lightning_d9d.waits import waiting


def is_repeated() -> bool:
    """Return True in a forward inside of a backward, which is a recomputation. Local."""
    return torch._C._current_graph_task_id() != -1


def add_once_(total: Tensor, values: Tensor) -> None:
    """Add `values` to `total`, except in a recomputation. Without gradient."""
    _add_op(total, values)


def sum_once(values: Tensor, group_name: str) -> Tensor:
    """Return the sum over ranks; in a recomputation return `values`, since the sum is not used again there.

    Collective over the group, except in a recomputation. Without gradient.
    """
    return _sum_op(values, group_name)


def _add(total: Tensor, values: Tensor) -> None:
    if not is_repeated():
        total.add_(values)


def _sum(values: Tensor, group_name: str) -> Tensor:
    result = values.clone()
    if not is_repeated():
        with waiting():
            dist.all_reduce(result, group=group_named(group_name))
    return result


_add_op = define("add_once_", "(Tensor(a!) total, Tensor values) -> ()", _add, lambda total, values: None)
_sum_op = define(
    "sum_once", "(Tensor values, str group_name) -> Tensor", _sum, lambda values, group_name: torch.empty_like(values)
)
