"""When the compute actions of a rank really ran."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from lightning_d9d.mesh.collectives import all_gather_object
from lightning_d9d.schedule import Action, Span

_Moment = float | torch.cuda.Event


class Timeline:
    """Moments at which compute actions began and ended, by the device's own clock.

    On CUDA an action begins when the stream is through with what came before it and has what the action waits for. It
    costs two events an action and no waiting; `spans` waits.

    Args:
        device: That computes.
        group: The ranks of a pipeline, whose clocks start together: they meet in a barrier, and each starts its clock
            when its device is through with it. On one host they differ by some ten microseconds; between hosts by what
            the barrier's last message takes. Collective over them; None for one rank.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        self.device = device
        self.group = group
        if group is not None:
            dist.barrier(group)
        self._synchronize()
        self._start = self._now()
        self._spans: list[tuple[Action, _Moment, _Moment]] = []

    @contextmanager
    def span(self, action: Action) -> Generator[None]:
        """Around what the action computes. Local."""
        start = self._now()
        yield
        self._spans.append((action, start, self._now()))

    def spans(self) -> list[Span]:
        """The actions of all ranks in seconds since the start. Collective over the group."""
        self._synchronize()
        ours = [(action, self._since_start(start), self._since_start(end)) for action, start, end in self._spans]
        of_ranks = [ours] if self.group is None else all_gather_object(ours, self.group)
        return [Span(rank, *timed) for rank, theirs in enumerate(of_ranks) for timed in theirs]

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

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
