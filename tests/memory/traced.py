"""Bytes that are alive while a model runs on the meta device, with the kernels that a GPU has."""

from __future__ import annotations

import importlib
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_d9d.ops.backend import using_kernels


class Alive(TorchDispatchMode):
    """The memory of tensors made inside, but for that of known ones: now, and at most."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for part in tree_leaves(result):
            if isinstance(part, Tensor) and part.untyped_storage()._cdata not in self._known:
                storage = part.untyped_storage()
                self._seen[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.most = max(self.most, self.now)
        return result

    @property
    def now(self) -> int:
        for address in [address for address, (reference, _) in self._seen.items() if reference.expired()]:
            del self._seen[address]
        return sum(size for _, size in self._seen.values())


@contextmanager
def as_on_gpu() -> Generator[None]:
    """Take the operators that a GPU runs, for tensors without values."""
    linear = importlib.import_module("lightning_d9d.ops.linear")
    loss = importlib.import_module("lightning_d9d.ops.linear_cross_entropy")

    def widens(x: Tensor, weight: Tensor, dtype: torch.dtype | None) -> bool:
        return dtype == torch.float32 and x.dtype == weight.dtype == torch.bfloat16

    with (
        using_kernels("triton"),
        mock.patch.object(linear, "_widens", widens),
        mock.patch.object(loss, "_scaled", lambda gradient, factor, options: gradient),  # by 1, in place
    ):
        yield


def traced(model: nn.Module, rows: int, tokens: int) -> tuple[int, int]:
    """Forward and backward of a whole model on the meta device: bytes that it keeps, and the most."""
    ids = torch.zeros(rows, tokens, dtype=torch.int64, device="meta")
    with as_on_gpu(), torch.device("meta"), Alive([*model.parameters(), *model.buffers(), ids]) as alive:
        loss = model(ids, labels=ids, reduction="sum").loss
        kept = alive.now
        loss.backward()
    return kept, alive.most
