"""Waits for other ranks, as those hear of them who measure."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest
import torch

from lightning_d9d.metrics import StepClock, WaitClock
from lightning_d9d.metrics.wait_clock import moment
from lightning_d9d.waits import observed_by, waiting


class BusyHost:
    """Takes the processor away after one in four readings, for longer than a step computes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.queued = 0.0
        self._chance = random.Random(0)
        monkeypatch.setattr("lightning_d9d.metrics.wait_clock.perf_counter", lambda: self._read("now"))
        monkeypatch.setattr("lightning_d9d.metrics.wait_clock._seconds_in_queue", lambda: self._read("queued"))

    def _read(self, name: str) -> float:
        value: float = getattr(self, name)
        self.now += 1e-6
        if self._chance.random() < 0.25:
            self.wait_in_queue(0.05)
        return value

    def wait_in_queue(self, seconds: float) -> None:
        self.now += seconds
        self.queued += seconds


def test_what_a_rank_computes_is_known_on_a_busy_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it loses the processor between readings of the clock and of the queue, in waits and outside of them."""
    host, clock, own = BusyHost(monkeypatch), WaitClock(torch.device("cpu")), []
    with observed_by(clock):
        before = (0.0, 0.0, 0.0, 0.0)
        for _ in range(200):
            host.now += 0.02
            host.wait_in_queue(0.1)
            with waiting():
                host.now += 0.03
                host.wait_in_queue(0.2)
            after = (*moment(), clock.seconds, clock.queued)
            whole, queue, link, queued_in_link = (b - a for a, b in zip(before, after, strict=True))
            own.append(whole - link - (queue - queued_in_link))
            before = after
    within = sorted(abs(each - 0.02) for each in own)
    assert within[180] < 1e-4
    assert sum(own) == pytest.approx(200 * 0.02, rel=0.05)


class Moments:
    """A clock of the host that a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        for module in ("wait_clock", "step_clock"):
            monkeypatch.setattr(f"lightning_d9d.metrics.{module}.perf_counter", lambda: self.now)


def test_all_observers_hear_of_a_wait_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """They also do if one wait is inside of another. Nobody hears of waits outside of `observed_by`."""
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
    """The waits are known when the device has passed them. A stream that waits for nothing waits hardly at all."""
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
