"""What Lightning and torch work out again for each trainer and each mesh, worked out once in a process of tests."""

from __future__ import annotations

import importlib.metadata
import traceback
from collections.abc import Hashable
from functools import cache
from types import SimpleNamespace
from typing import Any


@cache
def work_out_once() -> None:
    """Leave out what changes no result and takes a tenth of the time of a test of ranks.

    - Each trainer reads the metadata of all installed packages, to find callbacks that they bring.
    - For each mesh and placement DTensor calls an operator on fake tensors again, whose shapes depend on neither.
    - For devices that have not begun, each seed is noted with the text of the stack, of which nobody reads more.
    - Without GPUs, Lightning searches each logged value for tensors, to move them to the CPU where they are.
    """
    import torch
    from lightning.fabric.utilities import registry
    from lightning.pytorch.trainer.connectors.logger_connector import result
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    registry.entry_points = cache(importlib.metadata.entry_points)  # type: ignore[attr-defined]
    name = "_propagate_tensor_meta_non_cached"
    if propagate := getattr(ShardingPropagator, name, None):  # else another version, which works, but slowly
        setattr(ShardingPropagator, name, _by_tensors(propagate))
    for backend in (torch.cuda, torch.xpu, torch.mtia):
        backend.traceback = SimpleNamespace(**{**vars(traceback), "format_stack": list})  # type: ignore[attr-defined]
    if not torch.cuda.is_available():
        for values in (result._ResultMetric, result._ResultCollection):
            values.to = lambda self, *_, **__: self  # type: ignore[method-assign]


def _by_tensors(propagate: Any) -> Any:
    from torch._guards import detect_fake_mode
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    known: dict[Hashable, Any] = {}

    def key_of(value: Any) -> Hashable:
        if isinstance(value, DTensorSpec):
            return DTensorSpec, value.tensor_meta
        if isinstance(value, list | tuple):
            return type(value), *map(key_of, value)
        return type(value), value  # 1 and 1.0 are equal

    def look_up(self: Any, schema: Any) -> Any:
        if detect_fake_mode() is not None:  # of a compiler, whose shapes may be symbols
            return propagate(self, schema)
        try:
            key = schema.op, key_of(schema.args_schema), key_of(tuple(sorted(schema.kwargs_schema.items())))
            if key not in known:
                known[key] = propagate(self, schema)
        except TypeError:  # an argument that cannot be a key
            return propagate(self, schema)
        return known[key]

    return look_up
