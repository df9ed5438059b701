"""Which gradients are summed over which ranks, and when they are complete."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch import nn

from lightning_d9d.strategy.pipeline import Tie
from lightning_d9d.sync.buckets import GradientBuckets, Part


class Replicas:
    """Tells gradient buckets what the executor says of stages.

    Args:
        buckets: Of this rank's parameters.
        parts: For each stage the part of the buckets that its parameters are in.
    """

    def __init__(self, buckets: GradientBuckets, parts: Mapping[int, int]) -> None:
        self.buckets = buckets
        self.parts = parts

    def unshard(self, stage: int) -> None:
        """Replicas hold all of a stage."""

    def reshard(self, stage: int) -> None:
        """Likewise."""

    def last_backward(self, stage: int) -> None:
        """Buckets may leave while it runs."""
        self.buckets.start(self.parts[stage])

    def reduce(self, stage: int) -> None:
        """What is left leaves."""
        self.buckets.complete(self.parts[stage])


def parts_of(
    trained: Sequence[nn.Parameter],
    stages: Mapping[int, nn.Module],
    tied: Mapping[nn.Parameter, Tie],
    group: dist.ProcessGroup | None,
) -> tuple[list[Part], dict[int, int]]:
    """Parameters in parts for `GradientBuckets`, and for each stage the index of its part.

    Tied parameters come first, so that they leave last: their sum waits for the rank that is done last. They are in the
    order of their names, as their holders' modules may have them in others. Then those of no stage or of several; what
    a stage has alone is complete when the stage is.

    Args:
        trained: All of this rank's.
        stages: By index.
        tied: Those that other ranks of the pipeline have, too.
        group: Over which all others are summed.
    """
    stages_of: dict[nn.Parameter, list[int]] = defaultdict(list)
    for index, stage in stages.items():
        for parameter in stage.parameters():
            stages_of[parameter].append(index)
    by_holders: dict[tuple[int, ...], Part] = {}
    own: dict[int, list[nn.Parameter]] = {index: [] for index in stages}
    rest = []
    for parameter in sorted((p for p in trained if p in tied), key=lambda p: tied[p].name):
        tie = tied[parameter]
        by_holders.setdefault(tie.ranks, Part([], tie.group)).parameters.append(parameter)
    for parameter in trained:
        if parameter in tied:
            continue
        if len(stages_of[parameter]) == 1:
            own[stages_of[parameter][0]].append(parameter)
        else:
            rest.append(parameter)
    parts = [*(by_holders[ranks] for ranks in sorted(by_holders)), Part(rest, group)]
    of_stages = {index: len(parts) + place for place, index in enumerate(own)}
    return [*parts, *(Part(parameters, group) for parameters in own.values())], of_stages
