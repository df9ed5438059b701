from __future__ import annotations

import errno

import pytest

from lightning_d9d.errors import ConfigError, RankError, ScheduleError, StateError
from lightning_d9d.mesh.agreement import Ranks
from tests.harness.ranks import RankContext


def fail(ranks: Ranks, error: Exception | None) -> None:
    with ranks.agreed("it cannot be done"):
        if error is not None:
            raise error


def test_a_process_alone_succeeds_or_says_why() -> None:
    ranks = Ranks()
    fail(ranks, None)
    assert ranks.together("it cannot be done", lambda: 3) == ranks.all_gather(3) == [3]
    with pytest.raises(ConfigError, match=r"^it cannot be done: no; say yes$") as caught:
        fail(ranks, ScheduleError("no; say yes"))
    assert isinstance(caught.value.__cause__, ScheduleError)
    with pytest.raises(StateError, match=r"^it cannot be done: KeyError: 'lost'$"):
        fail(ranks, KeyError("lost"))
    with pytest.raises(KeyboardInterrupt), ranks.agreed("it cannot be done"):
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("number", "remedy"),
    [(errno.ENOSPC, "free space"), (errno.EROFS, "give this user permission to write"), (errno.EIO, "make it r")],
)
def test_what_the_file_system_refuses_has_a_remedy(number: int, remedy: str) -> None:
    hidden = ValueError("of a library")
    hidden.__cause__ = OSError(number, "refused", "/a/b")
    with pytest.raises(StateError, match=f"it cannot be done: .*refused: '/a/b'; {remedy}"):
        fail(Ranks(), hidden)


CASES: dict[str, tuple[dict[int, Exception], type[Exception], str]] = {
    "one": ({2: KeyError("lost")}, StateError, "rank 2: KeyError: 'lost'"),
    "its own type": ({1: RankError("a"), 3: ConfigError("b")}, RankError, "rank 1: a; rank 3: b"),
    "the same": ({1: StateError("a"), 3: StateError("a")}, StateError, "ranks 1, 3: a"),
    "all": (dict.fromkeys(range(4), ConfigError("a")), ConfigError, "ranks 0, 1, 2 and 1 more: a"),
    "many": ({n: StateError(str(n)) for n in range(4)}, StateError, "rank 0: 0; rank 1: 1; rank 2: 2; and 1 more"),
}


@pytest.mark.ranks(4)
def test_all_ranks_raise_the_same(rank: RankContext) -> None:
    ranks = Ranks()
    fail(ranks, None)
    assert ranks.together("it cannot be done", lambda: rank.rank) == [0, 1, 2, 3]
    assert Ranks(alone=True).all_gather(rank.rank) == [rank.rank]
    for errors, kind, text in CASES.values():
        own = errors.get(rank.rank)
        with pytest.raises(kind) as caught:
            fail(ranks, own)
        assert str(caught.value) == f"it cannot be done: {text}"
        assert caught.value.__cause__ is own
