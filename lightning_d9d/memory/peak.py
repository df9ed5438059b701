"""The peak memory of a rank's step, found by walking through its actions layer by layer.

[Note: memory over a step] Weights and optimizer states exist all the time. A forward adds the tensors that each layer
keeps, and the running layer needs more for a moment. A backward frees a layer's tensors and leaves gradients.
Recomputed layers keep their input, and all their tensors exist again during their backward. The first backward of a
window allocates gradients. Later backwards add to them, and need one more gradient at a time. FSDP2 adds the gathered
unit and the next one, with the gradients of a gathered unit. The message that sums gradients exists until the next one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from lightning_d9d.memory.layers import LayerOfRank, StageOfRank
from lightning_d9d.memory.spread import Share
from lightning_d9d.schedule.actions import Action, Backward, BackwardInput, BackwardWeight, Forward, compute_parts

WORKSPACE = 33 * 2**20
"""The workspace of cuBLAS on Hopper, from torch's allocator: 32 MiB and 1 MiB (torch's `getChosenWorkspaceSize`)."""


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

    @property
    def total(self) -> int:
        """The sum."""
        return sum(getattr(self, each.name) for each in fields(self))


class LayerGradients:
    """Bytes of a layer's gradients: those that stay, those just computed, and those that FSDP2 adds."""

    def __init__(self, shares: Iterable[Share], rules: GradientRules) -> None:
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


def gradients_at_end(shares: Iterable[Share], rules: GradientRules) -> int:
    """Count the bytes of the gradients at the end of a backward, before the update. Local."""
    own = LayerGradients(shares, rules)
    return own.stays + own.of_shards


def gathered_bytes(layer: LayerOfRank) -> int:
    """Count the bytes of a layer's gathered units. Local."""
    return sum(share.num_gathered * share.width for share in layer.shares if share.is_unit)


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
    at_rest = PeakBytes(weights=weights, states=states, constant=constant)
    return _Walk(stages, at_rest, rules, keeps_gathered).run(actions)


class _Walk:
    def __init__(
        self, stages: Mapping[int, StageOfRank], at_rest: PeakBytes, rules: GradientRules, keeps: bool
    ) -> None:
        self.stages = stages
        self.at_rest = at_rest
        self.rules = rules
        self.keeps = keeps
        self.sums_late = (keeps or rules.accumulates_batches) and not rules.reduces_each
        self.gradients = {
            (index, place): LayerGradients(layer.shares, rules)
            for index, stage in stages.items()
            for place, layer in enumerate(stage.parts)
        }
        self.activations = 0.0
        self.there = 0.0  # gradients
        self.has_gradients: set[int] = set()
        self.kept_stages = sum(gathered_bytes(part) for stage in stages.values() for part in stage.parts)
        self.best = at_rest
        if rules.accumulates_batches:  # those of the batches before
            self.has_gradients = set(stages)
            for own in self.gradients.values():
                self.there += own.stays + (own.whole_units_wide if self.sums_late else own.of_shards)

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
                    self.backward_weight(part.stage, stage, is_last=is_last)
                case _:
                    self.backward(part.stage, stage, is_last=is_last, looks=is_new or is_last)
        return self.best

    def note(self, working: float, gathered: float = 0.0, gradients: float = 0.0) -> None:
        gathered += self.kept_stages if self.keeps else 0
        now = replace(
            self.at_rest,
            gradients=int(self.there + gradients),
            activations=int(self.activations),
            gathered=int(gathered),
            working=int(working),
        )
        if now.total > self.best.total:
            self.best = now

    def around(self, stage: StageOfRank, place: int, step: int) -> float:
        """Bytes of the running unit and of the next one, which exists twice: as a message, and as its copy."""
        if self.keeps:
            return 0.0
        parts = stage.parts
        following = place + step
        coming = 2 * gathered_bytes(parts[following]) if 0 <= following < len(parts) else 0
        return gathered_bytes(parts[place]) + coming

    def forward(self, index: int, stage: StageOfRank, *, looks: bool) -> None:
        for place, layer in enumerate(stage.parts):
            if looks:
                self.note(layer.forward_peak, self.around(stage, place, 1))
            self.activations += layer.kept

    def backward(self, index: int, stage: StageOfRank, *, is_last: bool, looks: bool) -> None:
        is_first = index not in self.has_gradients
        message = 0.0
        for place in reversed(range(len(stage.parts))):
            layer, own = stage.parts[place], self.gradients[index, place]
            whole = max(layer.kept, layer.costs.activation_bytes)
            again = whole - layer.kept
            around = self.around(stage, place, -1) + message
            unit_gradients = 0.0 if not own.whole_units else own.whole_units
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
                    is_later = layer.recompute == "attention" and moment is not last  # that is recomputed behind them
                    now_again = 0.0 if is_later else again
                    self.note(now_again + layer.costs.output_bytes + moment.row_bytes, around, fresh)
                if again:
                    self.note(max(layer.forward_peak - layer.kept, again) + layer.costs.output_bytes, around)
                if layer.wire_bytes:
                    self.note(again + layer.costs.output_bytes + layer.wire_bytes, around)
            self.activations -= layer.kept
            self.settle(own, is_first=is_first, is_last=is_last)
            if own.message and (is_last or not self.keeps):
                if looks:
                    self.note(0.0, around - message - gathered_bytes(layer) + own.message + unit_gradients)
                message = own.message
        self.has_gradients.add(index)
        if is_last:
            self.note(0.0, message)

    def backward_input(self, index: int, stage: StageOfRank, *, looks: bool) -> None:
        for place in reversed(range(len(stage.parts))):
            layer = stage.parts[place]
            whole = max(layer.kept, layer.costs.activation_bytes)
            split = layer.costs.split_activation_bytes
            if looks:
                self.note(whole - layer.kept + layer.costs.output_bytes, self.around(stage, place, -1))
            self.activations += split - layer.kept

    def backward_weight(self, index: int, stage: StageOfRank, *, is_last: bool) -> None:
        is_first = index not in self.has_gradients
        for place in reversed(range(len(stage.parts))):
            layer, own = stage.parts[place], self.gradients[index, place]
            self.note(0.0, 0.0, own.fresh if is_first else own.largest)
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
            if own.of_shards:
                self.there += own.of_shards if is_last or not self.sums_late else own.whole_units_wide
        elif is_last and own.of_shards and self.sums_late:
            self.there += own.of_shards - own.whole_units_wide
