"""Sends tokens to experts on other ranks and back by writing into the memory of these ranks, without the host.

[Note: sizes on the device] Every rank learns how many tokens each rank sends to each other rank (`share_counts`). It
also learns how many copies go to each expert. From these numbers it computes on the device at which row of another
rank's memory its tokens begin, and which rows their copies have there. Tensors have the largest possible number of rows
(`num_rows`), and `offsets` say on the device how many are used. Rows after these are arbitrary.

[Note: overflow] Rows that do not fit are not written, and a bit of `PeerMemory.status` is set on the device. Then all
results of the forward are invalid, and the caller must run it in another way.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_d9d.ops.moe_permute import Permutation, gathered, summed
from lightning_d9d.ops.operator import define
from lightning_d9d.ops.peer_memory import LATE, OVERFLOW, Notes, PeerMemory, peer_memory
from lightning_d9d.ops.peer_words import have_reached
from lightning_d9d.waits import waiting


class PeerPlan(NamedTuple):
    """The destinations of this rank's tokens; all on the device."""

    places: Tensor
    """The rows of each token among those that this rank sends, int32 `[tokens, top_k]`."""

    ranks: Tensor
    """The destination rank of each, int32 `[tokens, top_k]`; `num_ranks` if the token is already sent there."""

    table: Tensor
    """Three numbers for each rank, int32 `[3, num_ranks]`.

    The first is added to a place to get the row on that rank. The second is added to a row received from there to get
    its place. The third is one past the last row received from there."""


def share_counts(
    sent: Tensor, copies: Permutation, num_rows: int, memory: str, triton: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Tell all ranks how many tokens go to each rank, and how many copies to each expert. Collective.

    Args:
        sent: The numbers of tokens, int32 `[num_ranks]`.
        copies: The permutation of this rank's copies, sorted by the experts of all ranks.
        num_rows: The number of copies that each rank has memory for.
        memory: The name of a `PeerMemory`.
        triton: Whether to use kernels.

    Returns:
        `PeerPlan.table`, `Notes.shifts`, and one past the last row of each of this rank's experts, int32.
    """
    return _counts_op(sent, copies.counts, copies.offsets, num_rows, memory, triton)


def peer_dispatch(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    numbers: Tensor,
    shifts: Tensor,
    plan: PeerPlan,
    num_rows: int,
    memory: str,
    triton: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Write each token into the memory of the ranks with its experts, and copy it there for each expert. Collective.

    It is differentiable once, in `x` and `weights`; the backward is collective, too.

    Args:
        x: Shape `[tokens, hidden]`, at most `row_bytes` of the memory's layout a row.
        weights: As `Notes.weights`.
        experts: As `Notes.experts`.
        numbers: As `Notes.numbers`.
        shifts: As `Notes.shifts`.
        plan: The destinations of tokens.
        num_rows: As for `share_counts`.
        memory: As for `share_counts`.
        triton: As for `share_counts`.

    Returns:
        Three tensors. Copies are sorted by this rank's experts and, within an expert, by rank and token:
        `[num_rows, hidden]`. Their weights are `[num_rows]`. The places of the copies of each received token are
        `[layout.num_rows, top_k]`, with `num_rows` if there is none.
    """
    return _dispatch_op(x, weights, experts, numbers, shifts, *plan, num_rows, memory, triton)


def peer_combine(results: Tensor, copies: Tensor, plan: PeerPlan, memory: str, triton: bool) -> Tensor:
    """Write sums of tokens' results into the memory of the ranks of the tokens, and sum there. Collective.

    Sums are in float32 and rounded to the dtype of `results` on both sides. Differentiable once.

    Args:
        results: One result for each row of `peer_dispatch`, shape `[num_rows, hidden]`.
        copies: The places that `peer_dispatch` returned.
        plan: As for `peer_dispatch`.
        memory: As for `peer_dispatch`.
        triton: As for `peer_dispatch`.

    Returns:
        Shape `[tokens, hidden]`.
    """
    return _combine_op(results, copies, *plan, memory, triton)


# In plain torch: the same writes and waits, on the memory of the host


def _share_counts_reference(
    memory: PeerMemory,
    sent: Tensor,
    counts: Tensor,
    ends: Tensor,
    num_rows: int,
    table: Tensor,
    shifts: Tensor,
    offsets: Tensor,
) -> None:
    layout, rank = memory.layout, memory.rank
    n, state, local = layout.num_ranks, memory.state, slice(rank * layout.num_local, (rank + 1) * layout.num_local)
    at = layout.counts_at + ((int(state[0]) + 1) & 1) * layout.counts_bytes
    for other in range(n):
        memory.view(other, at, torch.int32, n, n + len(counts))[rank] = torch.cat([sent, counts])
    _meet_reference(memory)
    tokens, copies = memory.view(rank, at, torch.int32, n, n + len(counts)).split([n, len(counts)], dim=1)
    arrived, departed = tokens.cumsum(0) - tokens, tokens.cumsum(1) - tokens
    last = (arrived + tokens)[:, rank].clamp(max=layout.num_rows)
    table.copy_(torch.stack([(arrived - departed)[rank], (departed - arrived)[:, rank], last]))
    total = copies.sum(0)
    end = total.view(n, -1).cumsum(1).flatten()
    shifts.copy_(end - total + copies[:rank].sum(0) - (ends - counts))
    offsets.copy_(end[local].clamp(max=num_rows))
    most, most_copies = max(int(tokens.sum(0).max()), int(tokens.sum(1).max())), int(end[local].max())
    state[2], state[3] = max(int(state[2]), most), max(int(state[3]), most_copies)
    if most > layout.num_rows or most_copies > num_rows:
        state[1] |= OVERFLOW


def _meet_reference(memory: PeerMemory) -> None:
    n, state = memory.layout.num_ranks, memory.state
    epoch = int(state[0]) + 1
    for other in range(n):
        memory.view(other, 0, torch.int32, n)[memory.rank] = epoch
    if not state[1] & LATE and not have_reached(memory.view(memory.rank, 0, torch.int32, n), epoch, memory.timeout_s):
        state[1] |= LATE
    state[0] = epoch


def _region_views(memory: PeerMemory, rank: int, like: Tensor, wide: torch.dtype, turn: int) -> tuple[Tensor, ...]:
    layout, at = memory.layout, memory.region(turn)
    rows = memory.view(rank, at, like.dtype, layout.num_rows, like.shape[1])
    weights = memory.view(rank, at + layout.weights_at, wide, layout.num_rows, layout.top_k)
    return rows, weights, memory.view(rank, at + layout.copies_at, torch.int32, layout.num_rows, layout.top_k)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _exchange_reference(
    memory: PeerMemory,
    x: Tensor,
    places: Tensor,
    ranks: Tensor,
    table: Tensor,
    copies: Tensor,
    rows: Tensor,
    notes: Notes | None,
) -> None:
    layout, turn = memory.layout, int(memory.state[0]) + 1
    for rank in range(layout.num_ranks):
        targets = places + table[0, rank]
        tokens, ks = ((ranks == rank) & (targets < layout.num_rows)).nonzero(as_tuple=True)
        targets = targets[tokens, ks].long()
        wide = torch.float32 if notes is None else _wide(notes.weights.dtype)
        to_rows, to_weights, to_copies = _region_views(memory, rank, x, wide, turn)
        to_rows[targets] = x[tokens]
        if notes is not None:
            is_there = notes.experts[tokens] // layout.num_local == rank
            there = (notes.numbers + notes.shifts[notes.experts])[tokens].clamp(max=len(rows))
            to_weights[targets] = notes.weights[tokens].to(wide)
            to_copies[targets] = torch.where(is_there, there, len(rows))
        if rank == memory.rank:
            _spread(memory, targets, turn, copies, rows, None if notes is None else notes.of_rows)


def _spread(
    memory: PeerMemory, sources: Tensor, turn: int, copies: Tensor, rows: Tensor, of_rows: Tensor | None
) -> None:
    """Copy received rows for this rank's experts, and with `of_rows` their weights and the places of copies."""
    wide = torch.float32 if of_rows is None else _wide(of_rows.dtype)
    region, weights, places = _region_views(memory, memory.rank, rows, wide, turn)
    if of_rows is not None:
        copies[sources] = places[sources]
    tokens, ks = (copies[sources] < len(rows)).nonzero(as_tuple=True)
    tokens = sources[tokens]
    targets = copies[tokens, ks].long()
    rows[targets] = region[tokens]
    if of_rows is not None:
        of_rows[targets] = weights[tokens, ks].to(of_rows.dtype)


def _take_rest_reference(
    memory: PeerMemory, table: Tensor, copies: Tensor, rows: Tensor, of_rows: Tensor | None
) -> None:
    if of_rows is not None:
        copies[int(table[2, -1]) :] = len(rows)
    sources = torch.arange(int(table[2, -1]), device=table.device)
    begin, end = [0, *table[2].tolist()][memory.rank : memory.rank + 2]
    sources = sources[(sources < begin) | (sources >= end)]
    _spread(memory, sources, int(memory.state[0]), copies, rows, of_rows)


def _push_sums_reference(
    memory: PeerMemory, rows: Tensor, places: Tensor, table: Tensor, weights: Tensor | None
) -> None:
    turn = int(memory.state[0]) + 1
    sums = summed(rows, places, None, len(rows))
    first = 0
    for rank, end in enumerate(table[2].tolist()):
        sources = torch.arange(first, end, device=table.device)
        targets = sources + table[1, rank]
        sources, targets = sources[targets < memory.layout.num_rows], targets[targets < memory.layout.num_rows]
        wide = torch.float32 if weights is None else _wide(weights.dtype)
        to_rows, to_weights, _ = _region_views(memory, rank, rows, wide, turn)
        to_rows[targets] = sums[sources]
        if weights is not None:
            to_weights[targets] = gathered(weights, places[sources], len(weights)).to(wide)
        first = end


def _take_sums_reference(
    memory: PeerMemory, places: Tensor, ranks: Tensor, sums: Tensor, weights: Tensor | None
) -> None:
    wide = torch.float32 if weights is None else _wide(weights.dtype)
    region, of_weights, _ = _region_views(memory, memory.rank, sums, wide, int(memory.state[0]))
    most = memory.layout.num_rows
    places = torch.where(ranks < memory.layout.num_ranks, places, most)
    sums.copy_(summed(region, places, None, most))
    if weights is not None:
        weights.copy_(gathered(of_weights, places, most).sum(1))


class _Reference:
    """The functions of `lightning_d9d.ops.kernels.peer_exchange`, in plain torch."""

    share_counts = staticmethod(_share_counts_reference)
    meet = staticmethod(_meet_reference)
    exchange = staticmethod(_exchange_reference)
    take_rest = staticmethod(_take_rest_reference)
    push_sums = staticmethod(_push_sums_reference)
    take_sums = staticmethod(_take_sums_reference)


def _functions(triton: bool) -> type[_Reference] | ModuleType:
    if not triton:
        return _Reference
    from lightning_d9d.ops.kernels import peer_exchange

    return peer_exchange


# The operators


def _new_counts(
    sent: Tensor, counts: Tensor, ends: Tensor, num_rows: int, memory: str, triton: bool
) -> tuple[Tensor, Tensor, Tensor]:
    num_ranks, num_experts = sent.shape[0], counts.shape[0]
    return sent.new_empty(3, num_ranks), counts.new_empty(num_experts), counts.new_empty(num_experts // num_ranks)


def _share_counts(
    sent: Tensor, counts: Tensor, ends: Tensor, num_rows: int, memory: str, triton: bool
) -> tuple[Tensor, Tensor, Tensor]:
    made, peers = _new_counts(sent, counts, ends, num_rows, memory, triton), peer_memory(memory)
    with waiting():
        _functions(triton).share_counts(peers, sent.contiguous(), counts, ends, num_rows, *made)
    peers.mark_counted()
    return made


def _new_copies(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    numbers: Tensor,
    shifts: Tensor,
    places: Tensor,
    ranks: Tensor,
    table: Tensor,
    num_rows: int,
    memory: str,
    triton: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    layout = peer_memory(memory).layout
    return (
        x.new_empty(num_rows, x.shape[1]),
        weights.new_empty(num_rows),
        places.new_empty(layout.num_rows, layout.top_k),
    )


def _dispatch(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    numbers: Tensor,
    shifts: Tensor,
    places: Tensor,
    ranks: Tensor,
    table: Tensor,
    num_rows: int,
    memory: str,
    triton: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    made = _new_copies(x, weights, experts, numbers, shifts, places, ranks, table, num_rows, memory, triton)
    rows, of_rows, copies = made
    peers, functions = peer_memory(memory), _functions(triton)
    notes = Notes(weights.contiguous(), experts.contiguous(), numbers, shifts, of_rows)
    with waiting():
        functions.exchange(peers, x.contiguous(), places, ranks, table, copies, rows, notes)
        functions.meet(peers)
    functions.take_rest(peers, table, copies, rows, of_rows)
    return made


def _keep_dispatch(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, weights, *_, places, ranks, table, _, ctx.memory, ctx.triton = inputs
    # Not saved in autograd's way; see `_setup_context` of `moe_permute`.
    ctx.plan, ctx.copies, ctx.dtype = (places, ranks, table), output[2], weights.dtype


def _dispatch_backward(ctx: Any, of_rows: Tensor, of_weights: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    gradients = _return_op(of_rows, of_weights, ctx.copies, *ctx.plan, ctx.memory, ctx.triton)
    x, weights = (each if needs else None for each, needs in zip(gradients, ctx.needs_input_grad, strict=False))
    return x, weights, *[None] * 9


def _new_sums(
    rows: Tensor,
    weights: Tensor,
    copies: Tensor,
    places: Tensor,
    ranks: Tensor,
    table: Tensor,
    memory: str,
    triton: bool,
) -> tuple[Tensor, Tensor]:
    return rows.new_empty(places.shape[0], rows.shape[1]), weights.new_empty(places.shape)


def _return(
    rows: Tensor,
    weights: Tensor,
    copies: Tensor,
    places: Tensor,
    ranks: Tensor,
    table: Tensor,
    memory: str,
    triton: bool,
) -> tuple[Tensor, Tensor]:
    """Return the sums of copies' gradients, and those of weights."""
    sums, of_weights = _new_sums(rows, weights, copies, places, ranks, table, memory, triton)
    peers, functions = peer_memory(memory), _functions(triton)
    with waiting():
        functions.push_sums(peers, rows.contiguous(), copies, table, weights.contiguous())
        functions.meet(peers)
    functions.take_sums(peers, places, ranks, sums, of_weights)
    return sums, of_weights


def _new_tokens(
    results: Tensor, copies: Tensor, places: Tensor, ranks: Tensor, table: Tensor, memory: str, triton: bool
) -> Tensor:
    return results.new_empty(places.shape[0], results.shape[1])


def _combine(
    results: Tensor, copies: Tensor, places: Tensor, ranks: Tensor, table: Tensor, memory: str, triton: bool
) -> Tensor:
    sums = _new_tokens(results, copies, places, ranks, table, memory, triton)
    peers, functions = peer_memory(memory), _functions(triton)
    with waiting():
        functions.push_sums(peers, results.contiguous(), copies, table, None)
        functions.meet(peers)
    functions.take_sums(peers, places, ranks, sums, None)
    return sums


def _keep_combine(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    results, copies, *plan, ctx.memory, ctx.triton = inputs
    ctx.plan, ctx.copies, ctx.num_rows = plan, copies, len(results)


def _combine_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    rows = _send_op(gradient, ctx.copies, *ctx.plan, ctx.num_rows, ctx.memory, ctx.triton)
    return rows, *[None] * 6


def _new_gradients(
    x: Tensor, copies: Tensor, places: Tensor, ranks: Tensor, table: Tensor, num_rows: int, memory: str, triton: bool
) -> Tensor:
    return x.new_empty(num_rows, x.shape[1])


def _send(
    x: Tensor, copies: Tensor, places: Tensor, ranks: Tensor, table: Tensor, num_rows: int, memory: str, triton: bool
) -> Tensor:
    """Return copies of tokens' gradients for each result."""
    rows = _new_gradients(x, copies, places, ranks, table, num_rows, memory, triton)
    peers, functions = peer_memory(memory), _functions(triton)
    with waiting():
        functions.meet(peers)  # so that ranks begin together: [Note: what runs at a time] of the kernels
        functions.exchange(peers, x.contiguous(), places, ranks, table, copies, rows, None)
        functions.meet(peers)
    functions.take_rest(peers, table, copies, rows, None)
    return rows


_PLAN = "Tensor places, Tensor ranks, Tensor table"
_counts_op = define(
    "peer_counts",
    "(Tensor sent, Tensor counts, Tensor ends, int num_rows, str memory, bool triton) -> (Tensor, Tensor, Tensor)",
    _share_counts,
    _new_counts,
)
_dispatch_op = define(
    "peer_dispatch",
    f"(Tensor x, Tensor weights, Tensor experts, Tensor numbers, Tensor shifts, {_PLAN}, int num_rows, str memory, "
    "bool triton) -> (Tensor, Tensor, Tensor)",
    _dispatch,
    _new_copies,
    setup_context=_keep_dispatch,
    backward=_dispatch_backward,
)
_combine_op = define(
    "peer_combine",
    f"(Tensor results, Tensor copies, {_PLAN}, str memory, bool triton) -> Tensor",
    _combine,
    _new_tokens,
    setup_context=_keep_combine,
    backward=_combine_backward,
)
_return_op = define(
    "peer_return",
    f"(Tensor rows, Tensor weights, Tensor copies, {_PLAN}, str memory, bool triton) -> (Tensor, Tensor)",
    _return,
    _new_sums,
)
_send_op = define(
    "peer_send",
    f"(Tensor x, Tensor copies, {_PLAN}, int num_rows, str memory, bool triton) -> Tensor",
    _send,
    _new_gradients,
)
