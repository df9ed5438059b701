"""What `context` measures; that its contenders do the same work is in `test_training`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.benchmarks.context import PEER, WORK, case, table, ways
from tests.benchmarks.frame import measure, summarize
from tests.benchmarks.training import QUICK
from tests.harness.ranks import RankContext


@pytest.mark.ranks(2)
def test_what_is_measured(rank: RankContext) -> None:
    compared = case(QUICK, judges=True, warmup_steps=1, block_steps=1, repeats=2)
    measured = measure(compared, rank.device)
    if rank.rank == 0:
        result = {"benchmark": "context", **summarize(compared, measured)}
        more = measured["gather"]["flops"] / measured[PEER]["flops"]
        assert more > 1
        assert measured["ring"]["ratio"]["limit"] == pytest.approx(more / 0.75)
        assert table(result, "cpu").count("\n|") == 2 + len(ways(QUICK))
        assert "FLOP/s / cp1" in table(result, "cpu")


def test_operations_of_eight_ranks() -> None:
    """Attention of 131,072 tokens takes eight times as many for each of them as of 16,384, of both causal halves."""
    work = replace(WORK, num_ranks=8)
    of_ranks = ways(work)
    assert [*of_ranks] == [PEER, "gather", "ring"]  # four heads of keys and values
    more = work.flops(of_ranks["ring"]) - work.flops(of_ranks[PEER])
    # Per layer four products of a query with all keys before it, two thirds of that in the backward once more.
    assert more == 2 * 16_384 * 4 * 4096 * 3 * (131_072 - 16_384) // 2
