"""What a forward does to more than its results, and a recomputation of it must not do again.

Whether it is one is asked when an operator runs, also inside of what `torch.compile` has compiled.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_d9d.ops.collectives import group_named
from lightning_d9d.ops.operator import define
from lightning_d9d.waits import waiting


def add_once_(total: Tensor, values: Tensor) -> None:
    """`total += values`, but not in a recomputation. Without gradient."""
    _add_op(total, values)


def sum_once(values: Tensor, group_name: str) -> Tensor:
    """The sum over ranks, or in a recomputation `values` of this rank, for what is not computed from them again.

    Collective over the group, except in a recomputation. Without gradient.
    """
    return _sum_op(values, group_name)


def _is_repeated() -> bool:
    """A forward inside of a backward."""
    return torch._C._current_graph_task_id() != -1


def _add(total: Tensor, values: Tensor) -> None:
    if not _is_repeated():
        total.add_(values)


def _sum(values: Tensor, group_name: str) -> Tensor:
    result = values.clone()
    if not _is_repeated():
        with waiting():
            dist.all_reduce(result, group=group_named(group_name))
    return result


_add_op = define("add_once_", "(Tensor(a!) total, Tensor values) -> ()", _add, lambda total, values: None)
_sum_op = define(
    "sum_once", "(Tensor values, str group_name) -> Tensor", _sum, lambda values, group_name: torch.empty_like(values)
)
