"""What is measured and said of a start."""

from __future__ import annotations

import logging
import threading

import pytest

from lightning_d9d import startup


def test_inner_parts_are_taken_off_outer_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 3.0, 7.0])
    monkeypatch.setattr(startup, "_seconds", startup.Counter())
    monkeypatch.setattr(startup.time, "perf_counter", lambda: next(clock))
    with startup.start_part("outer"), startup.start_part("inner"):
        pass
    assert startup.seconds_of_parts() == {"outer": 5.0, "inner": 2.0}


def test_a_part_counts_when_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 3.0, 4.0, 4.0, 4.5])
    monkeypatch.setattr(startup, "_seconds", startup.Counter())
    monkeypatch.setattr(startup.time, "perf_counter", lambda: next(clock))
    with pytest.raises(KeyError), startup.start_part("outer"), startup.start_part("inner"):
        raise KeyError
    with startup.start_part("outer"):
        pass
    assert startup.seconds_of_parts() == {"outer": 2.5, "inner": 2.0}


def test_what_takes_long_is_said_while_it_runs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    said = threading.Event()
    monkeypatch.setattr(startup, "LONG_S", 0.01)
    monkeypatch.setattr(startup, "_seconds", startup.Counter())
    say = startup._say
    monkeypatch.setattr(startup, "_say", lambda *args: (say(*args), said.set()))
    with caplog.at_level(logging.WARNING, "lightning_d9d"), startup.start_part("weights from files"):
        assert said.wait(timeout=60)
    assert caplog.messages == ["start: weights from files, 0 s so far"]


def test_a_part_leaves_no_thread() -> None:
    before = threading.enumerate()
    for _ in range(10):
        with startup.start_part("mesh"):
            pass
        assert threading.enumerate() == before


def test_pieces_are_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(startup, "_seconds", startup.Counter())
    for _ in range(9):
        startup.add("kernels", 3.0, "; they are kept in DIR")
    assert caplog.messages == ["start: kernels, 12 s so far; they are kept in DIR"]
