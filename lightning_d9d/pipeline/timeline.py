"""When the compute actions of a rank really ran."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager

import torch

from lightning_d9d.schedule import Action

_Moment = float | torch.cuda.Event


class Timeline:
    """Moments at which compute actions began and ended, by the device's own clock. Local.

    On CUDA an action begins when the stream is through with what came before it and has what the action waits for. It
    costs two events an action and no waiting; `seconds` waits.

    Args:
        device: That computes.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._start = self._now()
        self._spans: list[tuple[Action, _Moment, _Moment]] = []

    @contextmanager
    def span(self, action: Action) -> Generator[None]:
        """Around what the action computes."""
        start = self._now()
        yield
        self._spans.append((action, start, self._now()))

    def seconds(self) -> list[tuple[Action, float, float]]:
        """Each action with its start and end in seconds since the timeline was made."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return [(action, self._since_start(start), self._since_start(end)) for action, start, end in self._spans]

    def _now(self) -> _Moment:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _since_start(self, moment: _Moment) -> float:
        if isinstance(moment, torch.cuda.Event):
            assert isinstance(self._start, torch.cuda.Event)
            return self._start.elapsed_time(moment) / 1000
        assert isinstance(self._start, float)
        return moment - self._start
