"""Observers of an executor: clocks that start together, and bytes that a forward leaves."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from lightning_d9d.pipeline.timeline import ActivationBytes, Timeline
from lightning_d9d.schedule import Backward, Forward, Span
from tests.harness.ranks import RankContext

CPU = torch.device("cpu")


@pytest.mark.ranks(2)
def test_clocks_start_when_all_ranks_have_met(rank: RankContext) -> None:
    if rank.rank == 0:  # comes late
        torch.randn(400, 400).matrix_power(15)
    entered = time.perf_counter()
    timeline = Timeline(CPU, rank.group)
    with timeline.span(Forward(rank.rank, 0)):
        inside = time.perf_counter()
    with timeline.span(Backward(rank.rank, 0)):
        pass
    spans = timeline.spans()
    assert [(span.rank, span.action) for span in spans] == [
        (0, Forward(0, 0)), (0, Backward(0, 0)), (1, Forward(1, 0)), (1, Backward(1, 0)),
    ]  # fmt: skip
    forward, backward = spans[2 * rank.rank : 2 * rank.rank + 2]
    assert forward.start <= forward.end <= backward.start <= backward.end
    start = inside - forward.start  # or a little earlier
    assert start >= max(rank.all_gather_object(entered))  # all processes of a host have one clock
    assert rank.all_gather_object(spans)[0] == spans


def test_one_rank_needs_no_group() -> None:
    timeline = Timeline(CPU)
    with timeline.span(Forward(0, 0)):
        pass
    (span,) = timeline.spans()
    assert isinstance(span, Span)
    assert 0 <= span.start <= span.end


def test_bytes_that_forwards_leave() -> None:
    module = nn.Linear(8, 16, dtype=torch.float64)
    activations = ActivationBytes([module], CPU)
    for microbatch, rows in enumerate((3, 5)):
        x = torch.randn(rows, 8, dtype=torch.float64, requires_grad=True)
        with activations.span(Forward(2, microbatch)):
            y = module(x).sigmoid()
        with activations.span(Backward(2, microbatch)):
            y.sum().backward()
    assert activations.means() == {2: 4 * (8 + 16) * 8}  # the input and the sigmoid's result of four rows
