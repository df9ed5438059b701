"""Messages to experts on other ranks, which can run beside the computation of another microbatch.

[Note: beside] While two microbatches take turns (`pipeline/turns.py`), all computation is on one CUDA stream, and these
messages have a separate one. A microbatch gives way before its message. When its turn comes again, it launches the
message, which waits only for what the microbatch had launched before. So the message runs beside the computation that
the other has launched meanwhile. Then the computation stream waits for the message.

While both run, their messages alternate on one stream. Their order follows from the program, so it is the same on all
ranks. A message that was launched before giving way would be in front of one that first waits for the host.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lightning_d9d.waits import waiting


class TakesTurns(Protocol):
    """Two microbatches of one rank, of which one runs at a time."""

    stream: torch.cuda.Stream | None
    """Stream of messages; None without CUDA."""

    def give_way(self) -> None:
        """Let the other microbatch run until it gives way, too, or ends. Local."""
        ...


@dataclass
class Sent:
    """A message that may still be on its way."""

    event: torch.cuda.Event | None = None
    """The end of the message on its stream; None if it was sent on the current one, or by the host."""

    def wait(self, *made: Tensor) -> None:
        """Make the current stream wait for the message. Local.

        Args:
            made: Tensors that were made while it was sent, for use on the current stream.
        """
        if self.event is not None:
            stream = torch.cuda.current_stream()
            with waiting():
                stream.wait_event(self.event)
            for tensor in made:
                tensor.record_stream(stream)


class _State:
    """Variables that all threads of a process share: autograd calls operators from several."""

    turns: TakesTurns | None = None
    is_sending = False
    has_given_way = False
    after: torch.cuda.Event | None = None


_state = _State()


@contextmanager
def taking_turns(turns: TakesTurns) -> Generator[None]:
    """Let messages run beside the computation of two microbatches, in all threads. Local."""
    _state.turns = turns
    try:
        yield
    finally:
        _state.turns = None


def takes_turns() -> bool:
    """Return whether two microbatches take turns now. Local."""
    return _state.turns is not None


@contextmanager
def sending() -> Generator[Sent]:
    """Wrap what launches a message, and let another microbatch run before. Local.

    Inside of another message it changes nothing. Inside of `sending_after` it does not give way.

    Results may be used after `Sent.wait`, or after the host has waited for an event that was recorded inside. With
    `taking_turns` tensors that are made inside belong to the stream of messages: give them to `Sent.wait`.
    """
    turns = _state.turns
    if _state.is_sending:
        yield Sent()
        return
    if turns is None:
        with waiting():
            yield Sent()
        return
    sent, after = Sent(), _state.after or launched()
    if not _state.has_given_way:
        turns.give_way()
    _state.is_sending = True
    try:
        if turns.stream is None or after is None:
            with waiting():
                yield sent
            return
        with torch.cuda.stream(turns.stream):
            turns.stream.wait_event(after)
            yield sent
            sent.event = _reached(turns.stream)
    finally:
        _state.is_sending = False


def launched() -> torch.cuda.Event | None:
    """Return the point that computation has reached on the device; None if no microbatches take turns there. Local."""
    turns = _state.turns
    return None if turns is None or turns.stream is None else _reached(torch.cuda.current_stream())


def _reached(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(stream)
    return event


def give_way() -> None:
    """Let another microbatch run, if one takes turns with this one. Local."""
    if _state.turns is not None:
        _state.turns.give_way()


@contextmanager
def sending_after(point: torch.cuda.Event | None) -> Generator[None]:
    """Send messages without giving way, as soon as the computation has reached a point. Local.

    This microbatch gave way after the point, so that other computation already runs beside these messages. All that
    they send must have been launched before the point.

    Args:
        point: Result of `launched`. None: as soon as what was launched before each message is done.
    """
    _state.has_given_way, _state.after = True, point
    try:
        yield
    finally:
        _state.has_given_way, _state.after = False, None
