"""Copies of batches from pinned memory to the GPU, on a separate stream."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from lightning.pytorch.core.hooks import DataHooks
from torch import Tensor

from lightning_d9d.pipeline.trees import children, with_children

_MOST_AHEAD = 3
"""Maximum number of batches whose copies are kept: Lightning is one batch ahead, and ranks that agree have read
another."""


class _Copy(NamedTuple):
    original: Tensor
    version: int | None
    """The count of changes of the original when it was copied."""
    copy: Tensor
    arrived: torch.cuda.Event


class BatchCopies:
    """Copies batches while the GPU computes on earlier ones; the host does not wait. Local.

    A batch that has been read ahead is copied ahead (`begin_ahead`), before the step of the previous batch is launched.
    So its copy runs during that step, even if the step waits for the GPU. Copies run on a stream that waits for no
    computation. The compute stream waits for the copy, through an event. Memory of the copy belongs to the stream of
    copies, and is reused only when the compute stream is done with it.

    Args:
        device: Device of the copies, a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._ahead: deque[dict[int, _Copy]] = deque(maxlen=_MOST_AHEAD)

    @classmethod
    @functools.cache
    def to(cls, device: torch.device) -> BatchCopies:
        """Return the copies of this process to a device, with one stream."""
        return cls(device)

    def begin_ahead(self, batch: Any) -> None:
        """Copy the pinned tensors of a batch whose turn comes later; `begin` uses these copies.

        At most three batches of copies are kept, the latest ones.
        """
        copies = self._copied(_pinned(batch))
        if copies:
            self._ahead.append(copies)

    def begin(self, batch: Any) -> Any:
        """Return a batch whose pinned tensors are copied to the device; all other values stay the same.

        Containers are new; only plain dicts, lists and tuples are searched. From now on, the current stream reads the
        copy. A tensor that was copied ahead, and that torch has not changed since, is not copied again.
        """
        pinned = _pinned(batch)
        found = {id(tensor): copy for tensor in pinned if (copy := self._taken(tensor)) is not None}
        found |= self._copied([tensor for tensor in pinned if id(tensor) not in found])
        computing = torch.cuda.current_stream(self._device)
        for arrived in {id(each.arrived): each.arrived for each in found.values()}.values():
            computing.wait_event(arrived)
        for each in found.values():
            each.copy.record_stream(computing)
        return _replaced(batch, {key: each.copy for key, each in found.items()})

    def forget(self) -> None:
        """Drop copies that have not been used. Local."""
        self._ahead.clear()

    def _copied(self, tensors: list[Tensor]) -> dict[int, _Copy]:
        if not tensors:
            return {}
        with torch.cuda.stream(self._stream):
            copies = [tensor.to(self._device, non_blocking=True) for tensor in tensors]
            arrived = cast("torch.cuda.Event", self._stream.record_event())
        return {id(own): _Copy(own, _version(own), copy, arrived) for own, copy in zip(tensors, copies, strict=True)}

    def _taken(self, tensor: Tensor) -> _Copy | None:
        for copies in self._ahead:
            if (found := copies.pop(id(tensor), None)) is not None:  # which holds the original: the id is its own
                return found if found.version == _version(tensor) else None
        return None


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _pinned(tree: Any) -> list[Tensor]:
    """Return the tensors in pinned memory, each once."""
    found: dict[int, Tensor] = {}
    _walked(tree, lambda tensor: found.setdefault(id(tensor), tensor) if _is_pinned(tensor) else tensor)
    return list(found.values())


def _is_pinned(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_pinned()


def _replaced(tree: Any, copies: dict[int, Tensor]) -> Any:
    return _walked(tree, lambda tensor: copies.get(id(tensor), tensor))


def _walked(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if type(tree) is Tensor:
        return change(tree)
    parts = children(tree) if type(tree) in (dict, list, tuple) or hasattr(tree, "_fields") else None
    if parts is None:
        return tree
    names, values = parts
    walked = [_walked(value, change) for value in values]
    return with_children(tree, walked if names is None else dict(zip(names, walked, strict=True)))


def moves_itself(*owners: object) -> bool:
    """Return whether a module or data module has its own `transfer_batch_to_device`."""
    return any(_has_own(owner, "transfer_batch_to_device") for owner in owners)


def changes_first(*owners: object) -> bool:
    """Return whether a module or data module has its own `on_before_batch_transfer`."""
    return any(_has_own(owner, "on_before_batch_transfer") for owner in owners)


def _has_own(owner: object, hook: str) -> bool:
    return owner is not None and getattr(type(owner), hook, None) not in (None, getattr(DataHooks, hook))
