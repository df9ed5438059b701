"""Schedules that run every forward before the first backward."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_d9d.schedule.actions import Action, Backward, Forward
from lightning_d9d.schedule.schedule import Schedule


class GPipe(Schedule):
    """All forwards, then all backwards, newest microbatch first (Huang et al. 2019, arXiv:1811.06965).

    It keeps the activations of every microbatch at the same time.
    """

    def order(self, rank: int, num_ranks: int, num_microbatches: int) -> Iterator[Action]:
        """Run the forwards of the rank's one stage, then its backwards."""
        return _breadth_first([rank], num_microbatches)


class LoopedBFS(Schedule):
    """Breadth-first pipeline parallelism (Lamy-Poirier 2022, arXiv:2211.05953): GPipe with several stages a rank.

    A rank runs all microbatches through one of its stages before the next. So each stage is gathered once and its
    gradients are reduced once, while other stages compute. It keeps the activations of every microbatch at the same
    time.

    Args:
        stages_per_rank: Number of stages on each rank; stages are placed round-robin over the ranks. More stages make
            the bubble smaller.
    """

    def __init__(self, stages_per_rank: int = 2) -> None:
        self.stages_per_rank = stages_per_rank

    def order(self, rank: int, num_ranks: int, num_microbatches: int) -> Iterator[Action]:
        """Run stages in ascending order forward, in descending order backward."""
        return _breadth_first(self.stages_of(rank, num_ranks), num_microbatches)


def _breadth_first(stages: list[int], num_microbatches: int) -> Iterator[Action]:
    for stage in stages:
        for microbatch in range(num_microbatches):
            yield Forward(stage, microbatch)
    for stage in reversed(stages):
        for microbatch in reversed(range(num_microbatches)):
            yield Backward(stage, microbatch)
