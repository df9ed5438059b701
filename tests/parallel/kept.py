"""What a forward keeps for its backward, as torch has it."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


def loss_of(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    return output.loss if output.router_loss is None else output.loss + output.router_loss


class Living(TorchDispatchMode):
    """The memory of tensors made inside, but for that of `known` ones."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.known = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for part in result if isinstance(result, tuple | list) else [result]:
            if isinstance(part, Tensor) and part.untyped_storage()._cdata not in self.known:
                storage = part.untyped_storage()
                self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    @property
    def num_bytes(self) -> int:
        return sum(size for reference, size in self.storages.values() if not reference.expired())


def bytes_kept(model: nn.Module, inputs: dict[str, Any]) -> int:
    """What a forward leaves for its backward, beside its loss, inputs and parameters."""
    tensors = [each for each in inputs.values() if isinstance(each, Tensor)]
    parameters = list(model.parameters())
    with Living([*parameters, *model.buffers(), *tensors]) as living:
        loss = loss_of(model(**inputs))
    gc.disable()
    try:
        kept = living.num_bytes - loss.nbytes
        torch.autograd.grad(loss, parameters)
        del loss
        assert living.num_bytes == 0  # nothing waits for the garbage collector
        return kept
    finally:
        gc.enable()
