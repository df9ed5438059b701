"""Arguments of a module as a checkpoint has them: made as they are annotated, and never imported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal

import pytest
from torch import nn

from lightning_d9d import StateError
from lightning_d9d.strategy.saved_arguments import argument, build

if TYPE_CHECKING:
    from somewhere import Unknown


class Kind(Enum):
    ONE = 1


@dataclass
class Inner:
    kind: Kind
    sizes: tuple[int, ...] = ()


@dataclass
class Outer:
    inner: Inner | None = None


NAMED = {"class_path": "foreign.E"}
INNER = {"kind": "ONE", "sizes": [1, 2]}
FITTING: list[tuple[Any, Any, Any]] = [
    (Outer, {"inner": INNER}, Outer(Inner(Kind.ONE, (1, 2)))),
    (Outer | None, None, None),
    (Outer, None, None),
    (Outer | dict[str, Any], {"inner": None}, Outer()),
    (dict[str, Any] | Outer, {"inner": None}, {"inner": None}),
    (dict[str, Any], NAMED, NAMED),
    (Any, NAMED, NAMED),
    (str | Kind, "ONE", "ONE"),
    (Literal["a"], "a", "a"),
    (list[int], [1], [1]),
    (float, 1, 1),
]


@pytest.mark.parametrize(("annotation", "value", "expected"), FITTING)
def test_what_fits(annotation: Any, value: Any, expected: Any) -> None:
    assert argument("a", annotation, value) == expected


@pytest.mark.parametrize(
    ("annotation", "value", "reason"),
    [
        (nn.Module, NAMED, "nothing is imported"),
        (Outer, NAMED, "class_path"),
        (Outer, {"inner": NAMED}, "class_path"),
        (Outer, "foreign.E", "Outer'> is expected"),
        (Callable[[int], int], "foreign.e", "nothing is imported"),
        (type[nn.Module] | None, "foreign.E", "nothing is imported"),
        (Inner, {}, "missing 1 required"),
        (Kind, "TWO", "'TWO'"),
    ],
)
def test_what_does_not_fit(annotation: Any, value: Any, reason: str) -> None:
    with pytest.raises(
        StateError, match=rf"^the checkpoint has a=.* cannot be used \(.*{reason}.*\); pass a to load_f"
    ):
        argument("a", annotation, value)


def test_annotations_of_bases_count() -> None:
    class Base:
        def __init__(self, outer: Outer | None = None, sizes: tuple[int, ...] = ()) -> None:
            self.given = (outer, sizes)

    class Derived(Base):
        def __init__(self, unknown: Unknown | None = None, **more: Any) -> None:
            super().__init__(**more)

    arguments = {"_class_path": "foreign.E", "unknown": {}, "outer": {"inner": INNER}, "sizes": [3]}
    assert build(Derived, arguments).given == (Outer(Inner(Kind.ONE, (1, 2))), (3,))
