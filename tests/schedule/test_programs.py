from __future__ import annotations

import pytest

from lightning_d9d.schedule import GPipe, OneForwardOneBackward, resolve_schedule


def text(program: tuple[object, ...]) -> str:
    return " ".join(map(str, program))


def test_programs_of_one_stage() -> None:
    assert text(GPipe().program(3)) == "0F0 0F1 0F2 0B2 0B1 0B0"
    assert text(OneForwardOneBackward().program(3)) == "0F0 0B0 0F1 0B1 0F2 0B2"


@pytest.mark.parametrize(
    ("name", "kind"), [(None, OneForwardOneBackward), ("1f1b", OneForwardOneBackward), ("gpipe", GPipe)]
)
def test_names(name: str | None, kind: type) -> None:
    assert isinstance(resolve_schedule(name), kind)
