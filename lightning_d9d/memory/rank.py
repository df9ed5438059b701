"""A rank of a run before there is one: its stages, what they hold, and the most that a step allocates there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace

import torch

from lightning_d9d.memory.peak import GradientRules, LayerOfRank, PeakBytes, StageOfRank, peak
from lightning_d9d.memory.spread import ModelWeights, Part, Share, Spread, Weight
from lightning_d9d.mesh import MeshConfig
from lightning_d9d.ops.linear_cross_entropy_chunks import ChunkOptions, rows_at_once
from lightning_d9d.parallel.config import ParallelConfig
from lightning_d9d.schedule.actions import Action, BackwardInput, compute_parts
from lightning_d9d.schedule.layers import LayerCosts, ModelCosts, Moment
from lightning_d9d.schedule.program import merge_backwards
from lightning_d9d.schedule.schedule import Schedule

_MOST_PARTS = 64
"""Into so many parts a step inside of the backward cuts gradients at most: `strategy.step_in_backward`."""
_UNSCALED = ("weight_bytes",)
StateBytes = Callable[[Share], int]


@dataclass(frozen=True, kw_only=True)
class RankModel:
    """A model, and how a run spreads and trains it: all that memory follows from."""

    weights: ModelWeights
    costs: ModelCosts
    """For one whole row, on one rank."""
    tokens: int
    """The tokens of a whole row."""
    mesh: MeshConfig
    schedule: Schedule
    layers_of_stages: tuple[range, ...]
    rows: int
    """The rows of a microbatch, of ranks that share one."""
    num_microbatches: int
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    accumulates_batches: bool = False
    sum_bytes: int = 4
    """Bytes of a number in which gradients are summed."""
    step_in_backward: bool = False
    bucket_bytes: int = 32 * 2**20
    state_bytes: StateBytes = lambda share: 2 * share.numel * share.weight.dtype.itemsize + 4
    """Bytes of the optimizer's states for what a rank holds of a weight."""

    @property
    def accumulates(self) -> bool:
        """True if several backwards add up to a step."""
        return self.num_microbatches > 1 or self.accumulates_batches

    @property
    def keeps_gathered(self) -> bool:
        """True if fully sharded stages stay gathered over a batch, as the strategy decides it."""
        given = self.parallel.reshard_after_forward
        splits = any(isinstance(part, BackwardInput) for action in self.actions(0) for part in compute_parts(action))
        if given == "auto":
            return self.mesh.pipeline_parallel > 1 or self.num_microbatches > 1 or splits
        return not given or splits

    @property
    def share_of_row(self) -> float:
        """The part of a microbatch's tokens that a rank computes."""
        mesh = self.mesh
        parts = mesh.tensor_parallel * mesh.context_parallel_shard * mesh.context_parallel_replicate
        return self.rows / parts

    def spread(self) -> Spread:
        """Return the rules of where weights lie."""
        return Spread(self.mesh, self.parallel)

    def actions(self, rank: int) -> tuple[Action, ...]:
        """Return what a rank of the pipeline computes in a batch."""
        program = merge_backwards(self.schedule.compute(self.mesh.pipeline_parallel, self.num_microbatches))
        return program.ranks[rank]

    def stages(self, rank: int, spread: Spread) -> dict[int, StageOfRank]:
        """Return the stages of a rank of the pipeline, by index."""
        last = len(self.layers_of_stages) - 1
        indices = self.schedule.stages_of(rank, self.mesh.pipeline_parallel)
        return {index: self.stage(self.layers_of_stages[index], index == 0, index == last, spread) for index in indices}

    def stage(self, layers: range, is_first: bool, is_last: bool, spread: Spread) -> StageOfRank:
        """Return a stage with these layers."""
        kind, share = self.parallel.recompute, self.share_of_row
        own = [
            LayerOfRank(
                costs=self._layer(self.costs.layers[index], self.weights.layers[index]),
                shares=tuple(spread.shares(self.weights.layers[index])),
                recompute=kind,
                place=place,
                wire_bytes=self._wire(self.costs.layers[index]),
            )
            for place, index in enumerate(layers)
        ]
        before = after = None
        if is_first:
            before = LayerOfRank(
                costs=scaled(self.costs.before, share), shares=tuple(spread.shares(self.weights.before))
            )
        if is_last:
            tied = () if is_first else self.weights.tied
            shares = tuple(spread.shares((*self.weights.after, *tied)))
            after = LayerOfRank(costs=self._head(shares), shares=shares)
        return StageOfRank(layers=own, before=before, after=after)

    def _layer(self, costs: LayerCosts, weights: tuple[Weight, ...]) -> LayerCosts:
        """Return a layer's costs for a microbatch on this rank, which may have gathered tokens or frozen weights."""
        tp = self.mesh.tensor_parallel
        base = [each for each in weights if each.part is not Part.ADAPTERS]
        if not all(each.is_trained for each in base if len(each.shape) > 1):
            costs = frozen(costs, has_adapters=any(each.part is Part.ADAPTERS for each in weights))
        own = scaled(costs, self.share_of_row)
        if tp > 1:
            gathers = 1 if own.grouped_flops else 2
            more = gathers * (tp - 1) * own.output_bytes
            own = replace(own, activation_bytes=own.activation_bytes + more)
        return own

    def _wire(self, costs: LayerCosts) -> float:
        """Tokens to ranks with their experts and back: one row for each of these ranks, sent and received."""
        if self.mesh.expert_parallel == 1 or not costs.dispatch_bytes:
            return 0.0
        num_copies = costs.dispatch_bytes / costs.output_bytes
        return 2 * min(num_copies, self.mesh.expert_parallel) * costs.output_bytes * self.share_of_row

    def _head(self, shares: tuple[Share, ...]) -> LayerCosts:
        """Return the head's costs for a microbatch: its gradient is made in the forward, beside a chunk of logits."""
        costs, tp = scaled(self.costs.after, self.share_of_row), self.mesh.tensor_parallel
        matrices = [share for share in shares if share.weight.part in (Part.HEAD, Part.EMBEDDING)]
        matrices = matrices or [Spread(self.mesh).share(each) for each in self.weights.before][:1]
        if not matrices:
            return costs
        width = matrices[0].weight.dtype.itemsize
        rows, hidden = matrices[0].gathered
        tokens = max(1, int(self.share_of_row * self.tokens * tp))
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

    def held(self, rank: int) -> list[Share]:
        """Return what a rank of the pipeline holds, each weight once."""
        found = []
        for stage in self.stages(rank, self.spread()).values():
            found += [share for part in stage.parts for share in part.shares]
        return found

    def rules(self, held: list[Share]) -> GradientRules:
        """Return how gradients are kept."""
        part = None
        if self.step_in_backward:
            whole = sum(share.numel * share.weight.dtype.itemsize for share in held if share.weight.is_trained)
            part = 2 * max(self.bucket_bytes, whole // _MOST_PARTS)
        return GradientRules(accumulates=self.accumulates, wide=self.sum_bytes, part_bytes=part)

    def peak(self, rank: int) -> PeakBytes:
        """Find the most that a step allocates on a rank of the pipeline. Local."""
        held = self.held(rank)
        return peak(
            self.stages(rank, self.spread()),
            self.actions(rank),
            weights=sum(share.numel * share.weight.dtype.itemsize for share in held),
            states=sum(self.state_bytes(share) for share in held if share.weight.is_trained),
            rules=self.rules(held),
            keeps_gathered=self.keeps_gathered,
        )


def tokens_at_once(tokens: int, hidden: int, vocabulary: int) -> int:
    """Return for how many tokens `linear_cross_entropy` has logits at a time in bfloat16, by default. Local."""
    x = torch.empty(tokens, hidden, dtype=torch.bfloat16, device="meta")
    options = ChunkOptions(-100, 0.0, 0.0, 0.0, 0, 0, vocabulary, "", True)
    return min(tokens, rows_at_once(x, options))


def scaled(costs: LayerCosts, factor: float) -> LayerCosts:
    """Return the costs of so many rows. Weights stay. Local."""
    values = {}
    for each in fields(costs):
        value = getattr(costs, each.name)
        if type(value) in (int, float) and each.name not in _UNSCALED:
            values[each.name] = value * factor
    moments = tuple(Moment(each.row_bytes * factor, each.gradient_bytes) for each in costs.backward_moments)
    return replace(costs, **values, backward_moments=moments)


def frozen(costs: LayerCosts, *, has_adapters: bool) -> LayerCosts:
    """Return the costs of a layer whose matrices are frozen: inputs of products are not kept for their gradients."""
    if costs.frozen_bytes is None:
        return costs
    kept = costs.frozen_bytes + (costs.output_bytes if has_adapters else 0.0)
    gone = costs.activation_bytes - kept
    return replace(
        costs,
        activation_bytes=kept,
        forward_peak_bytes=max(0.0, costs.forward_peak_bytes - gone),
        backward_moments=tuple(Moment(max(0.0, each.row_bytes), 0.0) for each in costs.backward_moments),
        backward_weight_flops=0.0,
    )
