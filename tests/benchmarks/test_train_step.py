"""What `train_step` measures."""

from __future__ import annotations

import pytest
import torch

from lightning_d9d.metrics.profiled import ATTENTION
from tests.benchmarks.frame import measure, summarize
from tests.benchmarks.train_step import COMPILED, EAGER, OURS, QUICK, TRAINER, case, cases, table

ROUNDS = {"warmup_steps": 1, "block_steps": 1, "repeats": 2}


@pytest.mark.parametrize("contenders", [(EAGER, OURS), (OURS, TRAINER)], ids=str)
def test_contenders_do_the_same_work(contenders: tuple[str, str]) -> None:
    """`measure` compares their losses behind the first step."""
    compared = case("step", QUICK, contenders, 0.5, **ROUNDS)
    result = {"benchmark": "train_step", **summarize(compared, measure(compared, torch.device("cpu")))}
    peer, judged = contenders
    assert result["contenders"][judged]["ratio"]["limit"] == 0.5
    text = table(result, "cpu")
    assert f"| {peer} | 1 (peer)" in text
    assert (ATTENTION in text) == (judged == OURS)


def test_the_best_peer_alone() -> None:
    peers = {case.name: case.peer for case in cases("cuda", quick=False, peers="best")}
    of_all = {case.name: case.peer for case in cases("cuda", quick=False)}
    assert of_all.items() - peers.items() == {("step, uncompiled peer", EAGER)}
    assert peers["step"] == peers["norm and clipping"] == peers["32,768 tokens"] == COMPILED
