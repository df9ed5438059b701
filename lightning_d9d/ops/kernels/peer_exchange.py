"""Triton kernels of `lightning_d9d.ops.peer_exchange`: they write into the memory of other ranks' devices.

[Note: what runs at a time] `_exchange` has three kinds of programs, in this order, which is that of their starts.
Writers write tokens into the memory of other ranks, at the rate of the link. Meanwhile the next programs copy this
rank's tokens for its own experts, at the rate of the device's memory. Readers copy tokens that come from other ranks.
Each row that comes has a flag. Readers wait for it only while writers of this rank still run, and these wait for
nothing. So no rank occupies its device in a wait for another rank. `_take_rest` copies rows that came later.

[Note: waits] A rank writes its rows into the memory of others, and then the number of the exchange to a flag there. A
reader waits for the flags of all ranks. See [Note: flags] in `peer_words.py`. Numbers and waits are on the device, so
that a graph can be captured. After the time limit a bit of the state is set, and later waits end at once.

[Note: two regions] Exchanges take turns with two regions of the memory. A rank writes for exchange e + 2 after it has
seen all flags of e + 1. The others set these after they have read exchange e. So each exchange needs only one wait.

[Note: turns] Received rows are sorted by the rank that sent them. Sums go back to these ranks in turns. Else one
link would be busy at a time, and none while sums stay on the rank.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from lightning_d9d.ops.kernels.compiling import jit
from lightning_d9d.ops.kernels.peer_words import limit_of, now, polled
from lightning_d9d.ops.peer_memory import LATE, OVERFLOW, Notes, PeerMemory
from lightning_d9d.ops.rows import ceil_div, next_power_of_2, num_programs

_NUM_WARPS = 4
_MOST_COLUMNS = 4096
"""Columns that a program handles at a time."""
_WRITERS_A_PROCESSOR = 6
"""Programs for each multiprocessor that write to other ranks: enough to keep the link busy."""
_TOKENS_AT_ONCE = 2
"""Tokens for whose rows a program sets flags at once."""
_ROWS_OF_REST = 32
"""Rows of which a program copies those that have come late."""
_MOST_WAIT = tl.constexpr(2_000_000)
"""The limit of a wait for a row, in nanoseconds, should programs not start in their order."""
_LATE, _OVERFLOW = tl.constexpr(LATE), tl.constexpr(OVERFLOW)


def share_counts(
    memory: PeerMemory,
    sent: Tensor,
    counts: Tensor,
    ends: Tensor,
    num_rows: int,
    table: Tensor,
    shifts: Tensor,
    offsets: Tensor,
) -> None:
    """Write the last three tensors. Collective."""
    layout = memory.layout
    _share[(1,)](
        memory.pointers,
        memory.own,
        memory.state,
        sent,
        counts,
        ends,
        table,
        shifts,
        offsets,
        limit_of(memory.timeout_s),
        layout.num_ranks,
        memory.rank,
        layout.num_local,
        layout.counts_at,
        layout.counts_bytes,
        layout.num_rows,
        num_rows,
        RANKS=next_power_of_2(layout.num_ranks),
        LOCAL=next_power_of_2(layout.num_local),
        num_warps=1,
    )


def meet(memory: PeerMemory) -> None:
    """Wait on the device until all ranks have arrived. Collective."""
    num_ranks = memory.layout.num_ranks
    _meet[(1,)](
        memory.pointers,
        memory.own,
        memory.state,
        limit_of(memory.timeout_s),
        num_ranks,
        memory.rank,
        RANKS=next_power_of_2(num_ranks),
        num_warps=1,
    )


def exchange(
    memory: PeerMemory,
    x: Tensor,
    places: Tensor,
    ranks: Tensor,
    table: Tensor,
    copies: Tensor,
    rows: Tensor,
    notes: Notes | None,
) -> None:
    """Write tokens into the memory of other ranks, and copies for this rank's experts to `rows`."""
    layout, top_k = memory.layout, places.shape[1]
    num_writers = num_programs(ceil_div(len(x), _TOKENS_AT_ONCE), x.device, _WRITERS_A_PROCESSOR)
    num_readers = ceil_div(layout.num_rows, layout.num_ranks) * layout.num_ranks
    _exchange[(num_writers + len(x) + num_readers,)](
        memory.pointers,
        memory.own,
        memory.state,
        x,
        x.stride(0),
        places,
        ranks,
        table,
        copies,
        rows,
        *([None] * 5 if notes is None else notes),
        *_region(memory),
        layout.flags_at,
        len(x),
        num_writers,
        layout.num_ranks,
        memory.rank,
        layout.num_local,
        len(rows),
        x.shape[1],
        AT_ONCE=_TOKENS_AT_ONCE,
        TOP_K=top_k,
        KS=next_power_of_2(top_k),
        HAS_NOTES=notes is not None,
        **_columns(x),
    )


def take_rest(memory: PeerMemory, table: Tensor, copies: Tensor, rows: Tensor, of_rows: Tensor | None) -> None:
    """Write copies of the tokens from other ranks to `rows`; with `of_rows` their weights, and `copies`."""
    _take_rest[(ceil_div(len(copies), _ROWS_OF_REST),)](
        memory.own,
        memory.state,
        table,
        copies,
        rows,
        of_rows,
        *_region(memory),
        memory.layout.flags_at,
        memory.layout.num_ranks,
        memory.rank,
        len(rows),
        rows.shape[1],
        ROWS=_ROWS_OF_REST,
        TOP_K=copies.shape[1],
        KS=next_power_of_2(copies.shape[1]),
        HAS_NOTES=of_rows is not None,
        **_columns(rows),
    )


def push_sums(memory: PeerMemory, rows: Tensor, places: Tensor, table: Tensor, weights: Tensor | None) -> None:
    """Write sums of rows into the memory of the ranks that sent the originals."""
    num_ranks = memory.layout.num_ranks
    _push_sums[(ceil_div(len(places), num_ranks) * num_ranks,)](
        memory.pointers,
        memory.state,
        rows,
        rows.stride(0),
        places,
        table,
        weights,
        *_region(memory),
        memory.layout.num_ranks,
        len(rows),
        rows.shape[1],
        RANKS=next_power_of_2(memory.layout.num_ranks),
        TOP_K=places.shape[1],
        KS=next_power_of_2(places.shape[1]),
        HAS_NOTES=weights is not None,
        **_columns(rows),
    )


def take_sums(memory: PeerMemory, places: Tensor, ranks: Tensor, sums: Tensor, weights: Tensor | None) -> None:
    """Write the last two tensors: sums of the returned rows, and of the values beside them."""
    if len(sums) == 0:
        return
    _take_sums[(len(sums),)](
        memory.own,
        memory.state,
        places,
        ranks,
        sums,
        weights,
        *_region(memory),
        memory.layout.num_ranks,
        sums.shape[1],
        TOP_K=places.shape[1],
        KS=next_power_of_2(places.shape[1]),
        HAS_NOTES=weights is not None,
        **_columns(sums),
    )


def _region(memory: PeerMemory) -> tuple[int, int, int, int, int]:
    """Return the place of the first region, the length of each, the place of notes in it, and its number of rows."""
    layout = memory.layout
    return layout.regions_at, layout.region_bytes, layout.weights_at, layout.copies_at, layout.num_rows


def _columns(matrix: Tensor) -> dict[str, Any]:
    width = matrix.shape[1]
    columns = min(next_power_of_2(max(1, width)), _MOST_COLUMNS)
    return {"COLUMNS": columns, "PARTS": ceil_div(width, columns), "num_warps": _NUM_WARPS}


@triton.jit
def _wait(pointers, own, state, limit, num_ranks, rank, RANKS: tl.constexpr):
    """Set this rank's flag at all others, and wait for theirs. [Note: waits]."""
    epoch = tl.load(state) + 1
    others = tl.arange(0, RANKS)
    is_rank = others < num_ranks
    flags = tl.load(pointers + others, mask=is_rank, other=0).to(tl.pointer_type(tl.int32)) + rank
    tl.debug_barrier()
    tl.atomic_xchg(flags, tl.zeros([RANKS], tl.int32) + epoch, mask=is_rank, sem="release", scope="sys")
    status = tl.load(state + 1)
    here = own.to(tl.pointer_type(tl.int32)) + others
    missing = polled(here, is_rank, epoch, (status & _LATE) != 0, limit)
    if missing > 0:
        tl.store(state + 1, status | _LATE)
    tl.store(state, epoch)
    tl.store(state + 4, 0)  # no writer of the next exchange has ended
    tl.debug_barrier()


@jit
def _meet(pointers, own, state, limit, num_ranks, rank, RANKS: tl.constexpr):
    _wait(pointers, own, state, limit, num_ranks, rank, RANKS)


@jit
def _share(
    pointers, own, state, sent, counts, ends, table, shifts, offsets, limit,
    num_ranks, rank, num_local, counts_at, counts_bytes, most_rows, num_rows, RANKS: tl.constexpr, LOCAL: tl.constexpr,
):  # fmt: skip
    ranks, local = tl.arange(0, RANKS), tl.arange(0, LOCAL)
    rows, columns = ranks[:, None], local[None, :]
    is_rank, is_expert = ranks < num_ranks, (rows < num_ranks) & (columns < num_local)
    experts = rows * num_local + columns
    length = num_ranks * (1 + num_local)
    turn = ((tl.load(state) + 1) & 1).to(tl.int64)
    at = counts_at + turn * counts_bytes
    of_ranks = tl.load(sent + ranks, mask=is_rank, other=0)
    of_experts = tl.load(counts + experts, mask=is_expert, other=0)
    for other in range(num_ranks):
        target = (tl.load(pointers + other) + at).to(tl.pointer_type(tl.int32)) + rank * length
        tl.store(target + ranks, of_ranks, mask=is_rank)
        tl.store(target + num_ranks + experts, of_experts, mask=is_expert)
    _wait(pointers, own, state, limit, num_ranks, rank, RANKS)

    here = (own + at).to(tl.pointer_type(tl.int32))
    pairs = here + rows * length + ranks[None, :]
    traffic = tl.load(pairs, mask=(rows < num_ranks) & (ranks[None, :] < num_ranks), other=0, volatile=True)
    arrived = tl.cumsum(traffic, 0) - traffic
    departed = tl.cumsum(traffic, 1) - traffic
    is_mine, is_here = (rows == rank).to(tl.int32), (ranks[None, :] == rank).to(tl.int32)
    tl.store(table + ranks, tl.sum((arrived - departed) * is_mine, 0), mask=is_rank)
    tl.store(table + num_ranks + ranks, tl.sum((departed - arrived) * is_here, 1), mask=is_rank)
    last = tl.minimum(tl.sum((arrived + traffic) * is_here, 1), most_rows)
    tl.store(table + 2 * num_ranks + ranks, last, mask=is_rank)

    total, before = tl.zeros([RANKS, LOCAL], tl.int32), tl.zeros([RANKS, LOCAL], tl.int32)
    for other in range(num_ranks):
        copies = tl.load(here + other * length + num_ranks + experts, mask=is_expert, other=0, volatile=True)
        total += copies
        before += copies * (other < rank).to(tl.int32)
    end = tl.cumsum(total, 1)
    begin = tl.load(ends + experts, mask=is_expert, other=0) - of_experts
    tl.store(shifts + experts, end - total + before - begin, mask=is_expert)
    mine = tl.sum(end * is_mine, 0)
    tl.store(offsets + local, tl.minimum(mine, num_rows), mask=local < num_local)

    most = tl.maximum(tl.max(tl.sum(traffic, 0), 0), tl.max(tl.sum(traffic, 1), 0))
    most_copies = tl.max(mine, 0)
    tl.store(state + 2, tl.maximum(tl.load(state + 2), most))
    tl.store(state + 3, tl.maximum(tl.load(state + 3), most_copies))
    if (most > most_rows) | (most_copies > num_rows):
        tl.store(state + 1, tl.load(state + 1) | _OVERFLOW)


@triton.jit
def _place(numbers, shifts, expert, at, is_there, num_rows):
    """Return the row of a copy on its expert's rank; `num_rows` if it is not there."""
    place = tl.load(numbers + at, mask=is_there, other=0) + tl.load(shifts + expert, mask=is_there, other=0)
    return tl.where(is_there, tl.minimum(place, num_rows), num_rows)


@triton.jit
def _write_token(
    pointers, x, places, ranks, table, weights, experts, numbers, shifts,
    region, weights_at, copies_at, most_rows, token, stride, num_ranks, own_rank, num_local, num_rows, width,
    TOP_K: tl.constexpr, KS: tl.constexpr, HAS_NOTES: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Write a token to each other rank with experts of it, and its notes."""
    first = token * TOP_K
    ks = tl.arange(0, KS)
    is_k = ks < TOP_K
    for part in range(PARTS):
        columns = part * COLUMNS + tl.arange(0, COLUMNS)
        values = tl.load(x + token * stride + columns, mask=columns < width, other=0.0)
        for k in range(TOP_K):
            rank = tl.load(ranks + first + k)
            if (rank < num_ranks) & (rank != own_rank):
                row = (tl.load(places + first + k) + tl.load(table + rank)).to(tl.int64)
                if row < most_rows:
                    base = tl.load(pointers + rank) + region
                    target = base.to(tl.pointer_type(x.dtype.element_ty))
                    tl.multiple_of(target, 16)
                    tl.store(target + row * width + columns, values, mask=columns < width)
                    if HAS_NOTES and part == 0:
                        expert = tl.load(experts + first + ks, mask=is_k, other=0).to(tl.int32)
                        is_there = is_k & (expert // num_local == rank)
                        place = _place(numbers, shifts, expert, first + ks, is_there, num_rows)
                        weight = tl.load(weights + first + ks, mask=is_there, other=0.0).to(tl.float32)
                        to_weights = (base + weights_at).to(tl.pointer_type(tl.float32)) + row * TOP_K
                        to_copies = (base + copies_at).to(tl.pointer_type(tl.int32)) + row * TOP_K
                        tl.store(to_weights + ks, weight, mask=is_k)
                        tl.store(to_copies + ks, place, mask=is_k)


@triton.jit
def _set_flags(
    pointers, places, ranks, table, flags_at, most_rows, first, num_tokens, num_ranks, own_rank, epoch,
    AT_ONCE: tl.constexpr, TOP_K: tl.constexpr, KS: tl.constexpr,
):  # fmt: skip
    """Set the flags of the rows of some tokens on other ranks, after this program has written these rows."""
    each = tl.arange(0, AT_ONCE * KS)
    token, k = first + each // KS, each % KS
    is_sent = (token < num_tokens) & (k < TOP_K)
    rank = tl.load(ranks + token * TOP_K + k, mask=is_sent, other=num_ranks)
    is_sent = is_sent & (rank < num_ranks) & (rank != own_rank)
    row = tl.load(places + token * TOP_K + k, mask=is_sent, other=0) + tl.load(table + rank, mask=is_sent, other=0)
    is_sent = is_sent & (row < most_rows)
    flags = (tl.load(pointers + rank, mask=is_sent, other=0) + flags_at).to(tl.pointer_type(tl.int32)) + row
    tl.debug_barrier()
    tl.atomic_xchg(flags, tl.zeros([AT_ONCE * KS], tl.int32) + epoch, mask=is_sent, sem="release", scope="sys")


@triton.jit
def _spread(first, places, rows, num_rows, width, TOP_K: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr):
    """Copy a row to its places."""
    for part in range(PARTS):
        columns = part * COLUMNS + tl.arange(0, COLUMNS)
        values = tl.load(first + columns, mask=columns < width, other=0.0)
        for k in range(TOP_K):
            place = tl.load(places + k).to(tl.int64)
            if place < num_rows:
                tl.store(rows + place * width + columns, values, mask=columns < width)


@triton.jit
def _take_own(
    x, stride, places, ranks, table, copies, rows, weights, experts, numbers, shifts, of_rows,
    token, most_rows, num_ranks, own_rank, num_local, num_rows, width,
    TOP_K: tl.constexpr, KS: tl.constexpr, HAS_NOTES: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Copy a token of this rank for its experts here, and write its notes."""
    ks = tl.arange(0, KS)
    at, is_k = token * TOP_K + ks, ks < TOP_K
    is_own = tl.load(ranks + at, mask=is_k, other=num_ranks) == own_rank
    place = tl.max(tl.where(is_own, tl.load(places + at, mask=is_k, other=0), -1), 0)
    row = (place + tl.load(table + own_rank)).to(tl.int64)
    if (place >= 0) & (row < most_rows):
        of_row = copies + row * TOP_K
        if HAS_NOTES:
            expert = tl.load(experts + at, mask=is_k, other=0).to(tl.int32)
            is_here = is_k & (expert // num_local == own_rank)
            targets = _place(numbers, shifts, expert, at, is_here, num_rows)
            weight = tl.load(weights + at, mask=is_here, other=0.0).to(of_rows.dtype.element_ty)
            tl.store(of_row + ks, targets, mask=is_k)
            tl.store(of_rows + targets, weight, mask=is_k & (targets < num_rows))
            tl.debug_barrier()  # what follows reads the places
        _spread(x + token * stride, of_row, rows, num_rows, width, TOP_K, COLUMNS, PARTS)


@triton.jit
def _take_row(
    base, copies, rows, of_rows, weights_at, copies_at, source, num_rows, width,
    TOP_K: tl.constexpr, KS: tl.constexpr, HAS_NOTES: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Copy a row that has come for this rank's experts, and keep its notes."""
    of_row = copies + source * TOP_K
    places = of_row
    if HAS_NOTES:
        ks = tl.arange(0, KS)
        places = (base + copies_at).to(tl.pointer_type(tl.int32)) + source * TOP_K
        of_weights = (base + weights_at).to(tl.pointer_type(tl.float32)) + source * TOP_K
        place = tl.load(places + ks, mask=ks < TOP_K, other=num_rows)
        weight = tl.load(of_weights + ks, mask=ks < TOP_K, other=0.0).to(of_rows.dtype.element_ty)
        tl.store(of_row + ks, place, mask=ks < TOP_K)
        tl.store(of_rows + place, weight, mask=(ks < TOP_K) & (place < num_rows))
    first = base.to(tl.pointer_type(rows.dtype.element_ty)) + source * width
    _spread(first, places, rows, num_rows, width, TOP_K, COLUMNS, PARTS)


@triton.jit
def _has_come(flag, epoch, ended, num_writers):
    """Return whether a row has come. Wait for it while this rank's programs write: [Note: what runs at a time]."""
    seen = tl.load(flag, volatile=True)
    begin = now()
    while (seen != epoch) & (tl.load(ended, volatile=True) < num_writers) & (now() - begin < _MOST_WAIT):
        seen = tl.load(flag, volatile=True)
    return tl.atomic_add(flag, 0, sem="acquire", scope="sys") == epoch


@triton.jit
def _own_rows(table, num_ranks, own_rank):
    """Return the first received row that is from this rank, and one past the last."""
    ends = table + 2 * num_ranks
    return tl.load(ends + own_rank - 1, mask=own_rank > 0, other=0), tl.load(ends + own_rank)


@jit
def _exchange(
    pointers, own, state, x, stride, places, ranks, table, copies, rows, weights, experts, numbers, shifts, of_rows,
    regions_at, region_bytes, weights_at, copies_at, most_rows, flags_at, num_tokens, num_writers, num_ranks, own_rank,
    num_local, num_rows, width,
    AT_ONCE: tl.constexpr, TOP_K: tl.constexpr, KS: tl.constexpr, HAS_NOTES: tl.constexpr, COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    epoch = tl.load(state) + 1
    region = regions_at + (epoch & 1).to(tl.int64) * region_bytes
    if program < num_writers:
        for group in range(program, tl.cdiv(num_tokens, AT_ONCE), num_writers):
            for token in range(group * AT_ONCE, tl.minimum(num_tokens, (group + 1) * AT_ONCE)):
                _write_token(
                    pointers, x, places, ranks, table, weights, experts, numbers, shifts,
                    region, weights_at, copies_at, most_rows, token, stride, num_ranks, own_rank, num_local, num_rows,
                    width, TOP_K, KS, HAS_NOTES, COLUMNS, PARTS,
                )  # fmt: skip
            _set_flags(
                pointers, places, ranks, table, region + flags_at, most_rows, group * AT_ONCE, num_tokens, num_ranks,
                own_rank, epoch, AT_ONCE, TOP_K, KS,
            )  # fmt: skip
        tl.atomic_add(state + 4, 1)
    elif program < num_writers + num_tokens:
        _take_own(
            x, stride, places, ranks, table, copies, rows, weights, experts, numbers, shifts, of_rows,
            program - num_writers, most_rows, num_ranks, own_rank, num_local, num_rows, width,
            TOP_K, KS, HAS_NOTES, COLUMNS, PARTS,
        )  # fmt: skip
    else:
        reader = program - num_writers - num_tokens
        end = tl.load(table + 3 * num_ranks - 1)
        if HAS_NOTES and (reader >= end) & (reader < most_rows):
            ks = tl.arange(0, KS)
            tl.store(copies + reader * TOP_K + ks, num_rows + tl.zeros([KS], tl.int32), mask=ks < TOP_K)
        share = tl.cdiv(end, num_ranks)
        source = (reader % num_ranks) * share + reader // num_ranks  # [Note: turns]
        own_begin, own_end = _own_rows(table, num_ranks, own_rank)
        is_row = (reader // num_ranks < share) & (source < end)
        if is_row & ((source < own_begin) | (source >= own_end)):
            flag = (own + region + flags_at).to(tl.pointer_type(tl.int32)) + source
            if _has_come(flag, epoch, state + 4, num_writers):
                _take_row(
                    own + region, copies, rows, of_rows, weights_at, copies_at, source, num_rows, width,
                    TOP_K, KS, HAS_NOTES, COLUMNS, PARTS,
                )  # fmt: skip
                tl.store(flag, -1 - epoch)


@jit
def _take_rest(
    own, state, table, copies, rows, of_rows, regions_at, region_bytes, weights_at, copies_at, most_rows, flags_at,
    num_ranks, own_rank, num_rows, width,
    ROWS: tl.constexpr, TOP_K: tl.constexpr, KS: tl.constexpr, HAS_NOTES: tl.constexpr, COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    epoch = tl.load(state)
    base = own + regions_at + (epoch & 1).to(tl.int64) * region_bytes
    flags = (base + flags_at).to(tl.pointer_type(tl.int32))
    end = tl.load(table + 3 * num_ranks - 1)
    own_begin, own_end = _own_rows(table, num_ranks, own_rank)
    first = tl.program_id(0).to(tl.int64) * ROWS
    sources = first + tl.arange(0, ROWS)
    is_row = (sources < end) & ((sources < own_begin) | (sources >= own_end))
    is_left = tl.load(flags + sources, mask=is_row, other=0) != -1 - epoch
    if tl.sum((is_row & is_left).to(tl.int32), 0) > 0:
        for source in range(first, tl.minimum(end, first + ROWS)):
            is_other = (source < own_begin) | (source >= own_end)
            if is_other & (tl.load(flags + source) != -1 - epoch):
                _take_row(
                    base, copies, rows, of_rows, weights_at, copies_at, source, num_rows, width,
                    TOP_K, KS, HAS_NOTES, COLUMNS, PARTS,
                )  # fmt: skip


@jit
def _push_sums(
    pointers, state, rows, stride, places, table, weights,
    regions_at, region_bytes, weights_at, copies_at, most_rows, num_ranks, num_rows, width,
    RANKS: tl.constexpr, TOP_K: tl.constexpr, KS: tl.constexpr, HAS_NOTES: tl.constexpr,
    COLUMNS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    end = tl.load(table + 3 * num_ranks - 1)
    share = tl.cdiv(end, num_ranks)
    turn, row = tl.program_id(0) % num_ranks, tl.program_id(0) // num_ranks
    source = (turn * share + row).to(tl.int64)  # [Note: turns]
    if (row < share) & (source < end):
        others = tl.arange(0, RANKS)
        ends = tl.load(table + 2 * num_ranks + others, mask=others < num_ranks, other=0x7FFFFFFF)
        rank = tl.sum((ends <= source).to(tl.int32), 0)
        target_row = source + tl.load(table + num_ranks + rank)
        if target_row < most_rows:
            region = regions_at + ((tl.load(state) + 1) & 1).to(tl.int64) * region_bytes
            base = tl.load(pointers + rank) + region
            target = base.to(tl.pointer_type(rows.dtype.element_ty))
            tl.multiple_of(target, 16)
            for part in range(PARTS):
                columns = part * COLUMNS + tl.arange(0, COLUMNS)
                total = tl.zeros([COLUMNS], tl.float32)
                for k in range(TOP_K):
                    place = tl.load(places + source * TOP_K + k).to(tl.int64)
                    if place < num_rows:
                        total += tl.load(rows + place * stride + columns, mask=columns < width, other=0.0).to(
                            tl.float32
                        )
                value = total.to(rows.dtype.element_ty)
                tl.store(target + target_row * width + columns, value, mask=columns < width)
            if HAS_NOTES:
                ks = tl.arange(0, KS)
                place = tl.load(places + source * TOP_K + ks, mask=ks < TOP_K, other=num_rows).to(tl.int64)
                weight = tl.load(weights + place, mask=place < num_rows, other=0.0).to(tl.float32)
                to_weights = (base + weights_at).to(tl.pointer_type(tl.float32)) + target_row * TOP_K
                tl.store(to_weights + ks, weight, mask=ks < TOP_K)


@jit
def _take_sums(
    own, state, places, ranks, sums, weights, regions_at, region_bytes, weights_at, copies_at, most_rows, num_ranks,
    width, TOP_K: tl.constexpr, KS: tl.constexpr, HAS_NOTES: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    base = own + regions_at + (tl.load(state) & 1).to(tl.int64) * region_bytes
    first = base.to(tl.pointer_type(sums.dtype.element_ty))
    for part in range(PARTS):
        columns = part * COLUMNS + tl.arange(0, COLUMNS)
        total = tl.zeros([COLUMNS], tl.float32)
        for k in range(TOP_K):
            rank = tl.load(ranks + token * TOP_K + k)
            place = tl.load(places + token * TOP_K + k).to(tl.int64)
            if (rank < num_ranks) & (place < most_rows):
                total += tl.load(first + place * width + columns, mask=columns < width, other=0.0).to(tl.float32)
        tl.store(sums + token * width + columns, total.to(sums.dtype.element_ty), mask=columns < width)
    if HAS_NOTES:
        ks = tl.arange(0, KS)
        of_weights = (base + weights_at).to(tl.pointer_type(tl.float32))
        total_weights = tl.zeros([KS], tl.float32)
        for k in range(TOP_K):
            rank = tl.load(ranks + token * TOP_K + k)
            place = tl.load(places + token * TOP_K + k).to(tl.int64)
            if (rank < num_ranks) & (place < most_rows):
                total_weights += tl.load(of_weights + place * TOP_K + ks, mask=ks < TOP_K, other=0.0)
        tl.store(weights + token * TOP_K + ks, total_weights.to(weights.dtype.element_ty), mask=ks < TOP_K)
