"""Triton kernels of `lightning_d9d.ops.peer_exchange`: they write into the memory of other ranks' devices.

[Note: waits] A rank writes its rows into the memory of others, and then the number of the exchange to a flag there. A
reader waits for the flags of all ranks. See [Note: flags] in `peer_words.py`. Numbers and waits are on the device, so
that a graph can be captured. After the time limit a bit of the state is set, and later waits end at once.

[Note: two regions] Exchanges take turns with two regions of the memory. A rank writes for exchange e + 2 after it has
seen all flags of e + 1. The others set these after they have read exchange e. So each exchange needs only one wait.

[Note: turns] Received rows are sorted by the rank that sent them. Sums go back to these ranks in turns, so that no link
idles while others are busy, nor all links while sums go to the rank itself.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from lightning_d9d.ops.kernels.compiling import jit
from lightning_d9d.ops.kernels.peer_words import limit_of, polled
from lightning_d9d.ops.peer_memory import LATE, OVERFLOW, PeerMemory
from lightning_d9d.ops.rows import ceil_div, next_power_of_2

_NUM_WARPS = 4
_MOST_COLUMNS = 4096
"""Columns that a program handles at a time."""
_LATE, _OVERFLOW = tl.constexpr(LATE), tl.constexpr(OVERFLOW)


def share_counts(memory: PeerMemory, counts: Tensor, plan: Tensor) -> None:
    """Write `plan`. Collective."""
    layout = memory.layout
    _share[(1,)](
        memory.pointers,
        memory.own,
        memory.state,
        counts,
        plan,
        limit_of(memory.timeout_s),
        layout.num_ranks,
        memory.rank,
        layout.counts_at,
        layout.num_rows,
        RANKS=next_power_of_2(layout.num_ranks),
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


def push(
    memory: PeerMemory,
    x: Tensor,
    places: Tensor,
    ranks: Tensor,
    plan: Tensor,
    weights: Tensor | None,
    experts: Tensor | None,
) -> None:
    """Write rows of tokens into the memory of the ranks that they go to."""
    if len(x) == 0:
        return
    _push[(len(x),)](
        memory.pointers,
        memory.state,
        x,
        x.stride(0),
        places,
        ranks,
        plan,
        weights,
        experts,
        *_region(memory),
        memory.layout.num_ranks,
        x.shape[1],
        TOP_K=places.shape[1],
        KS=next_power_of_2(places.shape[1]),
        HAS_NOTES=weights is not None,
        **_columns(x),
    )


def take_notes(memory: PeerMemory, plan: Tensor, first_expert: int, weights: Tensor, experts: Tensor) -> None:
    """Write the last two tensors, for the received rows: weights, and experts counted from this rank's first one."""
    num_rows, top_k = weights.shape
    rows = max(1, 1024 // next_power_of_2(top_k))
    _take_notes[(ceil_div(num_rows, rows),)](
        memory.own,
        memory.state,
        plan,
        weights,
        experts,
        *_region(memory),
        memory.layout.num_ranks,
        first_expert,
        memory.layout.num_local,
        TOP_K=top_k,
        KS=next_power_of_2(top_k),
        ROWS=rows,
        num_warps=_NUM_WARPS,
    )


def limit_places(memory: PeerMemory, experts: Tensor, places: Tensor, offsets: Tensor, num_rows: int) -> None:
    """Limit places and offsets to `num_rows`, and set the flag if one was larger."""
    size = 1024
    _limit_places[(max(1, ceil_div(places.numel(), size)),)](
        memory.state,
        experts,
        places,
        offsets,
        places.numel(),
        num_rows,
        memory.layout.num_local,
        LOCAL=next_power_of_2(memory.layout.num_local),
        SIZE=size,
        num_warps=_NUM_WARPS,
    )


def take(
    memory: PeerMemory, plan: Tensor, places: Tensor, rows: Tensor, weights: Tensor | None, of_rows: Tensor | None
) -> None:
    """Write `rows`, copies of the received rows, and `of_rows`, the weight of each copy."""
    if rows.numel() == 0:
        return
    _take[(len(places),)](
        memory.own,
        memory.state,
        plan,
        places,
        rows,
        weights,
        of_rows,
        *_region(memory),
        memory.layout.num_ranks,
        len(rows),
        rows.shape[1],
        TOP_K=places.shape[1],
        HAS_NOTES=weights is not None,
        **_columns(rows),
    )


def push_sums(memory: PeerMemory, rows: Tensor, places: Tensor, plan: Tensor, weights: Tensor | None) -> None:
    """Write sums of rows into the memory of the ranks that sent the originals."""
    num_ranks = memory.layout.num_ranks
    _push_sums[(ceil_div(len(places), num_ranks) * num_ranks,)](
        memory.pointers,
        memory.state,
        rows,
        rows.stride(0),
        places,
        plan,
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
    return layout.regions_at, layout.region_bytes, layout.weights_at, layout.experts_at, layout.num_rows


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
    tl.debug_barrier()


@jit
def _meet(pointers, own, state, limit, num_ranks, rank, RANKS: tl.constexpr):
    _wait(pointers, own, state, limit, num_ranks, rank, RANKS)


@jit
def _share(
    pointers, own, state, counts, plan, limit, num_ranks, rank, counts_at, num_rows, RANKS: tl.constexpr
):  # fmt: skip
    rows, columns = tl.arange(0, RANKS)[:, None], tl.arange(0, RANKS)[None, :]
    is_pair = (rows < num_ranks) & (columns < num_ranks)
    turn = (tl.load(state) + 1) & 1
    at = counts_at + turn.to(tl.int64) * num_ranks * num_ranks * 4
    bases = tl.load(pointers + rows, mask=rows < num_ranks, other=0) + at
    mine = tl.load(counts + columns, mask=columns < num_ranks, other=0)
    targets = bases.to(tl.pointer_type(tl.int32)) + rank * num_ranks + columns
    tl.store(targets, mine + tl.zeros([RANKS, RANKS], tl.int32), mask=is_pair)
    _wait(pointers, own, state, limit, num_ranks, rank, RANKS)
    table = (own + at).to(tl.pointer_type(tl.int32)) + rows * num_ranks + columns
    sent = tl.load(table, mask=is_pair, other=0, volatile=True)  # by sending and receiving rank
    arrived = tl.cumsum(sent, 0) - sent
    departed = tl.cumsum(sent, 1) - sent
    is_mine, is_here = (rows == rank).to(tl.int32), (columns == rank).to(tl.int32)
    ranks = tl.arange(0, RANKS)
    tl.store(plan + ranks, tl.sum((arrived - departed) * is_mine, 0), mask=ranks < num_ranks)
    tl.store(plan + num_ranks + ranks, tl.sum((departed - arrived) * is_here, 1), mask=ranks < num_ranks)
    ends = tl.minimum(tl.sum((arrived + sent) * is_here, 1), num_rows)
    tl.store(plan + 2 * num_ranks + ranks, ends, mask=ranks < num_ranks)
    most = tl.maximum(tl.max(tl.sum(sent, 0), 0), tl.max(tl.sum(sent, 1), 0))
    tl.store(state + 2, tl.maximum(tl.load(state + 2), most))
    if most > num_rows:
        tl.store(state + 1, tl.load(state + 1) | _OVERFLOW)


@jit
def _push(
    pointers, state, x, stride, places, ranks, plan, weights, experts,
    regions_at, region_bytes, weights_at, experts_at, num_rows, num_ranks, width,
    TOP_K: tl.constexpr, KS: tl.constexpr, HAS_NOTES: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    region = regions_at + ((tl.load(state) + 1) & 1).to(tl.int64) * region_bytes
    ks = tl.arange(0, KS)
    for part in range(PARTS):
        columns = part * COLUMNS + tl.arange(0, COLUMNS)
        values = tl.load(x + token * stride + columns, mask=columns < width, other=0.0)
        for k in range(TOP_K):
            rank = tl.load(ranks + token * TOP_K + k)
            if rank < num_ranks:
                row = (tl.load(places + token * TOP_K + k) + tl.load(plan + rank)).to(tl.int64)
                if row < num_rows:
                    base = tl.load(pointers + rank) + region
                    target = base.to(tl.pointer_type(x.dtype.element_ty))
                    tl.multiple_of(target, 16)
                    tl.store(target + row * width + columns, values, mask=columns < width)
                    if HAS_NOTES and part == 0:
                        at = token * TOP_K + ks
                        weight = tl.load(weights + at, mask=ks < TOP_K, other=0.0)
                        expert = tl.load(experts + at, mask=ks < TOP_K, other=0).to(tl.int32)
                        to_weights = (base + weights_at).to(tl.pointer_type(tl.float32)) + row * TOP_K
                        to_experts = (base + experts_at).to(tl.pointer_type(tl.int32)) + row * TOP_K
                        tl.store(to_weights + ks, weight.to(tl.float32), mask=ks < TOP_K)
                        tl.store(to_experts + ks, expert, mask=ks < TOP_K)


@jit
def _take_notes(
    own, state, plan, weights, experts, regions_at, region_bytes, weights_at, experts_at, num_rows, num_ranks,
    first_expert, num_local, TOP_K: tl.constexpr, KS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    base = own + regions_at + (tl.load(state) & 1).to(tl.int64) * region_bytes
    end = tl.load(plan + 3 * num_ranks - 1)
    rows, ks = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None], tl.arange(0, KS)[None, :]
    at, mask = rows * TOP_K + ks, (rows < num_rows) & (ks < TOP_K)
    is_row = mask & (rows < end)
    weight = tl.load((base + weights_at).to(tl.pointer_type(tl.float32)) + at, mask=is_row, other=0.0)
    expert = tl.load((base + experts_at).to(tl.pointer_type(tl.int32)) + at, mask=is_row, other=0) - first_expert
    is_own = is_row & (expert >= 0) & (expert < num_local)
    tl.store(weights + at, weight, mask=mask)
    tl.store(experts + at, tl.where(is_own, expert, num_local), mask=mask)


@jit
def _limit_places(
    state, experts, places, offsets, num_places, num_rows, num_local, LOCAL: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    mask = at < num_places
    place = tl.load(places + at, mask=mask, other=0)
    is_own = tl.load(experts + at, mask=mask, other=0) < num_local
    tl.store(places + at, tl.where(is_own, tl.minimum(place, num_rows), num_rows), mask=mask)
    if tl.program_id(0) == 0:
        local = tl.arange(0, LOCAL)
        ends = tl.load(offsets + local, mask=local < num_local, other=0)
        most = tl.max(ends, 0)
        tl.store(offsets + local, tl.minimum(ends, num_rows), mask=local < num_local)
        tl.store(state + 3, tl.maximum(tl.load(state + 3), most))
        if most > num_rows:
            tl.store(state + 1, tl.load(state + 1) | _OVERFLOW)


@jit
def _take(
    own, state, plan, places, rows, weights, of_rows, regions_at, region_bytes, weights_at, experts_at, most_rows,
    num_ranks, num_rows, width,
    TOP_K: tl.constexpr, HAS_NOTES: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    source = tl.program_id(0).to(tl.int64)
    if source < tl.load(plan + 3 * num_ranks - 1):
        base = own + regions_at + (tl.load(state) & 1).to(tl.int64) * region_bytes
        first = base.to(tl.pointer_type(rows.dtype.element_ty)) + source * width
        for part in range(PARTS):
            columns = part * COLUMNS + tl.arange(0, COLUMNS)
            values = tl.load(first + columns, mask=columns < width, other=0.0)
            for k in range(TOP_K):
                place = tl.load(places + source * TOP_K + k).to(tl.int64)
                if place < num_rows:
                    tl.store(rows + place * width + columns, values, mask=columns < width)
                    if HAS_NOTES and part == 0:
                        weight = tl.load(weights + source * TOP_K + k)
                        tl.store(of_rows + place, weight.to(of_rows.dtype.element_ty))


@jit
def _push_sums(
    pointers, state, rows, stride, places, plan, weights,
    regions_at, region_bytes, weights_at, experts_at, most_rows, num_ranks, num_rows, width,
    RANKS: tl.constexpr, TOP_K: tl.constexpr, KS: tl.constexpr, HAS_NOTES: tl.constexpr,
    COLUMNS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    end = tl.load(plan + 3 * num_ranks - 1)
    share = tl.cdiv(end, num_ranks)
    turn, row = tl.program_id(0) % num_ranks, tl.program_id(0) // num_ranks
    source = (turn * share + row).to(tl.int64)  # [Note: turns]
    if (row < share) & (source < end):
        others = tl.arange(0, RANKS)
        ends = tl.load(plan + 2 * num_ranks + others, mask=others < num_ranks, other=0x7FFFFFFF)
        rank = tl.sum((ends <= source).to(tl.int32), 0)
        target_row = source + tl.load(plan + num_ranks + rank)
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
    own, state, places, ranks, sums, weights, regions_at, region_bytes, weights_at, experts_at, most_rows, num_ranks,
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
