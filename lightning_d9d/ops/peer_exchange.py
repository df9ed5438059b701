"""Sends tokens to experts on other ranks and back by writing into the memory of these ranks, without the host.

[Note: sizes on the device] Every rank learns how many tokens each rank sends to each other rank (`share_counts`). From
these numbers it computes on the device at which row of another rank's memory its tokens begin. Tensors have the largest
possible number of rows (`num_rows`), and `offsets` say on the device how many are used. Rows after these are arbitrary.

[Note: overflow] Rows that do not fit are not written, and a bit of `PeerMemory.status` is set on the device. Then all
results of the forward are invalid, and the caller must run it in another way.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_d9d.ops.moe_permute import gathered, sort_by_expert, summed
from lightning_d9d.ops.operator import define
from lightning_d9d.ops.peer_memory import LATE, OVERFLOW, PeerMemory, peer_memory
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


def share_counts(counts: Tensor, memory: str, triton: bool) -> Tensor:
    """Return `PeerPlan.table` from the numbers of tokens sent to each rank, int32 `[num_ranks]`. Collective."""
    return _counts_op(counts, memory, triton)


def peer_dispatch(
    x: Tensor, weights: Tensor, experts: Tensor, plan: PeerPlan, num_rows: int, memory: str, triton: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Write each token into the memory of the ranks with its experts, and copy it there for each expert. Collective.

    It is differentiable once, in `x` and `weights`; the backward is collective, too.

    Args:
        x: Shape `[tokens, hidden]`, at most `row_bytes` of the memory's layout a row.
        weights: Shape `[tokens, top_k]`.
        experts: Their numbers among the experts of all ranks, shape `[tokens, top_k]`.
        plan: The destinations of tokens.
        num_rows: The number of copies that this rank has memory for.
        memory: The name of a `PeerMemory`.
        triton: Whether to use kernels.

    Returns:
        Four tensors. Copies are sorted by this rank's experts and, within an expert, by rank and token:
        `[num_rows, hidden]`. Their weights are `[num_rows]`. The places of the copies of each received token are
        `[layout.num_rows, top_k]`, with `num_rows` if there is none. The last result has one past the last row of each
        of this rank's experts, int32.
    """
    return _dispatch_op(x, weights, experts, *plan, num_rows, memory, triton)


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


def _share_counts_reference(memory: PeerMemory, counts: Tensor, plan: Tensor) -> None:
    layout, rank = memory.layout, memory.rank
    n, state = layout.num_ranks, memory.state
    at = layout.counts_at + ((int(state[0]) + 1) & 1) * 4 * n * n
    for other in range(n):
        memory.view(other, at, torch.int32, n, n)[rank] = counts
    _meet_reference(memory)
    sent = memory.view(rank, at, torch.int32, n, n)
    arrived, departed = sent.cumsum(0) - sent, sent.cumsum(1) - sent
    ends = (arrived + sent)[:, rank].clamp(max=layout.num_rows)
    plan.copy_(torch.stack([(arrived - departed)[rank], (departed - arrived)[:, rank], ends]))
    most = max(int(sent.sum(0).max()), int(sent.sum(1).max()))
    state[2] = max(int(state[2]), most)
    if most > layout.num_rows:
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
    return rows, weights, memory.view(rank, at + layout.experts_at, torch.int32, layout.num_rows, layout.top_k)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _push_reference(
    memory: PeerMemory,
    x: Tensor,
    places: Tensor,
    ranks: Tensor,
    plan: Tensor,
    weights: Tensor | None,
    experts: Tensor | None,
) -> None:
    turn = int(memory.state[0]) + 1
    for rank in range(memory.layout.num_ranks):
        rows = places + plan[0, rank]
        tokens, ks = ((ranks == rank) & (rows < memory.layout.num_rows)).nonzero(as_tuple=True)
        rows = rows[tokens, ks].long()
        wide = torch.float32 if weights is None else _wide(weights.dtype)
        to_rows, to_weights, to_experts = _region_views(memory, rank, x, wide, turn)
        to_rows[rows] = x[tokens]
        if weights is not None and experts is not None:
            to_weights[rows], to_experts[rows] = weights[tokens].to(wide), experts[tokens].int()


def _take_notes_reference(
    memory: PeerMemory, plan: Tensor, first_expert: int, weights: Tensor, experts: Tensor
) -> None:
    num_local = memory.layout.num_local
    like = weights.new_empty(0, 0)
    _, from_weights, from_experts = _region_views(memory, memory.rank, like, weights.dtype, int(memory.state[0]))
    is_row = torch.arange(len(weights), device=plan.device).unsqueeze(1) < plan[2, -1]
    own = from_experts - first_expert
    weights.copy_(torch.where(is_row, from_weights, 0.0))
    experts.copy_(torch.where(is_row & (own >= 0) & (own < num_local), own, num_local))


def _limit_places_reference(
    memory: PeerMemory, experts: Tensor, places: Tensor, offsets: Tensor, num_rows: int
) -> None:
    most = int(offsets.max()) if len(offsets) else 0
    memory.state[3] = max(int(memory.state[3]), most)
    if most > num_rows:
        memory.state[1] |= OVERFLOW
    places.masked_fill_(experts >= memory.layout.num_local, num_rows).clamp_(max=num_rows)
    offsets.clamp_(max=num_rows)


def _take_reference(
    memory: PeerMemory, plan: Tensor, places: Tensor, rows: Tensor, weights: Tensor | None, of_rows: Tensor | None
) -> None:
    region, _, _ = _region_views(memory, memory.rank, rows, torch.float32, int(memory.state[0]))
    sources, ks = (places < len(rows)).nonzero(as_tuple=True)
    rows[places[sources, ks].long()] = region[sources]
    if weights is not None and of_rows is not None:
        of_rows[places[sources, ks].long()] = weights[sources, ks].to(of_rows.dtype)


def _push_sums_reference(
    memory: PeerMemory, rows: Tensor, places: Tensor, plan: Tensor, weights: Tensor | None
) -> None:
    turn = int(memory.state[0]) + 1
    sums = summed(rows, places, None, len(rows))
    first = 0
    for rank, end in enumerate(plan[2].tolist()):
        sources = torch.arange(first, end, device=plan.device)
        targets = sources + plan[1, rank]
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
    push = staticmethod(_push_reference)
    take_notes = staticmethod(_take_notes_reference)
    limit_places = staticmethod(_limit_places_reference)
    take = staticmethod(_take_reference)
    push_sums = staticmethod(_push_sums_reference)
    take_sums = staticmethod(_take_sums_reference)


def _functions(triton: bool) -> type[_Reference] | ModuleType:
    if not triton:
        return _Reference
    from lightning_d9d.ops.kernels import peer_exchange

    return peer_exchange


# The operators


def _new_table(counts: Tensor, memory: str, triton: bool) -> Tensor:
    return counts.new_empty(3, counts.shape[0])


def _share_counts(counts: Tensor, memory: str, triton: bool) -> Tensor:
    table = _new_table(counts, memory, triton)
    with waiting():
        _functions(triton).share_counts(peer_memory(memory), counts.contiguous(), table)
    return table


def _new_copies(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    places: Tensor,
    ranks: Tensor,
    table: Tensor,
    num_rows: int,
    memory: str,
    triton: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    layout = peer_memory(memory).layout
    return (
        x.new_empty(num_rows, x.shape[1]),
        weights.new_empty(num_rows),
        places.new_empty(layout.num_rows, layout.top_k),
        places.new_empty(layout.num_local),
    )


def _dispatch(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    places: Tensor,
    ranks: Tensor,
    table: Tensor,
    num_rows: int,
    memory: str,
    triton: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    peers, functions = peer_memory(memory), _functions(triton)
    layout, x = peers.layout, x.contiguous()
    with waiting():
        functions.push(peers, x, places, ranks, table, weights.contiguous(), experts.contiguous())
        functions.meet(peers)
    own = weights.new_empty(layout.num_rows, layout.top_k, dtype=_wide(weights.dtype))
    own_experts = places.new_empty(own.shape)
    functions.take_notes(peers, table, peers.rank * layout.num_local, own, own_experts)
    copies = sort_by_expert(own_experts, layout.num_local + 1)
    of_tokens, offsets = copies.places, copies.offsets[:-1].clone()
    functions.limit_places(peers, own_experts, of_tokens, offsets, num_rows)
    rows, of_rows = x.new_empty(num_rows, x.shape[1]), weights.new_empty(num_rows)
    functions.take(peers, table, of_tokens, rows, own, of_rows)
    return rows, of_rows, of_tokens, offsets


def _keep_dispatch(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, weights, _, places, ranks, table, _, ctx.memory, ctx.triton = inputs
    # Not saved in autograd's way; see `_setup_context` of `moe_permute`.
    ctx.plan, ctx.copies, ctx.dtype = (places, ranks, table), output[2], weights.dtype


def _dispatch_backward(ctx: Any, of_rows: Tensor, of_weights: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    gradients = _return_op(of_rows, of_weights, ctx.copies, *ctx.plan, ctx.memory, ctx.triton)
    x, weights = (each if needs else None for each, needs in zip(gradients, ctx.needs_input_grad, strict=False))
    return x, weights, *[None] * 7


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
        functions.push(peers, x.contiguous(), places, ranks, table, None, None)
        functions.meet(peers)
    functions.take(peers, table, copies, rows, None, None)
    return rows


_PLAN = "Tensor places, Tensor ranks, Tensor table"
_counts_op = define("peer_counts", "(Tensor counts, str memory, bool triton) -> Tensor", _share_counts, _new_table)
_dispatch_op = define(
    "peer_dispatch",
    f"(Tensor x, Tensor weights, Tensor experts, {_PLAN}, int num_rows, str memory, bool triton) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
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
