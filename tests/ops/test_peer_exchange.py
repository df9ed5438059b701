"""Tokens to the memory of other ranks, by kernels of all ranks in one process: rows that come early, late or never."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from lightning_d9d.modules.dispatch import without_repetitions
from lightning_d9d.ops.backend import using_kernels
from lightning_d9d.ops.kernels import peer_exchange as kernels
from lightning_d9d.ops.moe_permute import Permutation, sort_by_expert
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
        ranks = without_repetitions(experts // NUM_LOCAL, NUM_RANKS).int()
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


def expected(sent: Sequence[Sent], rank: int) -> tuple[Tensor, Tensor, list[int]]:
    """Copies sorted by expert, rank and token, their weights, and the ends of experts."""
    rows, weights, ends = [], [], []
    for expert in range(rank * NUM_LOCAL, (rank + 1) * NUM_LOCAL):
        for each in sent:
            tokens, ks = (each.experts == expert).nonzero(as_tuple=True)
            rows += [each.x[tokens]]
            weights += [each.weights[tokens, ks]]
        ends.append(sum(map(len, rows)))
    return torch.cat(rows), torch.cat(weights), ends


def is_early(sent: Sent) -> Tensor:
    """Whether each row that other ranks have sent was copied by the kernel that also writes."""
    layout, epoch = sent.memory.layout, int(sent.memory.state[0]) + 1
    flags = sent.memory.view(
        sent.memory.rank, sent.memory.region(epoch) + layout.flags_at, torch.int32, layout.num_rows
    )
    return flags == -1 - epoch


@DEVICES
@pytest.mark.parametrize("order", list(permutations(range(NUM_RANKS))))
def test_rows_that_come_early_and_late(device: str, order: tuple[int, ...]) -> None:
    """Each rank runs as a whole before the next, so it gets rows of those before it early, and the others late."""
    with using_kernels("triton"):
        sent = make_ranks(device, num_rows := sum(NUM_TOKENS) * TOP_K)
        rows = [torch.full((num_rows, WIDTH), -1.0, device=device) for _ in sent]
        of_rows = [torch.full((num_rows,), -1.0, device=device) for _ in sent]
        copies = [torch.zeros(MOST_TOKENS, TOP_K, dtype=torch.int32, device=device) for _ in sent]
        again = [torch.full_like(each, -1.0) for each in rows]
        for is_backward in (False, True):
            to = again if is_backward else rows
            for rank in order:
                notes = None if is_backward else sent[rank].notes(of_rows[rank])
                sent[rank].exchange(copies[rank], to[rank], notes)
            for rank, each in enumerate(sent):
                early, ends = is_early(each), each.table[2].tolist()
                for source, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
                    comes_early = source != rank and order.index(source) < order.index(rank)
                    assert early[begin:end].tolist() == [comes_early] * (end - begin)
            for rank, each in enumerate(sent):
                kernels.meet(each.memory)
                kernels.take_rest(
                    each.memory, each.table, copies[rank], to[rank], None if is_backward else of_rows[rank]
                )
        for rank, each in enumerate(sent):
            of_copies, of_weights, ends = expected(sent, rank)
            assert each.offsets.tolist() == ends
            assert_bitwise_equal("rows", rows[rank][: ends[-1]], of_copies)
            assert_bitwise_equal("rows again", again[rank][: ends[-1]], of_copies)
            assert_bitwise_equal("weights", of_rows[rank][: ends[-1]], of_weights)
            assert bool((rows[rank][ends[-1] :] == -1).all()), "rows without a copy are not written"
            assert bool((copies[rank][int(each.table[2, -1]) :] == num_rows).all())
            assert int(each.memory.status) & OVERFLOW == 0


@DEVICES
@pytest.mark.parametrize(("missing_rows", "missing_tokens"), [(1, 0), (0, 1)], ids=["rows", "tokens"])
def test_what_does_not_fit_is_not_written(device: str, missing_rows: int, missing_tokens: int) -> None:
    """There is room for all but one copy, or all but one token, of the rank with most: all others are there."""
    with using_kernels("triton"):
        sent = make_ranks(device, sum(NUM_TOKENS) * TOP_K)
        num_rows = max(int(each.offsets[-1]) for each in sent) - missing_rows
        most_tokens = max(int(each.memory.state[2]) for each in sent) - missing_tokens
        whole = [expected(sent, rank) for rank in range(NUM_RANKS)]
        sent = make_ranks(device, num_rows, most_tokens)
        assert any(int(each.memory.status) & OVERFLOW for each in sent)
        rows = [torch.full((num_rows + 1, WIDTH), -1.0, device=device) for _ in sent]
        for each, to in zip(sent, rows, strict=True):
            copies = torch.zeros(most_tokens, TOP_K, dtype=torch.int32, device=device)
            each.exchange(copies, to[:-1], each.notes(torch.zeros(num_rows, device=device)))
        for rank, (of_copies, _, ends) in enumerate(whole):
            assert bool((rows[rank][-1] == -1).all())
            is_written = (rows[rank] != -1).all(1)
            written = rows[rank][: len(of_copies)][is_written[: len(of_copies)]]
            same = of_copies[: len(rows[rank])][is_written[: len(of_copies)]]
            assert_bitwise_equal("written rows", written, same)
            assert int(is_written.sum()) <= min(ends[-1], num_rows)
