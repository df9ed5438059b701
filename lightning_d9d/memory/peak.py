"""The peak memory of a rank's step, found by walking through its actions layer by layer.

[Note: memory over a step] Weights and optimizer states exist all the time. A forward adds the tensors that each layer
keeps, and the running layer needs more for a moment. A backward frees a layer's tensors and leaves gradients.
Recomputed layers keep their input, and all their tensors exist again during their backward. The first backward of a
window allocates gradients. Later backwards add to them, and need one more gradient at a time. FSDP2 adds the gathered
unit and the next one, with the gradients of a gathered unit. The message that sums gradients exists until the next one.

[Note: blocks that are kept apart] Torch's allocator has a pool of blocks for each stream. A free block of one pool
is of no use in another. FSDP2 allocates the messages that gather in one stream of its own, and summed gradients in
another (torch's `_fsdp_collectives.py`). In the stream of the computation, a gradient that is larger than any tensor of
a layer finds no free block of such tensors. So each of these four kinds needs its own most. Their sum is more than the
most of all together, as gradients are there when activations are not.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_d9d.memory.layers import LayerOfRank, StageOfRank
from lightning_d9d.memory.spread import Part, Share
from lightning_d9d.schedule.actions import Action, Backward, BackwardInput, BackwardWeight, Forward, compute_parts

WORKSPACE = 33 * 2**20
"""The workspace of cuBLAS on Hopper, from torch's allocator: 32 MiB and 1 MiB (torch's `getChosenWorkspaceSize`)."""

_VOCABULARY = (Part.EMBEDDING, Part.HEAD)


@dataclass(frozen=True, kw_only=True)
class GradientRules:
    """How gradients of a step are kept."""

    accumulates: bool = False
    """True if several backwards add up."""
    accumulates_batches: bool = False
    """True if the backwards of several batches add up. Then all gradients exist when a batch begins."""
    wide: int = 4
    """Bytes of a number in a bucket."""
    wide_units: int = 4
    """Bytes of a number in a sum of FSDP2."""
    reduces_each: bool = False
    """True if FSDP2 reduces after each microbatch."""
    part_bytes: int | None = None
    """Most bytes of gradients at one time if the update runs inside of the backward; None if it runs after it."""


@dataclass(frozen=True, kw_only=True)
class PeakBytes:
    """The bytes at the peak of a step. Torch calls `total` allocated."""

    weights: int = 0
    gradients: int = 0
    states: int = 0
    activations: int = 0
    gathered: int = 0
    """Gathered units of FSDP2, their gradients, and the messages that sum these."""
    working: int = 0
    """Bytes of the running layer: results, their gradients, logits, and tokens in transit."""
    constant: int = WORKSPACE
    apart: int = 0
    """Bytes of free blocks at the peak that large gradients cannot take. [Note: blocks that are kept apart]."""
    streams: int = 0
    """The same if FSDP2 has streams of its own: bytes of free blocks of all streams."""
    peers: int = 0
    """Bytes that other ranks write tokens to, outside of torch's allocator."""

    @property
    def total(self) -> int:
        """The sum of all that tensors take."""
        kept = self.weights + self.gradients + self.states + self.activations
        return kept + self.gathered + self.working + self.constant


class LayerGradients:
    """Bytes of a layer's gradients: those that stay, those just computed, and those that FSDP2 adds."""

    def __init__(self, shares: Iterable[Share], rules: GradientRules, block: float = math.inf) -> None:
        trained = [share for share in shares if share.weight.is_trained]
        self.fresh = sum(share.num_gathered * share.width for share in trained)
        self.largest = max((share.num_gathered * share.width for share in trained), default=0)
        units = [share for share in trained if share.is_unit]
        rest = [share for share in trained if not share.is_unit]
        in_buckets = [share for share in rest if share.num_copies > 1 or rules.accumulates]
        own = [share for share in rest if not (share.num_copies > 1 or rules.accumulates)]

        self.stays = sum(share.numel * share.weight.dtype.itemsize for share in own)
        self.stays += sum(share.numel * max(rules.wide, share.weight.dtype.itemsize) for share in in_buckets)
        widths = [max(rules.wide_units, share.weight.dtype.itemsize) for share in units]
        self.of_shards = sum(share.numel * wide for share, wide in zip(units, widths, strict=True))
        self.message = sum(share.num_padded * wide for share, wide in zip(units, widths, strict=True))
        self.whole_units = sum(share.num_gathered * share.width for share in units)
        self.whole_units_wide = sum(share.num_gathered * wide for share, wide in zip(units, widths, strict=True))
        self.adopts = any(share.numel for share in in_buckets)
        large = [share.numel * share.weight.dtype.itemsize for share in own]
        large += [share.numel * max(rules.wide, share.weight.dtype.itemsize) for share in in_buckets]
        self.large = sum(each for each in large if each > block)
        self.large_units = sum(each for share in units if (each := share.num_gathered * share.width) > block)
        self.large_message = self.message if self.message > block else 0


def gradients_at_end(shares: Iterable[Share], rules: GradientRules) -> int:
    """Count the bytes of the gradients at the end of a backward, before the update. Local."""
    own = LayerGradients(shares, rules)
    return own.stays + own.of_shards


def gathered_bytes(layer: LayerOfRank, above: float = 0.0, *, stay: bool = False) -> int:
    """Count the bytes of a layer's gathered units. Local.

    Args:
        layer: The layer.
        above: Smaller weights are left out.
        stay: Whether to count those that stay gathered until the backward of the stage is done, or the others.
    """
    units = [share for share in layer.shares if share.is_unit and share.stays_gathered == stay]
    return sum(size for share in units if (size := share.num_gathered * share.width) > above)


def tied_bytes(stage: StageOfRank) -> float:
    """Count the bytes of the head's gradient if it waits for that of the embedding, the same matrix. Local."""
    if stage.before is None or stage.after is None:
        return 0.0
    if any(len(share.gathered) > 1 and share.weight.part in _VOCABULARY for share in stage.after.shares):
        return 0.0
    trained = [share for share in stage.before.shares if share.weight.is_trained and len(share.gathered) > 1]
    return float(sum(share.num_gathered * share.width for share in trained))


def peak(
    stages: Mapping[int, StageOfRank],
    actions: Sequence[Action],
    *,
    weights: int,
    states: int,
    rules: GradientRules,
    keeps_gathered: bool,
    constant: int = WORKSPACE,
) -> PeakBytes:
    """Return the bytes of a rank at the peak of a step. Local. See [Note: memory over a step].

    Args:
        stages: The rank's stages, by index in the whole model.
        actions: The rank's actions of a batch, in order.
        weights: Bytes of its weights.
        states: Bytes of its optimizer states.
        rules: How gradients are kept.
        keeps_gathered: Whether fully sharded stages stay gathered over a batch.
        constant: Bytes of workspaces.
    """
    peers = max((part.peer_bytes for stage in stages.values() for part in stage.parts), default=0.0)
    at_rest = PeakBytes(weights=weights, states=states, constant=constant, peers=int(peers))
    return _Walk(stages, at_rest, rules, keeps_gathered).run(actions)


class _Walk:
    def __init__(
        self, stages: Mapping[int, StageOfRank], at_rest: PeakBytes, rules: GradientRules, keeps: bool
    ) -> None:
        self.stages = stages
        self.at_rest, self.total_at_rest = at_rest, at_rest.total
        self.rules = rules
        self.keeps = keeps
        self.sums_late = (keeps or rules.accumulates_batches) and not rules.reduces_each
        block = max((part.costs.block_bytes for stage in stages.values() for part in stage.parts), default=0.0)
        self.block = block or math.inf
        gradients = functools.cache(lambda layer: LayerGradients(layer.shares, rules, self.block))
        self.gradients: dict[tuple[int, int], LayerGradients] = {
            (index, place): gradients(layer)
            for index, stage in stages.items()
            for place, layer in enumerate(stage.parts)
        }
        self.activations = 0.0
        self.there = 0.0  # gradients
        self.large = 0.0  # those of them in large blocks
        self.scattered = 0.0  # those of them that FSDP2 has summed
        self.most_of_pools = {"computed": 0.0, "large gradients": 0.0, "gathered": 0.0, "scattered": 0.0}
        self.has_gradients: set[int] = set()
        every = [part for stage in stages.values() for part in stage.parts]
        self.kept_stages = sum(gathered_bytes(part, stay=stay) for part in every for stay in (False, True))
        self.kept_roots = sum(gathered_bytes(part, stay=True) for part in every)
        self.tied = {index: tied_bytes(stage) for index, stage in stages.items()}
        self.best, self.most = at_rest, at_rest.total
        if rules.accumulates_batches:  # those of the batches before
            self.has_gradients = set(stages)
            for own in self.gradients.values():
                self.there += own.stays + (own.whole_units_wide if self.sums_late else own.of_shards)
                self.large += own.large
                self.scattered += 0.0 if self.sums_late else own.of_shards

    def run(self, actions: Sequence[Action]) -> PeakBytes:
        remaining: dict[int, int] = {}
        parts = [part for action in actions for part in compute_parts(action)]
        for part in parts:
            if isinstance(part, Backward | BackwardWeight):
                remaining[part.stage] = remaining.get(part.stage, 0) + 1
        seen: set[tuple[object, ...]] = set()
        for part in parts:
            stage = self.stages[part.stage]
            is_last = False
            if isinstance(part, Backward | BackwardWeight):
                remaining[part.stage] -= 1
                is_last = remaining[part.stage] == 0
            state = type(part), part.stage, round(self.activations), round(self.there), is_last
            is_new = state not in seen
            seen.add(state)
            match part:
                case Forward():
                    self.forward(part.stage, stage, looks=is_new)
                case BackwardInput():
                    self.backward_input(part.stage, stage, looks=is_new)
                case BackwardWeight():
                    self.backward_weight(part.stage, stage, is_last=is_last, looks=is_new or is_last)
                case _:
                    self.backward(part.stage, stage, is_last=is_last, looks=is_new or is_last)
        first = 0.0 if self.keeps else max(gathered_bytes(stage.parts[0]) for stage in self.stages.values())
        self.most_of_pools["gathered"] += first  # of another size than those of layers, which do not fit into its block
        free = max(0, int(sum(self.most_of_pools.values())) - self.most)
        has_streams = self.most_of_pools["gathered"] + self.kept_stages > 0
        return replace(self.best, streams=free) if has_streams else replace(self.best, apart=free)

    def note(
        self, working: float, gathered: tuple[float, float] = (0.0, 0.0), fresh: float = 0.0, large: float = 0.0
    ) -> None:
        """Look at a moment.

        Args:
            working: Bytes of the running layer.
            gathered: Bytes of gathered units and of gradients that are sent; bytes of messages that gather.
            fresh: Gradients that have just been computed.
            large: The part of them in large blocks.
        """
        copies, messages = gathered
        copies += self.kept_stages if self.keeps else self.kept_roots
        computed = self.total_at_rest + self.there - self.large - self.scattered + self.activations
        pools = self.most_of_pools
        pools["computed"] = max(pools["computed"], computed + working + copies + fresh - large)
        pools["large gradients"] = max(pools["large gradients"], self.large + large)
        pools["gathered"] = max(pools["gathered"], messages)
        pools["scattered"] = max(pools["scattered"], self.scattered)
        parts = int(self.there + fresh), int(self.activations), int(copies + messages), int(working)
        total = self.total_at_rest + sum(parts)
        if total > self.most:
            names = "gradients", "activations", "gathered", "working"
            self.best, self.most = replace(self.at_rest, **dict(zip(names, parts, strict=True))), total

    def around(self, stage: StageOfRank, place: int, *, is_backward: bool) -> tuple[float, float]:
        """Return the bytes of the running unit, and of messages: in a forward its own, in a backward the next one's."""
        if self.keeps:
            return 0.0, 0.0
        own = gathered_bytes(stage.parts[place])
        following = gathered_bytes(stage.parts[place - 1]) if place else 0
        return own, following if is_backward else own

    def forward(self, index: int, stage: StageOfRank, *, looks: bool) -> None:
        for place, layer in enumerate(stage.parts):
            if looks:
                copies, message = self.around(stage, place, is_backward=False)
                large = 0 if self.keeps else gathered_bytes(layer, self.block)
                self.note(layer.forward_peak, (copies, message), large=large)
                if place and message:  # the message before is there until this one has come
                    self.note(0.0, (0.0, message + gathered_bytes(stage.parts[place - 1])))
            self.activations += layer.kept

    def backward(self, index: int, stage: StageOfRank, *, is_last: bool, looks: bool) -> None:
        is_first = index not in self.has_gradients
        sums = large_sums = 0.0
        for place in reversed(range(len(stage.parts))):
            layer, own = stage.parts[place], self.gradients[index, place]
            self.there -= self.tied.get(index, 0.0) if layer is stage.before else 0.0
            whole = max(layer.kept, layer.costs.activation_bytes)
            again = whole - layer.kept
            early = 0.0 if layer.recompute == "attention" else again  # attention comes behind all else
            copies, coming = self.around(stage, place, is_backward=True)
            around = copies + sums, coming
            large = large_sums + (0 if self.keeps else gathered_bytes(layer, self.block))
            if looks:
                *earlier, last = layer.moments
                for moment in (*earlier, last):
                    share = (
                        min(1.0, moment.gradient_bytes / layer.costs.weight_bytes) if layer.costs.weight_bytes else 0
                    )
                    fresh = share * own.fresh if is_first or own.adopts or own.whole_units else own.largest
                    if own.adopts and is_first:
                        fresh = max(fresh - own.largest, 0) * own.stays / max(1, own.fresh) + own.largest
                    if self.rules.part_bytes is not None and not self.rules.accumulates:
                        fresh = min(fresh, self.rules.part_bytes + own.largest)
                    grown = (again if moment is last else early) + layer.costs.output_bytes + moment.row_bytes
                    self.note(grown, around, fresh, large + min(fresh, own.large + own.large_units))
                if early:  # gradients of experts' results are made before
                    copied = layer.costs.dispatch_bytes if layer.is_recomputed else 0.0
                    forward = max(layer.forward_peak - layer.kept + copied, early)
                    self.note(forward + layer.costs.output_bytes, around, large=large)
                if layer.wire_bytes:
                    self.note(early + layer.costs.output_bytes + layer.wire_bytes, around, large=large)
            self.activations -= layer.kept
            self.settle(own, is_first=is_first, is_last=is_last)
            self.there += self.tied.get(index, 0.0) if layer is stage.after else 0.0
            if own.message and (is_last or not self.keeps):
                if looks:
                    self.note(0.0, (own.message + own.whole_units, coming), large=own.large_message + own.large_units)
                sums, large_sums = own.message, own.large_message
        self.has_gradients.add(index)
        if is_last:
            self.note(0.0, (sums, 0.0), large=large_sums)

    def backward_input(self, index: int, stage: StageOfRank, *, looks: bool) -> None:
        for place in reversed(range(len(stage.parts))):
            layer = stage.parts[place]
            whole = max(layer.kept, layer.costs.activation_bytes)
            split = layer.costs.split_activation_bytes
            if looks:
                grown = whole - layer.kept + max(each.row_bytes for each in layer.moments)
                self.note(grown + layer.costs.output_bytes, self.around(stage, place, is_backward=True))
            self.activations += split - layer.kept

    def backward_weight(self, index: int, stage: StageOfRank, *, is_last: bool, looks: bool) -> None:
        is_first = index not in self.has_gradients
        for place in reversed(range(len(stage.parts))):
            layer, own = stage.parts[place], self.gradients[index, place]
            if looks:
                self.note(0.0, fresh=own.fresh if is_first else own.largest, large=own.large if is_first else 0.0)
            self.activations -= layer.costs.split_activation_bytes
            self.settle(own, is_first=is_first, is_last=is_last)
        self.has_gradients.add(index)

    def settle(self, own: LayerGradients, *, is_first: bool, is_last: bool) -> None:
        """Add the gradients that remain after a layer's backward."""
        if self.rules.part_bytes is not None and not self.rules.accumulates:
            self.there = min(self.there + own.stays + own.of_shards, self.rules.part_bytes)
            return
        if is_first:
            self.there += own.stays
            self.large += own.large
            if own.of_shards and (is_last or not self.sums_late):
                self.there += own.of_shards
                self.scattered += own.of_shards
            elif own.of_shards:
                self.there += own.whole_units_wide
        elif is_last and own.of_shards and self.sums_late:
            self.there += own.of_shards - own.whole_units_wide
            self.scattered += own.of_shards
