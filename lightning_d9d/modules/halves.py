"""Overlaps a layer's messages with its products: tokens are sent in two halves, and messages have a separate stream.

[Note: two halves] All ranks run one program, whatever their tokens. Both halves are dispatched. Then come the products
of the first half, its combine, the products of the second half, and its combine. Messages are on one side stream, in
this order, and each waits for the work that the main stream had received before it. So the second dispatch runs beside
the products of the first half, and the first combine beside those of the second. Autograd runs each backward on the
stream of its forward, in the reverse order, and waits where streams change. Tensors that one stream writes and the
other reads are recorded for both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Halves(NamedTuple):
    """Second half of the tokens of a layer, with callbacks around its products; see `GroupedExperts.forward`."""

    x: Tensor
    """The rows of these tokens."""

    weights: Tensor
    """Their factors."""

    offsets: Tensor
    """One past the last row of each expert."""

    begin: Callable[[int], None]
    """Called before the products of half 0 and 1."""

    end: Callable[[int, Tensor], Tensor]
    """Called with their results; returns the tensors that replace them."""


class SideStream:
    """A stream of messages beside the current one. On the CPU calls run immediately.

    Args:
        device: Device of the tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = _stream(device) if device.type == "cuda" else None
        self._ends: dict[int, torch.cuda.Event] = {}

    def run(self, function: Callable[[], T], inputs: Iterable[Tensor], key: int) -> T:
        """Call a function on the side stream, after the current stream's work so far; `wait(key)` waits for it."""
        if self._stream is None:
            return function()
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            result = function()
        for tensor in inputs:
            tensor.record_stream(self._stream)
        end = torch.cuda.Event()
        end.record(self._stream)
        self._ends[key] = end
        return result

    def wait(self, key: int, results: Iterable[Tensor]) -> None:
        """Make the current stream wait for a call, whose results it will read."""
        if self._stream is None:
            return
        current = torch.cuda.current_stream(self._stream.device)
        current.wait_event(self._ends.pop(key))
        for tensor in results:
            tensor.record_stream(current)


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return one stream for all layers, so that their messages have one order."""
    return torch.cuda.Stream(device)
