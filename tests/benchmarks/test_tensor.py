"""What `tensor` measures; that its contenders do the same work is in `test_training`, but for the vocabulary."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_d9d.mesh.sharding import local, local_ranges
from tests.benchmarks.frame import measure, summarize
from tests.benchmarks.tensor import QUICK_HEAD, WHOLE, Heads, case, table, vocabulary
from tests.benchmarks.training import QUICK
from tests.harness.compare import assert_close_named
from tests.harness.ranks import RankContext

ROUNDS = {"warmup_steps": 1, "block_steps": 1, "repeats": 2}


@pytest.mark.ranks(2)
def test_what_is_measured(rank: RankContext) -> None:
    for compared in (case(QUICK, judges=True, **ROUNDS), vocabulary(QUICK_HEAD, judges=True, **ROUNDS)):
        measured = measure(compared, rank.device)
        if rank.rank == 0:
            result = {"benchmark": "tensor", **summarize(compared, measured)}
            (limit,) = (values["ratio"]["limit"] for values in measured.values() if "ratio" in values)
            assert limit == pytest.approx(1 if WHOLE in measured else 1 / 0.85)
            assert table(result, "cpu").count("\n|") == 2 + 2


@pytest.mark.ranks(2)
def test_a_cut_vocabulary_has_the_losses_and_gradients_of_a_whole_one(rank: RankContext) -> None:
    whole, cut = (Heads(replace(QUICK_HEAD, num_ranks=2), tp, rank.device) for tp in (1, 2))
    for each in (whole, cut):
        each.run(1)
    losses = rank.all_gather_object((whole.loss(), cut.loss()))
    assert [theirs for _, theirs in losses] == pytest.approx([sum(ours for ours, _ in losses) / 2] * 2)
    weight, part = (each.module.get_parameter("weight") for each in (whole, cut))
    assert weight.grad is not None
    assert part.grad is not None
    # Each divides by the number of its losses, of which the whole one has half.
    of_ranks = rank.all_gather_object(weight.grad)
    rows = local_ranges(part)[0]
    assert_close_named("gradient", local(part.grad), ((of_ranks[0] + of_ranks[1]) / 2)[rows.start : rows.stop])
    assert QUICK_HEAD.account(1).weights == weight.nbytes == 2 * QUICK_HEAD.account(2).weights
