"""Tokens to the memory of other ranks, by kernels of all ranks in one process: rows that come early, late or never."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from lightning_d9d.ops.backend import using_kernels
from lightning_d9d.ops.kernels import peer_exchange as kernels
from lightning_d9d.ops.moe_permute import Permutation, sort_by_expert
from lightning_d9d.ops.moe_ranks import ranks_once
from lightning_d9d.ops.peer_memory import LATE, OVERFLOW, Notes, PeerLayout, PeerMemory
from tests.harness.compare import assert_bitwise_equal
from tests.ops.grid import DEVICES

NUM_LOCAL, TOP_K, WIDTH = 2, 3, 40
NUM_TOKENS = (5, 0, 8)
NUM_RANKS = len(NUM_TOKENS)
MOST_TOKENS = max(NUM_TOKENS) * NUM_RANKS
"""The most rows that a rank sends, and more than any rank gets."""


class Sent(NamedTuple):
    """A rank, its tokens and what it knows of their places."""

    memory: PeerMemory
    x: Tensor
    weights: Tensor
    experts: Tensor
    ranks: Tensor
    to_ranks: Permutation
    to_experts: Permutation
    table: Tensor
    shifts: Tensor
    offsets: Tensor

    def notes(self, of_rows: Tensor) -> Notes:
        """What is sent with tokens."""
        return Notes(self.weights, self.experts, self.to_experts.places, self.shifts, of_rows)

    def exchange(self, copies: Tensor, rows: Tensor, notes: Notes | None) -> None:
        """Write tokens, and copy those that are there."""
        kernels.exchange(self.memory, self.x, self.to_ranks.places, self.ranks, self.table, copies, rows, notes)


def make_ranks(device: str, num_rows: int, most_tokens: int = MOST_TOKENS) -> list[Sent]:
    """All ranks with their tables. The first two times counts of other ranks are not there yet."""
    layout = PeerLayout(NUM_RANKS, NUM_LOCAL, most_tokens, 4 * WIDTH, TOP_K)
    buffers = [torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device) for _ in NUM_TOKENS]
    generator, made, num_experts = torch.Generator().manual_seed(0), [], NUM_RANKS * NUM_LOCAL
    for rank, num_tokens in enumerate(NUM_TOKENS):
        x = torch.randn(num_tokens, WIDTH, generator=generator).to(device)
        weights, experts = torch.rand(num_tokens, num_experts, generator=generator).to(device).topk(TOP_K)
        ranks = ranks_once(experts, NUM_LOCAL, NUM_RANKS)
        to_ranks, to_experts = sort_by_expert(ranks, NUM_RANKS + 1), sort_by_expert(experts, num_experts)
        results = (ranks.new_empty(3, NUM_RANKS), ranks.new_empty(num_experts), ranks.new_empty(NUM_LOCAL))
        memory = PeerMemory(buffers, rank, layout)
        made.append(Sent(memory, x, weights, experts, ranks, to_ranks, to_experts, *results))
    for turn in range(3):
        for each in made:
            each.memory.state[1:] = 0
            each.memory.state[1] = LATE  # so that no rank waits
            sent, copies = each.to_ranks.counts[:-1].contiguous(), each.to_experts
            results = (each.table, each.shifts, each.offsets)
            kernels.share_counts(each.memory, sent, copies.counts, copies.offsets, num_rows, *results)
            assert int(each.memory.state[0]) == turn + 1
    return made


class Expected(NamedTuple):
    """Copies for a rank's experts, sorted by expert, rank and token."""

    rows: Tensor
    weights: Tensor
    sources: Tensor
    """The number of each copy's token among those that come, sorted by rank and token."""
    ends: list[int]
    """One past the last copy of each expert."""


def expected(sent: Sequence[Sent], rank: int) -> Expected:
    """Return the copies for a rank."""
    parts, ends, first = [], [], 0
    comes = [(each.experts // NUM_LOCAL == rank).any(1) for each in sent]
    numbers = torch.cat(comes).cumsum(0).split([len(each) for each in comes])
    for expert in range(rank * NUM_LOCAL, (rank + 1) * NUM_LOCAL):
        for each, number in zip(sent, numbers, strict=True):
            tokens, ks = (each.experts == expert).nonzero(as_tuple=True)
            parts.append((each.x[tokens], each.weights[tokens, ks], number[tokens] - 1))
            first += len(tokens)
        ends.append(first)
    rows, weights, sources = (torch.cat(part) for part in zip(*parts, strict=True))
    return Expected(rows, weights, sources, ends)


def is_early(sent: Sent) -> Tensor:
    """Whether each row that other ranks have sent was copied by the kernel that also writes."""
    layout, epoch = sent.memory.layout, int(sent.memory.state[0]) + 1
    flags = sent.memory.view(
        sent.memory.rank, sent.memory.region(epoch) + layout.flags_at, torch.int32, layout.num_rows
    )
    return flags == -1 - epoch


@DEVICES
@pytest.mark.parametrize("num_columns", [4096, 16], ids=["whole rows", "parts of rows"])
@pytest.mark.parametrize("order", list(permutations(range(NUM_RANKS))))
def test_rows_that_come_early_and_late(
    device: str, order: tuple[int, ...], num_columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank runs as a whole before the next, so it gets rows of those before it early, and the others late.

    In four exchanges both regions are used again, with flags of rows that came early and of others that came late.
    """
    monkeypatch.setattr(kernels, "_MOST_COLUMNS", num_columns)
    with using_kernels("triton"):
        sent = make_ranks(device, num_rows := sum(NUM_TOKENS) * TOP_K)
        of_rows = [torch.full((num_rows,), -1.0, device=device) for _ in sent]
        copies = [torch.zeros(MOST_TOKENS, TOP_K, dtype=torch.int32, device=device) for _ in sent]
        for turn in range(4):
            sent = [each._replace(x=each.x + turn) for each in sent]
            in_order = order if turn < 2 else order[::-1]
            notes = [each.notes(to) if turn == 0 else None for each, to in zip(sent, of_rows, strict=True)]
            rows = [torch.full((num_rows, WIDTH), -1.0, device=device) for _ in sent]
            for place, rank in enumerate(in_order):
                sent[rank].exchange(copies[rank], rows[rank], notes[rank])
                found = expected(sent, rank)
                ranks = (found.sources.unsqueeze(1) >= sent[rank].table[2]).sum(1)
                is_there = torch.isin(ranks, torch.tensor(in_order[: place + 1], device=device)).unsqueeze(1)
                early_rows = rows[rank][: len(found.rows)]
                assert_bitwise_equal("early rows", early_rows, torch.where(is_there, found.rows, -1.0))
            for rank, each in enumerate(sent):
                early, ends = is_early(each), each.table[2].tolist()
                for source, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
                    comes_early = source != rank and in_order.index(source) < in_order.index(rank)
                    assert early[begin:end].tolist() == [comes_early] * (end - begin)
            for rank, each in enumerate(sent):
                kernels.meet(each.memory)
                kernels.take_rest(
                    each.memory, each.table, copies[rank], rows[rank], of_rows[rank] if turn == 0 else None
                )
            for rank, each in enumerate(sent):
                found, num_copies = expected(sent, rank), int(each.offsets[-1])
                assert each.offsets.tolist() == found.ends
                assert_bitwise_equal(f"rows {turn}", rows[rank][:num_copies], found.rows)
                assert_bitwise_equal("weights", of_rows[rank][:num_copies], found.weights)
                assert bool((rows[rank][num_copies:] == -1).all()), "rows without a copy are not written"
                assert bool((copies[rank][int(each.table[2, -1]) :] == num_rows).all())
                assert int(each.memory.status) & OVERFLOW == 0


@DEVICES
@pytest.mark.parametrize(("missing_rows", "missing_tokens"), [(1, 0), (0, 1)], ids=["rows", "tokens"])
def test_what_does_not_fit_is_not_written(device: str, missing_rows: int, missing_tokens: int) -> None:
    """There is room for all but one copy, or all but one token, of the rank that gets most. All others come."""
    with using_kernels("triton"):
        sent = make_ranks(device, sum(NUM_TOKENS) * TOP_K)
        num_rows = max(int(each.offsets[-1]) for each in sent) - missing_rows
        most_tokens = max(int(each.table[2, -1]) for each in sent) - missing_tokens
        sent = make_ranks(device, num_rows, most_tokens)
        assert any(int(each.memory.status) & OVERFLOW for each in sent)
        rows = [torch.full((num_rows + 1, WIDTH), -1.0, device=device) for _ in sent]
        of_rows = [torch.full((num_rows + 1,), -1.0, device=device) for _ in sent]
        copies = [torch.full((most_tokens + 1, TOP_K), -7, dtype=torch.int32, device=device) for _ in sent]
        for each, *to in zip(sent, copies, rows, of_rows, strict=True):
            places, of_experts, weights = (part[:-1] for part in to)
            each.exchange(places, of_experts, each.notes(weights))
        for each, *to in zip(sent, copies, rows, of_rows, strict=True):
            kernels.meet(each.memory)
            kernels.take_rest(each.memory, each.table, *(part[:-1] for part in to))
        num_lost = 0
        for rank in range(NUM_RANKS):
            found = expected(sent, rank)
            fits = (torch.arange(len(found.rows), device=device) < num_rows) & (found.sources < most_tokens)
            whole = torch.full((max(len(fits), num_rows + 1), WIDTH), -1.0, device=device)
            whole[: len(fits)][fits] = found.rows[fits]
            assert_bitwise_equal("rows", rows[rank], whole[: num_rows + 1])
            assert_bitwise_equal("weights", of_rows[rank][:-1][: len(fits)][fits[:num_rows]], found.weights[fits])
            assert of_rows[rank][-1] == -1
            assert bool((copies[rank][-1] == -7).all())
            num_lost += int((~fits).sum())
        assert num_lost >= 1
