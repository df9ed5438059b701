from __future__ import annotations

import pytest

from lightning_d9d.schedule import SCHEDULES, OneForwardOneBackward, Schedule, resolve_schedule


@pytest.mark.parametrize(
    ("name", "actions"),
    [
        ("gpipe", "0F0 0F1 0F2 0B2 0B1 0B0"),
        ("1f1b", "0F0 0B0 0F1 0B1 0F2 0B2"),
        ("zero_bubble", "0F0 0B0 0F1 0B1 0F2 0B2"),
    ],
)
def test_programs_of_one_stage(name: str, actions: str) -> None:
    assert str(SCHEDULES[name]().program(num_ranks=1, num_microbatches=3)) == actions


@pytest.mark.parametrize("name", SCHEDULES)
def test_names(name: str) -> None:
    assert type(resolve_schedule(name)) is SCHEDULES[name]
    assert isinstance(resolve_schedule(name), Schedule)


def test_without_a_name() -> None:
    assert isinstance(resolve_schedule(None), OneForwardOneBackward)
