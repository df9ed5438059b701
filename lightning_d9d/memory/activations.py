"""Bytes of activations that a rank's stages keep from forward to backward, from what layers cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_d9d.parallel.config import ParallelConfig
from lightning_d9d.schedule.actions import Action, Backward, BackwardWeight
from lightning_d9d.schedule.layers import LayerCosts, ModelCosts
from lightning_d9d.schedule.simulate import Costs, live


class Kept(NamedTuple):
    """Bytes of activations at two moments of a batch."""

    most: int
    """When most are there."""
    beside_gradients: int
    """When most are there after each stage's first backward, which makes all of its gradients."""


@dataclass(frozen=True, kw_only=True)
class StageLayers:
    """The layers of a stage, and whether it has what stands before and after them."""

    layers: range
    is_first: bool
    is_last: bool


@dataclass(frozen=True, kw_only=True)
class Activations:
    """The activations that the stages of a rank keep, for each recomputation and number of rows."""

    costs: ModelCosts
    """The costs of one row, on a rank with whole layers."""
    stages: Mapping[int, StageLayers]
    """This rank's stages, by index in the whole model."""
    num_stages: int
    """The number of stages of the whole model."""
    actions: Sequence[Action]
    """The actions of this rank in a batch, in order."""
    num_slices: int = 1
    """Over how many ranks of tensor parallelism the tokens of a layer, or its heads, are spread."""
    sends_to_experts: bool = False
    """True if tokens are sent to experts on other ranks."""

    def kept(self, recompute: str, num_rows: int) -> Kept | None:
        """Count what is kept while the microbatches of a batch go through the stages.

        With recomputation that includes what one block makes when its backward comes. Gradients of activations and
        what an operation needs for itself are left out, so a real step takes more.

        Args:
            recompute: As `ParallelConfig.recompute`.
            num_rows: Rows of a microbatch.

        Returns:
            The bytes; None where a layer does not say what it keeps.
        """
        per_stage, again = [0.0] * self.num_stages, 0.0
        for index, stage in self.stages.items():
            of_layers = [self._kept_of(layer, place, recompute) for place, layer in enumerate(self._layers_of(stage))]
            known = [each for each in of_layers if each is not None]
            if len(known) < len(of_layers):
                return None
            per_stage[index] = sum(known) + sum(each.activation_bytes for each in self._ends_of(stage))
            for layer, each in zip(self._layers_of(stage), known, strict=True):
                again = max(again, layer.activation_bytes - each)
        most = beside = 0.0
        went_back: set[int] = set()
        for part, _, num_bytes in live(self.actions, Costs(activation=per_stage)):
            most = max(most, num_bytes + again)
            if went_back == self.stages.keys():
                beside = max(beside, num_bytes + again)
            if isinstance(part, Backward | BackwardWeight):
                went_back.add(part.stage)
        return Kept(*(int(num_rows * each / self.num_slices) for each in (most, beside)))

    def input_bytes(self, num_rows: int) -> int:
        """Count the inputs of all blocks, when most are kept from forward to backward."""
        per_stage = [0.0] * self.num_stages
        for index, stage in self.stages.items():
            per_stage[index] = sum(layer.output_bytes for layer in self._layers_of(stage))
        most = max((num_bytes for _, _, num_bytes in live(self.actions, Costs(activation=per_stage))), default=0.0)
        return int(num_rows * most / self.num_slices)

    def dispatch_bytes(self, num_rows: int) -> int:
        """Count the buffer of tokens that are sent to experts on other ranks, of one layer at a time."""
        if not self.sends_to_experts:
            return 0
        layers = (layer for stage in self.stages.values() for layer in self._layers_of(stage))
        return int(num_rows * max((layer.dispatch_bytes for layer in layers), default=0) / self.num_slices)

    def _layers_of(self, stage: StageLayers) -> Sequence[LayerCosts]:
        return self.costs.layers[stage.layers.start : stage.layers.stop]

    def _ends_of(self, stage: StageLayers) -> list[LayerCosts]:
        return [self.costs.before] * stage.is_first + [self.costs.after] * stage.is_last

    def _kept_of(self, layer: LayerCosts, place: int, recompute: str) -> float | None:
        """Bytes that a layer keeps, or None; `place` is its index in the stage."""
        if recompute == "selective":
            return layer.selective_bytes
        if recompute == "attention":
            return layer.attention_bytes
        if recompute == "offload":
            return 0.0
        is_recomputed = ParallelConfig(recompute=recompute).recomputes_block(place)
        return layer.output_bytes if is_recomputed else layer.activation_bytes
