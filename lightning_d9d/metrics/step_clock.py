"""Splits the time of one optimizer step into parts, without making the host wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import torch

from lightning_d9d.metrics.wait_clock import WaitClock, new_event

_Moment = float | torch.cuda.Event


@dataclass(frozen=True)
class StepParts:
    """Seconds of one optimizer step on one rank; the parts add up to the whole step."""

    data: float = 0.0
    """Time in which the device (on a CPU, the host) was idle because no batch was there."""
    host: float = 0.0
    """Time between batches in which it was idle for another reason: hooks, logging, the copy of a batch."""
    compute: float = 0.0
    """Time in which it computed, or waited inside of a step for the host to launch work."""
    communication: float = 0.0
    """Time in which it waited for other ranks."""


class StepClock(WaitClock):
    """Records when batches of one optimizer step begin and end, and when computation waits for other ranks.

    On CUDA the times are those of the device's stream: two events for each batch, and two for each wait. Elsewhere they
    are times of the host. Batches follow each other; one step is measured, and then `parts` has the result.

    Args:
        device: The device that computes.
        waited: Seconds for which the host had waited for batches by the end of the step before.
    """

    def __init__(self, device: torch.device, waited: float) -> None:
        super().__init__(device)
        self._waited = -waited
        self._batches = [self._now()]
        """The end of the step before, then beginning and end of each batch."""

    def begin_batch(self) -> None:
        """Begin the step of a batch. Local."""
        self._batches.append(self._now())

    def end_batch(self) -> None:
        """End the step of a batch. Local."""
        self._batches.append(self._now())

    def finish(self, waited: float) -> None:
        """End the optimizer step, with the last batch.

        Args:
            waited: Seconds for which the host has waited for batches until now.
        """
        self._waited += waited

    def parts(self) -> StepParts | None:
        """Return the result, or None while the device has not finished the step. Local; it does not wait."""
        last = self._batches[-1]
        if isinstance(last, torch.cuda.Event) and not last.query():
            return None
        idle, busy = _sum_of_pairs(self._batches), _sum_of_pairs(self._batches[1:])
        data = min(idle, max(0.0, self._waited))
        communication = min(busy, self.seconds)
        return StepParts(data, idle - data, busy - communication, communication)

    def _now(self) -> _Moment:
        return new_event() if self._on_cuda else perf_counter()


def _sum_of_pairs(moments: Sequence[_Moment]) -> float:
    """Return the sum of the seconds from the first moment to the second, from the third to the fourth, and so on."""
    return sum(_seconds(*pair) for pair in zip(moments[::2], moments[1::2], strict=False))


def _seconds(start: _Moment, end: _Moment) -> float:
    if isinstance(start, torch.cuda.Event):
        return start.elapsed_time(end) / 1e3  # type: ignore[arg-type]  # which is one, too
    return end - start  # type: ignore[operator]
