"""Who hears of memory that runs out; `tests/callbacks/test_step_profile.py` has the snapshots of a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lightning_d9d.memory import snapshots


def test_actions_hear_of_it_while_they_are_open(monkeypatch: pytest.MonkeyPatch) -> None:
    attached: list[Callable[[int, int, int, int], None]] = []
    heard: list[str] = []
    monkeypatch.setattr(snapshots, "_attached", False)
    monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", attached.append, raising=False)
    with snapshots.at_out_of_memory(lambda: heard.append("first")):
        with snapshots.at_out_of_memory(lambda: heard.append("second")):
            attached[0](0, 100, 80, 10)
        attached[0](0, 100, 80, 10)
    attached[0](0, 100, 80, 10)
    assert heard == ["first", "second", "first"]
    assert len(attached) == 1
