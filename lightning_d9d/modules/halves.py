"""Messages of a layer run behind its products: tokens go in two halves, and messages have a stream of their own.

[Note: two halves] All ranks run one program, whatever tokens they have. Both halves are dispatched. Then come the
products of the first, its combine, the products of the second, its combine. Messages are on one side stream, in this
order, and each waits for what the main stream has got before it. So the second dispatch runs beside the products of the
first half, and the first combine beside those of the second. Autograd runs each backward on the stream of its forward,
in the reverse order, and waits where streams change. Tensors that one stream makes and the other reads are recorded for
both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Halves(NamedTuple):
    """Second half of the tokens of a layer, and what happens around its products; see `GroupedExperts.forward`."""

    x: Tensor
    """Its rows."""

    weights: Tensor
    """Their factors."""

    offsets: Tensor
    """The row after the last one of each expert."""

    begin: Callable[[int], None]
    """Called before the products of half 0 and 1."""

    end: Callable[[int, Tensor], Tensor]
    """Called with their results; gives what stands for these."""


class SideStream:
    """A stream of messages beside the current one. On the CPU things are done as they come.

    Args:
        device: Where the tensors are.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = _stream(device) if device.type == "cuda" else None
        self._ends: dict[int, torch.cuda.Event] = {}

    def run(self, function: Callable[[], T], inputs: Iterable[Tensor], key: int) -> T:
        """Call a function on the side stream, behind what the current one has got so far; `wait(key)` waits for it."""
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
        """Let the current stream wait for a call, whose results it is to read."""
        if self._stream is None:
            return
        current = torch.cuda.current_stream(self._stream.device)
        current.wait_event(self._ends.pop(key))
        for tensor in results:
            tensor.record_stream(current)


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return one stream for all layers: their messages have one order."""
    return torch.cuda.Stream(device)
