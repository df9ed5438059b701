"""Keeps inputs of recomputed blocks in host memory until their backward.

[Note: copies beside the computation] A block's input is copied to pinned memory when its forward begins. Copies have a
separate stream, which waits for the stream that computed the input. When a backward reaches a block, its input is
copied back. The copy for the previous block begins then, and continues while this block is recomputed. So two inputs
are on the device at a time, and only the copy for a batch's last block is waited for.

[Note: memory of copies] At the end of a block's forward the computing stream waits for the copy of its input. The copy
began with the forward. In a backward it waits for an input before it reads it. So copies are done before the
computing stream can use freed memory again, and the host may launch as far ahead as it likes. `record_stream` would
also be safe. But the host frees an input long before the device has copied it. Until then torch's allocator does not
use its block again, nor join it with free neighbours, and takes new memory instead.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Collection, Generator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class _Waiting:
    """A tensor that is kept in host memory.

    Args:
        tensor: A tensor on any device.
        before: The tensor that was sent before this one, and is needed after it.
    """

    def __init__(self, tensor: Tensor, before: weakref.ref[_Waiting] | None) -> None:
        self._device = tensor.device
        self._before = before
        self._back: Tensor | None = None
        self._arrived: torch.cuda.Event | None = None
        self._was_taken = False
        self._host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        self._sent = self._copy(tensor, self._host)

    def __del__(self) -> None:
        if self._back is not None and self._back.is_cuda:  # nobody waits for its copy, which still writes
            self._back.record_stream(_stream_of_copies(self._device))

    def release(self) -> None:
        """Make the current stream wait until the tensor is sent. Then its memory on the device may be used again."""
        self._wait_for(self._sent)
        self._sent = None

    def take(self) -> Tensor:
        """Return the tensor on its device, and begin to copy back the one that is needed next."""
        back = self._begin()
        self._wait_for(self._arrived)
        self._back, self._arrived, self._was_taken = None, None, True
        before = None if self._before is None else self._before()
        if before is not None and not before._was_taken:  # as a block's other input may be
            before._begin()
        return back

    def _begin(self) -> Tensor:
        if self._back is None:
            self._back = torch.empty_like(self._host, device=self._device)
            self._arrived = self._copy(self._host, self._back)
        return self._back

    def _copy(self, source: Tensor, target: Tensor) -> torch.cuda.Event | None:
        """Copy on the stream of copies, after all work of the current stream so far; on CUDA the host does not wait."""
        if self._device.type != "cuda":
            target.copy_(source)
            return None
        stream = _stream_of_copies(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
        return event

    def _wait_for(self, copied: torch.cuda.Event | None) -> None:
        if copied is not None:
            torch.cuda.current_stream(self._device).wait_event(copied)


@functools.cache
def _stream_of_copies(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


_latest: weakref.ref[_Waiting] | None = None
"""The tensor that was sent last."""


@contextmanager
def inputs_on_host(inputs: Collection[object]) -> Generator[None]:
    """Keep the inputs of a checkpoint in the block in host memory. See [Note: copies beside the computation].

    Args:
        inputs: Inputs of the checkpoint. Tensors that require a gradient are sent; others, such as tables that all
            blocks share, stay.
    """
    sent = {each.untyped_storage().data_ptr() for each in inputs if type(each) is Tensor and each.requires_grad}
    copies: list[_Waiting] = []

    def pack(tensor: Tensor) -> Tensor | _Waiting:
        global _latest
        if tensor.untyped_storage().data_ptr() not in sent:
            return tensor
        waiting = _Waiting(tensor.detach(), _latest)
        _latest = weakref.ref(waiting)
        copies.append(waiting)
        return waiting

    def unpack(packed: Tensor | _Waiting) -> Tensor:
        return packed.take() if isinstance(packed, _Waiting) else packed

    if not sent:
        yield
        return
    with saved_tensors_hooks(pack, unpack):
        yield
    while copies:  # `inputs` are alive until here
        copies.pop().release()
