"""The layers of a rank's stages: their costs for a microbatch, and the parts of their weights on the rank.

A plan builds them for ranks that do not exist, and a fit for its own rank. Both use this code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from typing import NamedTuple

import torch

from lightning_d9d.memory.spread import Cut, Part, Share, Weight
from lightning_d9d.ops.linear_cross_entropy_chunks import ChunkOptions, rows_at_once
from lightning_d9d.ops.peer_memory import SPARE_ROOM, PeerLayout
from lightning_d9d.parallel.config import ParallelConfig
from lightning_d9d.schedule.layers import LayerCosts, ModelCosts, Moment

_UNSCALED = ("weight_bytes", "copied_bytes", "linear_adapters", "experts_adapters")


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerOfRank:
    """A layer on a rank: its costs for a microbatch, and its parts of weights. Equal layers of a plan are one."""

    costs: LayerCosts
    """Costs of all rows of a microbatch, on this rank."""
    shares: tuple[Share, ...]
    recompute: str = "none"
    is_recomputed: bool = False
    """True if the layer keeps only its input."""
    wire_bytes: float = 0.0
    """Bytes of tokens in transit to experts of other ranks and back."""
    peer_bytes: float = 0.0
    """Bytes that other ranks write such tokens to, outside of torch's allocator; layers share them."""

    @cached_property
    def kept(self) -> float:
        """Bytes kept from forward to backward."""
        costs = self.costs
        match self.recompute:
            case "selective":
                return costs.activation_bytes if costs.selective_bytes is None else costs.selective_bytes
            case "attention":
                return costs.activation_bytes if costs.attention_bytes is None else costs.attention_bytes
            case "offload":
                return 0.0
        return costs.output_bytes if self.is_recomputed else costs.activation_bytes

    @cached_property
    def forward_peak(self) -> float:
        """The most bytes while its forward runs, with the kept ones."""
        return max(self.costs.forward_peak_bytes + self.wire_bytes, self.costs.activation_bytes)

    @property
    def moments(self) -> tuple[Moment, ...]:
        """The moments of the backward; if they are unknown, one moment with all gradients of weights."""
        given = self.costs.backward_moments
        return given or (Moment(0.0, self.costs.weight_bytes),)


@dataclass(frozen=True, kw_only=True)
class StageOfRank:
    """A stage on a rank."""

    layers: Sequence[LayerOfRank]
    before: LayerOfRank | None = None
    after: LayerOfRank | None = None

    @property
    def parts(self) -> list[LayerOfRank]:
        """All layers in the order of the forward."""
        return [*([self.before] if self.before else []), *self.layers, *([self.after] if self.after else [])]


class StageShares(NamedTuple):
    """The parts of a stage's weights on a rank."""

    layers: Sequence[tuple[Share, ...]]
    before: tuple[Share, ...] | None = None
    """Weights before the layers; None if another stage has them."""
    after: tuple[Share, ...] | None = None
    """Weights behind the layers; None if another stage has them."""


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """A microbatch as a rank computes it."""

    costs: ModelCosts
    """Costs of one row of `tokens` tokens, on one rank with whole layers."""
    tokens: int
    rows: float
    """Rows, divided by the number of ranks that share their tokens."""
    recompute: str = "none"
    tensor_parallel: int = 1
    expert_parallel: int = 1
    expert_capacity: float | None = None
    """Room for copies of tokens with peer dispatch, as a multiple of an even share; None: all-to-all."""
    expert_load: float = 1.0
    """The copies of tokens that the experts of a rank get in each layer, as a multiple of an even share."""

    def stage(self, layers: range, shares: StageShares) -> StageOfRank:
        """Return the stage with these layers. Local."""
        own = [
            self._block(self.costs.layers[index], held, self._recomputes(place))
            for place, (index, held) in enumerate(zip(layers, shares.layers, strict=True))
        ]
        before = after = None
        if shares.before is not None:
            before = LayerOfRank(costs=scaled(self.costs.before, self.rows), shares=shares.before)
        if shares.after is not None:
            after = LayerOfRank(costs=self._head(shares.after, shares.before or ()), shares=shares.after)
        return StageOfRank(layers=own, before=before, after=after)

    @cached_property
    def _block(self) -> Callable[[LayerCosts, tuple[Share, ...], bool], LayerOfRank]:
        @cache
        def block(costs: LayerCosts, held: tuple[Share, ...], is_recomputed: bool) -> LayerOfRank:
            return LayerOfRank(
                costs=self._layer(costs, held),
                shares=held,
                recompute=self.recompute,
                is_recomputed=is_recomputed,
                wire_bytes=self._wire(costs),
                peer_bytes=self._peers(costs, held),
            )

        return block

    @cached_property
    def _recomputes(self) -> Callable[[int], bool]:
        """Returns whether the block at a place in its stage keeps only its input."""
        if self.recompute in ("none", "selective", "attention"):
            return lambda place: False
        return ParallelConfig(recompute=self.recompute).recomputes_block

    def _layer(self, costs: LayerCosts, held: Sequence[Share]) -> LayerCosts:
        """Return a layer's costs on this rank, with gathered tokens or frozen weights if there are any."""
        tp, weights = self.tensor_parallel, [share.weight for share in held]
        base = [each for each in weights if each.part is not Part.ADAPTERS]
        if not all(each.is_trained for each in base if len(each.shape) > 1):
            costs = frozen(costs, has_adapters=len(base) < len(weights))
        of_experts = [weight.cut is Cut.EXPERTS for weight in weights if weight.is_adapter]
        own = replace(
            scaled(costs, self.rows),
            linear_adapters=of_experts.count(False) / 2,  # an adapter has two matrices
            experts_adapters=of_experts.count(True) / 2,
        )
        if tp > 1:
            gathers = 1 if own.grouped_flops else 2
            more = gathers * (tp - 1) * own.output_bytes
            own = replace(own, activation_bytes=own.activation_bytes + more)
        if self._num_local(held) and (self.expert_capacity is not None or self.expert_load > 1):
            most = most_load(costs, weights, self.expert_parallel)
            own = with_room(own, min(self._room, most) - 1, is_kept=self.expert_capacity is not None)
        return own

    @property
    def _room(self) -> float:
        """The rows that tensors of copies have, as a multiple of an even share."""
        if self.expert_capacity is None or self.expert_load <= self.expert_capacity:
            return max(self.expert_capacity or 0.0, self.expert_load)
        return SPARE_ROOM * self.expert_load

    def _num_local(self, held: Sequence[Share]) -> int:
        """Return the number of experts that a rank has, if others are on other ranks; else 0."""
        if self.expert_parallel == 1:
            return 0
        experts = (share.weight.shape[0] for share in held if share.weight.cut is Cut.EXPERTS)
        return next(experts, 0) // self.expert_parallel

    def _peers(self, costs: LayerCosts, held: Sequence[Share]) -> float:
        """Return the bytes of the memory that other ranks write tokens to."""
        num_local = self._num_local(held)
        if self.expert_capacity is None or not num_local:
            return 0.0
        top_k = round(costs.dispatch_bytes / costs.output_bytes)
        rows = round(self.rows * self.tokens) * min(self.expert_parallel, top_k)
        width = round(costs.output_bytes / self.tokens)
        return float(PeerLayout(self.expert_parallel, num_local, rows, width, top_k).num_bytes)

    def _wire(self, costs: LayerCosts) -> float:
        """Return the bytes of tokens sent and received: one row for each rank with experts of a token."""
        if self.expert_parallel == 1 or not costs.dispatch_bytes or self.expert_capacity is not None:
            return 0.0
        num_copies = costs.dispatch_bytes / costs.output_bytes
        return 2 * min(num_copies, self.expert_parallel) * costs.output_bytes * self.rows

    def _head(self, after: Sequence[Share], before: Sequence[Share]) -> LayerCosts:
        """Return the head's costs: its forward computes the gradient, beside a chunk of logits."""
        costs, tp = scaled(self.costs.after, self.rows), self.tensor_parallel
        matrices = [share for share in (*after, *before) if share.weight.part in (Part.HEAD, Part.EMBEDDING)]
        matrices = [share for share in matrices if len(share.gathered) > 1]
        if not matrices:
            return costs
        width = matrices[0].weight.dtype.itemsize
        rows, hidden = matrices[0].gathered
        tokens = max(1, int(self.rows * self.tokens * tp))
        logits = tokens_at_once(tokens, hidden, rows) * rows * width
        is_trained = matrices[0].weight.is_trained
        early = rows * hidden * width if is_trained else 0
        kept = costs.activation_bytes * tp + early
        return replace(
            costs,
            activation_bytes=kept,
            forward_peak_bytes=kept + logits,
            output_bytes=costs.activation_bytes / 2,
            backward_moments=(Moment(0.0, 0.0),),
        )


def tokens_at_once(tokens: int, hidden: int, vocabulary: int) -> int:
    """Return the number of tokens whose bfloat16 logits `linear_cross_entropy` has at a time, by default. Local."""
    x = torch.empty(tokens, hidden, dtype=torch.bfloat16, device="meta")
    options = ChunkOptions(-100, 0.0, 0.0, 0.0, 0, 0, vocabulary, "", True)
    return min(tokens, rows_at_once(x, options))


def scaled(costs: LayerCosts, factor: float) -> LayerCosts:
    """Return the costs of a number of rows. Costs of weights stay. Local."""
    values = {}
    for each in fields(costs):
        value = getattr(costs, each.name)
        if type(value) in (int, float) and each.name not in _UNSCALED:
            values[each.name] = value * factor
    moments = tuple(
        Moment(each.row_bytes * factor, each.gradient_bytes, each.copies_bytes * factor)
        for each in costs.backward_moments
    )
    return replace(costs, **values, backward_moments=moments)


def most_load(costs: LayerCosts, weights: Iterable[Weight], expert_parallel: int) -> float:
    """Return the copies of tokens that the experts of a rank get if all tokens choose them. Local.

    Args:
        costs: The layer's costs.
        weights: The layer's weights.
        expert_parallel: The number of ranks that share the experts.

    Returns:
        A multiple of an even share; 1 if experts are on one rank, or there are none.
    """
    experts = next((weight.shape[0] for weight in weights if weight.cut is Cut.EXPERTS), 0)
    if expert_parallel == 1 or not experts or not costs.dispatch_bytes:
        return 1.0
    top_k = costs.dispatch_bytes / costs.output_bytes
    return expert_parallel * min(1.0, experts // expert_parallel / top_k)


def with_room(costs: LayerCosts, spare: float, *, is_kept: bool = True) -> LayerCosts:
    """Return the costs of a layer whose tensors of copies have spare rows. Local.

    Args:
        costs: The layer's costs.
        spare: The spare rows, as a share of the rows in use.
        is_kept: Whether `recompute="selective"` keeps a row for each copy, as with peer dispatch. With all-to-all it
            keeps one for each rank.
    """
    copies, sent = spare * costs.copies_bytes, spare * costs.dispatch_bytes
    products = max(0.0, 2 / 3 * (copies - sent))  # gate and up, of the three tensors beside the copies
    more = {
        "activation_bytes": copies,
        "selective_bytes": is_kept * (costs.dispatch_bytes + sent) + products,
        "attention_bytes": copies,
        "split_activation_bytes": copies + sent,
        "frozen_bytes": products,
        "forward_peak_bytes": copies + sent,
    }
    values = {name: None if (own := getattr(costs, name)) is None else own + value for name, value in more.items()}
    moments = [each._replace(row_bytes=each.row_bytes + spare * each.copies_bytes) for each in costs.backward_moments]
    largest = max(costs.dispatch_bytes, 2 / 3 * (costs.copies_bytes - costs.dispatch_bytes))
    block = max(costs.block_bytes, (1 + spare) * largest) if costs.block_bytes else 0.0
    return replace(costs, **values, block_bytes=block, backward_moments=tuple(moments))


def frozen(costs: LayerCosts, *, has_adapters: bool) -> LayerCosts:
    """Return the costs of a layer with frozen matrices, which keeps no inputs of products for their gradients."""
    if costs.frozen_bytes is None:
        return costs
    kept = costs.frozen_bytes + (costs.output_bytes if has_adapters else 0.0)
    gone = costs.activation_bytes - kept
    return replace(
        costs,
        activation_bytes=kept,
        copies_bytes=max(0.0, 2 / 3 * (costs.copies_bytes - costs.dispatch_bytes)),
        forward_peak_bytes=max(0.0, costs.forward_peak_bytes - gone),
        backward_moments=tuple(Moment(max(0.0, each.row_bytes), 0.0) for each in costs.backward_moments),
        backward_weight_flops=0.0,
    )
