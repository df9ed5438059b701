from __future__ import annotations

import pytest

from lightning_d9d.errors import StateError
from lightning_d9d.state import agreed, from_all_ranks, is_first_rank
from tests.harness.ranks import RankContext


def lose(is_lost: bool) -> None:
    with agreed():
        if is_lost:
            raise KeyError("lost")


@pytest.mark.ranks(2)
def test_a_failure_on_one_rank_is_one_on_all(rank: RankContext) -> None:
    with agreed():
        pass
    error, message = (KeyError, "lost") if rank.rank == 1 else (StateError, "rank 1 failed with KeyError: 'lost'")
    with pytest.raises(error, match=message):
        lose(rank.rank == 1)
    assert from_all_ranks(rank.rank) == [0, 1]
    assert is_first_rank() == (rank.rank == 0)


def test_without_a_process_group_an_error_is_just_raised() -> None:
    with pytest.raises(KeyError, match="lost"):
        lose(True)
    assert from_all_ranks(3) == [3]
    assert is_first_rank()
