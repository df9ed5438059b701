"""What `train_step` measures."""

from __future__ import annotations

import pytest
import torch

from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig
from tests.benchmarks import step_parts
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
    assert (step_parts.ATTENTION in text) == (judged == OURS)


def test_the_best_peer_alone() -> None:
    peers = {case.name: case.peer for case in cases("cuda", quick=False, peers="best")}
    of_all = {case.name: case.peer for case in cases("cuda", quick=False)}
    assert of_all.items() - peers.items() == {("step, uncompiled peer", EAGER)}
    assert peers["step"] == peers["norm and clipping"] == peers["32,768 tokens"] == COMPILED


@pytest.mark.parametrize(
    ("operator", "shapes", "part"),
    [
        ("aten::mm", [[64, 128], [128, 256]], step_parts.HEAD),
        ("aten::mm", [[64, 128], [128, 384]], step_parts.PROJECTIONS),
        ("lightning_d9d::linear_cross_entropy", [], step_parts.HEAD),
        ("aten::_scaled_dot_product_cudnn_attention_backward", [], step_parts.ATTENTION),
        ("aten::_grouped_mm", [], step_parts.EXPERTS),
        ("lightning_d9d::moe_copy_rows", [], step_parts.COPIES),
        ("lightning_d9d::moe_route", [], step_parts.REST),
        ("lightning_d9d::rms_norm_backward", [], step_parts.NORMS),
        ("Optimizer.step#StochasticAdamW.step", [], step_parts.ADAMW),
        ("aten::embedding", [], step_parts.REST),
    ],
)
def test_parts_of_operators(operator: str, shapes: list[list[int]], part: str) -> None:
    assert step_parts.part_of(operator, shapes, Qwen3MoeConfig.preset("tiny").vocab_size) == part
