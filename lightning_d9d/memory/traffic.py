"""Bytes that a rank sends in a step, by kind of message and by destination.

[Note: what is sent] To gather or scatter a tensor, each of n ranks in a ring sends (n - 1)/n of it. An all-reduce sends
twice as much. Tokens go once to each rank with some of their experts, and come back; so do their gradients. Indices and
weights of the experts go along in float32, and gradients of the weights come back. Before that, each rank sends every
other rank the numbers of tokens and copies in int64. With peer dispatch these are numbers of tokens in int32, and the
host waits for nothing. Ranks of tensor parallelism gather the tokens of attention, of a dense MLP and of the head. They
also gather the gradients of scattered tensors. They scatter as often as they gather, and gather some numbers of each
loss.

[Note: numbers of a step] Ranks with other tokens sum the weight of the loss, in float64. With those of a pipeline they
sum loss and weight. The square of the norm is summed over each set of ranks that share gradients, and over the
pipeline. Sets that are the same send once. Tokens of experts are counted in int64, in one message for all layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from lightning_d9d.memory.copies import gathers, sum_width
from lightning_d9d.memory.layers import LayerOfRank
from lightning_d9d.memory.rank import RankModel
from lightning_d9d.memory.spread import Cut, Part, Share
from lightning_d9d.mesh import Axis

NUMBERS_OF_A_LOSS = 2
"""Numbers for each token that ranks with parts of the vocabulary exchange."""
_WIDE = 4
_FLAG = 4
"""Bytes that tell another rank that a row has been written into its memory."""
_MATRICES_OF_EXPERTS = 2
"""Matrices of a layer of experts: gate and up, and down."""


class Sent(NamedTuple):
    """Messages of one kind to the same ranks, in a step."""

    kind: str
    """One of "all_gather", "reduce_scatter", "all_reduce", "all_to_all" or "point_to_point"."""
    what: str
    """One of "weights", "gradients", "tokens to experts", "activations", "numbers"."""
    axis: str
    """The axis of the mesh along which it is sent."""
    num_ranks: int
    span: int
    """The number of consecutive ranks from the first to the last of them."""
    num_bytes: float
    """The bytes that this rank sends."""
    num_messages: int
    num_waits: int = 0
    """Times that the host waits for the sizes of messages from other ranks."""

    @property
    def is_ring(self) -> bool:
        """True if each rank sends to the next one alone."""
        return self.kind != "all_to_all"


def share_sent(num_ranks: int) -> float:
    """Return the share of a tensor that each rank of a ring sends to gather or scatter it. Local."""
    return (num_ranks - 1) / num_ranks


def traffic(model: RankModel, rank: int, *, clips: bool = True) -> list[Sent]:
    """List the messages of a pipeline rank in a step. Local.

    Args:
        model: The run.
        rank: A pipeline rank.
        clips: Whether gradients are clipped by their norm.
    """
    held = model.held(rank)
    found = [
        *of_weights(model, held),
        *_of_tokens(model, rank),
        *_of_pipeline(model, rank),
        *_of_numbers(model, held, clips=clips),
    ]
    return [each for each in found if each.num_ranks > 1 and each.num_bytes > 0]


def by_kind(sent: Sequence[Sent]) -> dict[str, float]:
    """Sum bytes by kind. Local."""
    sums: dict[str, float] = {}
    for each in sent:
        sums[each.kind] = sums.get(each.kind, 0.0) + each.num_bytes
    return sums


def of_weights(model: RankModel, held: Iterable[Share]) -> Iterator[Sent]:
    """Yield the messages of weights and their gradients. Local."""
    mesh = model.mesh
    inner = mesh.tensor_parallel * mesh.context_parallel_replicate
    shards = mesh.data_parallel_shard * mesh.context_parallel_shard
    copies = mesh.data_parallel_replicate * mesh.context_parallel_replicate
    for share in held:
        wide = sum_width(model, share)
        is_apart = share.weight.cut is Cut.EXPERTS and model.spread.experts_are_apart()
        axis, span = (
            (Axis.EP_FSDP, mesh.expert_parallel * share.num_shards) if is_apart else (Axis.DP_CP_SHARD, shards * inner)
        )
        if share.is_unit:
            ring, times = share.num_padded * share_sent(share.num_shards), gathers(model, share)
            yield Sent("all_gather", "weights", axis, share.num_shards, span, times * ring * share.width, times)
            if share.weight.is_trained:
                yield Sent("reduce_scatter", "gradients", axis, share.num_shards, span, ring * wide, 1)
        if not share.weight.is_trained:
            continue
        groups = [share.num_copies]
        if share.is_unit and not is_apart:
            groups = [copies, share.num_copies // copies]  # FSDP2's own, and afterwards those of tensor ranks
        flags = 0 if share.is_unit else 1
        for place, num in enumerate(groups):
            sums = 2 * (share.numel + flags) * wide * share_sent(num)
            of_sums = (Axis.TP, mesh.tensor_parallel) if place else (Axis.DP_REPLICATE, model.spread.num_ranks)
            yield Sent("all_reduce", "gradients", of_sums[0], num, of_sums[1], sums, 1)


def _of_numbers(model: RankModel, held: Sequence[Share], *, clips: bool) -> Iterator[Sent]:
    """Yield the sums of single numbers. [Note: numbers of a step]."""
    mesh, pp, tp = model.mesh, model.mesh.pipeline_parallel, model.mesh.tensor_parallel
    stage = mesh.world_size // pp
    sums = [("batch", stage // tp, stage, 8), ("batch", stage // tp, stage, 16), (Axis.PP, pp, mesh.world_size, 16)]
    experts = [share.weight.shape[0] for share in held if share.weight.cut is Cut.EXPERTS]
    if model.counts_experts and experts:
        sums.append(("stage", stage, stage, 8 * sum(experts) // _MATRICES_OF_EXPERTS))
    if clips:
        for groups in dict.fromkeys(_groups_of_norm(model, share) for share in held):
            sums += [("gradients", num, num * apart, 8) for num, apart in groups]
        sums.append((Axis.PP, pp, mesh.world_size, 8))
    for axis, num, span, size in sums:
        yield Sent("all_reduce", "numbers", axis, num, span, 2 * size * share_sent(num), 1)


def _groups_of_norm(model: RankModel, share: Share) -> tuple[tuple[int, int], ...]:
    """Return the groups of ranks with other parts of a gradient: their number, and how far one is from the next."""
    mesh, found = model.mesh, set()
    is_apart = share.weight.cut is Cut.EXPERTS and model.spread.experts_are_apart()
    if is_apart:
        found.add((mesh.expert_parallel, 1))
    elif share.weight.cut in (Cut.TENSOR, Cut.HEADS):
        found.add((mesh.tensor_parallel, 1))
    if share.is_unit:
        inner = mesh.tensor_parallel * mesh.context_parallel_replicate
        found.add((share.num_shards, mesh.expert_parallel if is_apart else inner))
    return tuple((num, apart) for num, apart in sorted(found) if num > 1)


def _of_tokens(model: RankModel, rank: int) -> Iterator[Sent]:
    """Yield the messages of activations, in all microbatches."""
    for stage in model.stages(rank).values():
        for layer in stage.layers:
            yield from of_layer(model, layer, model.num_microbatches)
        if stage.after is not None:
            yield from of_head(model, model.num_microbatches)


def of_layer(model: RankModel, layer: LayerOfRank, number: int) -> Iterator[Sent]:
    """Yield the messages of a layer's tokens in a number of microbatches. Local."""
    mesh = model.mesh
    tp, ep = mesh.tensor_parallel, mesh.expert_parallel
    cp = mesh.context_parallel_shard * mesh.context_parallel_replicate
    again = model.parallel.recompute in ("full", "offload")
    num_experts = next((share.weight.shape[0] for share in layer.shares if share.weight.cut is Cut.EXPERTS), 0)
    width = layer.shares[0].weight.dtype.itemsize
    tokens = model.share_of_row * model.tokens
    hidden = layer.costs.output_bytes / tokens
    if ep > 1 and layer.costs.dispatch_bytes:
        top_k = layer.costs.dispatch_bytes / layer.costs.output_bytes
        rows = tokens * min(top_k, ep) * share_sent(ep)
        yield _to_experts(model, rows, hidden, num_experts, round(top_k), number * (2 if again else 1), number)
    if tp > 1:
        times = 2 * (1 if num_experts else 2)
        ring = number * times * tp * tokens * hidden * share_sent(tp)
        yield Sent("all_gather", "activations", Axis.TP, tp, tp, ring * (1.5 if again else 1), number * times)
        yield Sent("reduce_scatter", "activations", Axis.TP, tp, tp, ring, number * times)
    if cp > 1:
        yield from _of_context(model, layer.shares, tokens * tp, width, cp, number)


def _to_experts(
    model: RankModel, rows: float, hidden: float, num_experts: int, top_k: int, forwards: int, backwards: int
) -> Sent:
    """Return the messages that send tokens to experts of other ranks and back.

    Args:
        model: The run.
        rows: Rows of tokens that a rank sends in a microbatch.
        hidden: Bytes of a token.
        num_experts: The experts of all ranks.
        top_k: The experts of a token.
        forwards: The number of dispatches. A recomputation does not combine again.
        backwards: The number of backwards, and of combines.
    """
    ep = model.mesh.expert_parallel
    if model.writes_to_peers:
        counts = (ep + num_experts) * 4 * (ep - 1)  # of a rank's tokens and copies, in int32
        once = rows * (hidden + 2 * top_k * _WIDE + _FLAG) + counts
        back = rows * (3 * hidden + top_k * _WIDE + _FLAG)
        of_forward, of_backward, waits = 2, 3, 0
    else:
        once = rows * (hidden + 2 * top_k * _WIDE) + 2 * ep * 8 * (ep - 1)
        back = rows * (3 * hidden + 2 * top_k * _WIDE)
        of_forward, of_backward, waits = 3, 3, forwards
    sends, messages = forwards * once + backwards * back, forwards * of_forward + backwards * of_backward
    return Sent("all_to_all", "tokens to experts", "ep", ep, ep, sends, messages, waits)


def of_head(model: RankModel, number: int) -> Iterator[Sent]:
    """Yield the messages of the head and its loss in a number of microbatches. Local."""
    tp = model.mesh.tensor_parallel
    if tp == 1:
        return
    tokens = model.share_of_row * model.tokens
    hidden = model.costs.layers[0].output_bytes / model.tokens
    ring = number * 2 * tp * tokens * hidden * share_sent(tp)
    losses = number * NUMBERS_OF_A_LOSS * _WIDE * tokens * tp * (tp - 1)
    yield Sent("all_gather", "activations", Axis.TP, tp, tp, ring + losses, 4 * number)
    yield Sent("reduce_scatter", "activations", Axis.TP, tp, tp, ring, 2 * number)


def _of_context(
    model: RankModel, shares: Sequence[Share], tokens: float, width: int, cp: int, number: int
) -> Iterator[Sent]:
    """Yield the messages of a layer under context parallelism.

    With "gather", keys and values are sent in forward and backward, then all their gradients in float32. With "ring",
    both go round the ring, and their gradients in the backward. With "heads", queries, keys, values, the result and
    their gradients are sent.
    """
    tp = model.mesh.tensor_parallel
    cut = [share.gathered[0] for share in shares if share.weight.cut is Cut.HEADS and len(share.gathered) > 1]
    if not cut:
        return
    queries = max(
        share.gathered[0]
        for share in shares
        if share.weight.part is Part.ATTENTION and share.weight.cut is Cut.TENSOR and share.weight.dim == 0
    )
    keys, wide, span = tokens * sum(cut), max(_WIDE, width), cp * tp
    match model.parallel.context:
        case "gather":
            yield Sent("all_gather", "activations", Axis.CP, cp, span, number * 2 * width * keys * (cp - 1), 2 * number)
            yield Sent("reduce_scatter", "activations", Axis.CP, cp, span, number * wide * keys * (cp - 1), number)
        case "ring":
            sends = number * (2 * width * keys * (cp - 1) + wide * keys * cp)
            yield Sent("point_to_point", "activations", Axis.CP, cp, span, sends, number * (3 * cp - 2))
        case "heads":
            sends = number * 2 * width * (2 * tokens * queries + keys) * share_sent(cp)
            yield Sent("all_to_all", "activations", Axis.CP, cp, span, sends, 8 * number)


def _of_pipeline(model: RankModel, rank: int) -> Iterator[Sent]:
    """Yield hidden states to the next stage and gradients to the previous one, if these are on other ranks."""
    pp = model.mesh.pipeline_parallel
    placement = model.schedule.placement(pp)
    each = model.costs.layers[0].output_bytes * model.share_of_row
    num = 0
    for stage in model.schedule.stages_of(rank, pp):
        for other in (stage - 1, stage + 1):
            num += 0 <= other < len(placement) and placement[other] != rank
    number = num * model.num_microbatches
    span = math.ceil(model.mesh.world_size / pp) + 1
    yield Sent("point_to_point", "activations", Axis.PP, pp, span, number * each, number)
