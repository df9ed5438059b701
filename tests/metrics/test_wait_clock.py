"""Waits for other ranks, as those hear of them who measure."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch

from lightning_d9d.metrics import StepClock, WaitClock
from lightning_d9d.waits import observed_by, waiting


class Moments:
    """A clock of the host that a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        for module in ("wait_clock", "step_clock"):
            monkeypatch.setattr(f"lightning_d9d.metrics.{module}.perf_counter", lambda: self.now)


def test_all_observers_hear_of_a_wait_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where one wait is inside of another; nobody hears of those outside of `observed_by`."""
    moments, first = Moments(monkeypatch), WaitClock(torch.device("cpu"))
    with observed_by(first):
        with waiting():
            moments.now += 1
            with waiting():
                moments.now += 2
        second = WaitClock(torch.device("cpu"))
        with observed_by(second), waiting():
            moments.now += 4
        moments.now += 8
    with waiting():
        moments.now += 16
    assert (first.seconds, second.seconds) == (7.0, 4.0)
    assert first.queued >= 0


def test_a_wait_that_fails_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    moments, clock = Moments(monkeypatch), WaitClock(torch.device("cpu"))
    with observed_by(clock):
        with suppress(RuntimeError), waiting():
            moments.now += 1
            raise RuntimeError
        with waiting():
            moments.now += 2
    assert clock.seconds == 3.0


def test_the_parts_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = Moments(monkeypatch)
    clock = StepClock(torch.device("cpu"), waited=10.0)
    with observed_by(clock):
        moments.now = 3.0  # two seconds for data, one for hooks
        clock.begin_batch()
        moments.now += 4.0
        with waiting():
            moments.now += 5.0
        clock.end_batch()
    clock.finish(waited=12.0)
    parts = clock.parts()
    assert parts is not None
    assert (parts.data, parts.host, parts.compute, parts.communication) == (2.0, 1.0, 4.0, 5.0)


@pytest.mark.gpu
def test_waits_of_a_stream() -> None:
    """They are known when the device is through with them; a stream that waits for nothing waits hardly at all."""
    clock = WaitClock(torch.device("cuda"))
    with observed_by(clock), waiting():
        torch.cuda._sleep(10_000_000)
    torch.cuda.synchronize()
    slept = clock.seconds
    assert slept > 1e-3
    with observed_by(clock), waiting():
        pass
    torch.cuda.synchronize()
    assert slept < clock.seconds < 1.1 * slept
