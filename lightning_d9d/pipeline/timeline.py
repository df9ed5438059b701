"""Observers of an executor's compute actions: when they ran, and how much memory they kept."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_d9d.mesh.collectives import all_gather_object
from lightning_d9d.schedule import Action, Forward, Span

_Moment = float | torch.cuda.Event


class Observer(Protocol):
    """An observer of an executor's compute actions, one after the other; with it pairs do not take turns."""

    def span(self, action: Action) -> AbstractContextManager[None]:
        """Wrap the computation of an action, on a rank that has all its inputs. Local."""
        ...


class Timeline:
    """A timeline of when compute actions began and ended, by the device's own clock.

    On CUDA an action begins when the stream has finished earlier work and has the action's inputs. It costs two events
    for each action, without waiting; only `spans` waits.

    Args:
        device: Device that computes.
        group: The ranks of a pipeline, whose clocks start together: each starts its clock when its device has finished
            a common barrier. On one host clocks differ by about ten microseconds; between hosts by the time of the
            barrier's last message. Measuring is collective over them; None for one rank.
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
        """Wrap the computation of an action. Local."""
        start = self._now()
        yield
        self._spans.append((action, start, self._now()))

    def spans(self) -> list[Span]:
        """Return the spans of all ranks in seconds since the start. Collective over the group."""
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


class ActivationBytes:
    """A meter of the memory that a microbatch keeps in a stage from its forward to its backward. Local.

    On CUDA it is the increase of allocated memory during a forward. Elsewhere it is the memory of tensors that autograd
    saves, without parameters; it does not see what recomputed functions keep.

    Args:
        modules: The stages' modules.
        device: Device that computes.
    """

    def __init__(self, modules: Iterable[nn.Module], device: torch.device) -> None:
        self.device = device
        self._parameters = {_storage(parameter) for module in modules for parameter in module.parameters()}
        self._of_stage: dict[int, list[int]] = defaultdict(list)

    @contextmanager
    def span(self, action: Action) -> Generator[None]:
        """Wrap the computation of an action. Local."""
        if not isinstance(action, Forward):
            yield
        elif self.device.type == "cuda":
            before = torch.cuda.memory_allocated(self.device)
            yield
            self._of_stage[action.stage].append(torch.cuda.memory_allocated(self.device) - before)
        else:
            saved: dict[int, int] = {}

            def pack(tensor: Tensor) -> Tensor:
                if _storage(tensor) not in self._parameters:
                    saved[_storage(tensor)] = tensor.untyped_storage().nbytes()
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                yield
            self._of_stage[action.stage].append(sum(saved.values()))

    def means(self) -> dict[int, float]:
        """Return the mean over microbatches for each stage that ran."""
        return {stage: max(0.0, statistics.fmean(of_stage)) for stage, of_stage in self._of_stage.items()}


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
