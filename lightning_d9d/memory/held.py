"""The stages of a rank that has its tensors, in the form that `peak` takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from lightning_d9d.memory.layers import Microbatch, StageOfRank, StageShares
from lightning_d9d.memory.peak import GradientRules, PeakBytes, peak
from lightning_d9d.memory.spread import Share, Weight, described_parameters, parts_of
from lightning_d9d.mesh.sharding import local
from lightning_d9d.parallel.data import gathered_shape, num_shards
from lightning_d9d.parallel.fsdp import fully_sharded
from lightning_d9d.schedule.actions import Action
from lightning_d9d.schedule.layers import LayerCosts


@dataclass(frozen=True, kw_only=True)
class StageHeld:
    """A stage of this rank: the layers of the model that it has, and the parts of their weights on this rank."""

    layers: range
    shares: StageShares

    @property
    def trains_all_layers(self) -> bool:
        """True if each layer has a trained parameter, so that gradients pass through all layers."""
        return all(any(share.weight.is_trained for share in held) for held in self.shares.layers)


@dataclass(frozen=True, kw_only=True)
class StagesHeld:
    """All stages of this rank, and its actions in a batch."""

    microbatch: Microbatch
    """A microbatch of one row."""
    stages: Mapping[int, StageHeld]
    """Stages by index in the whole model."""
    actions: Sequence[Action]
    """The rank's actions in a batch, in order."""
    rules: GradientRules
    keeps_gathered: bool = False

    def stages_of(self, recompute: str, num_rows: int) -> dict[int, StageOfRank] | None:
        """Return the stages for a kind of recomputation and a number of rows; None if the costs lack the kept bytes.

        Local.
        """
        microbatch = replace(self.microbatch, recompute=recompute, rows=num_rows * self.microbatch.rows)
        for stage in self.stages.values():
            costs = self.microbatch.costs.layers[stage.layers.start : stage.layers.stop]
            if not all(_says(each, recompute) for each in costs):
                return None
            is_frozen = any(not share.weight.is_trained for held in stage.shares.layers for share in held)
            if is_frozen and (not stage.trains_all_layers or any(each.frozen_bytes is None for each in costs)):
                return None
        return {index: microbatch.stage(stage.layers, stage.shares) for index, stage in self.stages.items()}

    def peak(
        self,
        recompute: str,
        num_rows: int,
        *,
        weights: int,
        states: int,
        part_bytes: int | None = None,
        constant: int = 0,
    ) -> PeakBytes | None:
        """Return the bytes at the peak of a step; None if the costs of layers lack the kept bytes. Local.

        Args:
            recompute: As `ParallelConfig.recompute`.
            num_rows: Rows of a microbatch.
            weights: Bytes of weights.
            states: Bytes of optimizer states.
            part_bytes: Most bytes of gradients at one time if the update runs inside of the backward; else None.
            constant: Bytes of workspaces.
        """
        stages = self.stages_of(recompute, num_rows)
        if stages is None:
            return None
        return peak(
            stages,
            self.actions,
            weights=weights,
            states=states,
            rules=replace(self.rules, part_bytes=part_bytes),
            keeps_gathered=self.keeps_gathered,
            constant=constant,
        )


def stage_held(
    stage: nn.Module,
    layers: range,
    num_ranks: int,
    *,
    is_first: bool,
    is_last: bool,
    shard_blocks: Sequence[str] | None = None,
    gather_dtype: torch.dtype | None = None,
) -> StageHeld | None:
    """Return a stage with the parts of its weights on this rank. Local.

    Args:
        stage: The stage, on any device.
        layers: Its layers by index in the whole model.
        num_ranks: Ranks that have the stage or parts of it.
        is_first: Whether it has the embedding, or what else comes before the layers.
        is_last: Whether it has the head, or what else comes behind them.
        shard_blocks: As `ParallelConfig.shard_blocks`.
        gather_dtype: The dtype that fully sharded parameters are gathered in; None: their own.

    Returns:
        The stage; None if its blocks are not its layers.
    """
    described, units = described_parameters(stage), fully_sharded(stage)
    parts = parts_of(stage, described, shard_blocks)
    if len(parts.layers) != len(layers):
        return None

    def held(parameters: Sequence[nn.Parameter]) -> tuple[Share, ...]:
        return tuple(_share(each, described[each], num_ranks, each in units, gather_dtype) for each in parameters)

    before, after = held(parts.before), held(parts.after)
    if not is_first:  # a tied head's copy of the embedding
        before, after = (), before + after
    shares = StageShares(
        [held(each) for each in parts.layers], before if is_first else None, after if is_last else None
    )
    return StageHeld(layers=layers, shares=shares)


def _share(
    parameter: nn.Parameter, weight: Weight, num_ranks: int, is_unit: bool, gather_dtype: torch.dtype | None
) -> Share:
    shards = num_shards(parameter)
    whole = Share(
        weight=weight,
        gathered=gathered_shape(parameter),
        shape=tuple(local(parameter).shape),
        num_shards=shards,
        num_copies=1,
        is_unit=is_unit,
        gather_dtype=gather_dtype,
    )
    parts = max(1, round(weight.numel / max(1, whole.num_gathered)))
    return replace(whole, num_copies=max(1, num_ranks // parts // shards))


def _says(costs: LayerCosts, recompute: str) -> bool:
    return {"selective": costs.selective_bytes, "attention": costs.attention_bytes}.get(recompute, 0.0) is not None
