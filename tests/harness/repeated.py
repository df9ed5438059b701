"""What Lightning and torch work out again for each trainer and each mesh, worked out once in a process of tests."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Hashable
from functools import cache
from typing import Any


@cache
def work_out_once() -> None:
    """Leave out what changes no result and takes a tenth of the time of a test of ranks.

    - Each trainer reads the metadata of all installed packages, to find callbacks that they bring.
    - For each mesh and placement DTensor calls an operator on fake tensors again, whose shapes depend on neither.
    """
    from lightning.fabric.utilities import registry
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    registry.entry_points = cache(importlib.metadata.entry_points)  # type: ignore[attr-defined]
    name = "_propagate_tensor_meta_non_cached"
    if propagate := getattr(ShardingPropagator, name, None):  # else another version, which works, but slowly
        setattr(ShardingPropagator, name, _by_tensors(propagate))


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
