"""Copies of batches from pinned memory to the GPU, on a stream of their own."""

from __future__ import annotations

import functools
from typing import Any

import torch
from lightning.pytorch.core.hooks import DataHooks
from torch import Tensor

from lightning_d9d.pipeline.trees import children, with_children


class BatchCopies:
    """Copies batches while the GPU computes on those before them; the host waits for nothing. Local.

    The host is ahead of the GPU: it takes a batch from the loader while the GPU still works on the one before. Copies
    go to a stream that waits for none of that work. The stream that computes waits for the copy, by an event. Memory of
    the copy belongs to the stream of copies, and is used again only when the stream that computes is done with it.

    Args:
        device: Of the copies, a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    @classmethod
    @functools.cache
    def to(cls, device: torch.device) -> BatchCopies:
        """Return those of this process to a device, with one stream."""
        return cls(device)

    def begin(self, batch: Any) -> Any:
        """Return a batch whose tensors in pinned memory are copied to the device; all else in it stays as it is.

        Containers are new; only plain dicts, lists and tuples are looked into. What is read on the current stream from
        now on is the copy.
        """
        computing = torch.cuda.current_stream(self._device)
        copies: list[Tensor] = []
        with torch.cuda.stream(self._stream):
            moved = self._moved(batch, copies)
            arrived = self._stream.record_event() if copies else None
        if arrived is not None:
            computing.wait_event(arrived)
            for copy in copies:
                copy.record_stream(computing)
        return moved

    def _moved(self, tree: Any, copies: list[Tensor]) -> Any:
        if type(tree) is Tensor:
            if tree.device.type != "cpu" or not tree.is_pinned():
                return tree
            copies.append(tree.to(self._device, non_blocking=True))
            return copies[-1]
        parts = children(tree) if type(tree) in (dict, list, tuple) or hasattr(tree, "_fields") else None
        if parts is None:
            return tree
        names, values = parts
        moved = [self._moved(value, copies) for value in values]
        return with_children(tree, moved if names is None else dict(zip(names, moved, strict=True)))


def moves_itself(*owners: object) -> bool:
    """Return whether a module or data module has a `transfer_batch_to_device` of its own."""
    return any(
        owner is not None and getattr(type(owner), _HOOK, None) not in (None, getattr(DataHooks, _HOOK))
        for owner in owners
    )


_HOOK = "transfer_batch_to_device"
