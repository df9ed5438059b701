"""ZB-V: split backwards on two stages a rank."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_d9d.schedule.actions import Action, BackwardInput, BackwardWeight, Forward
from lightning_d9d.schedule.program import v_placement
from lightning_d9d.schedule.schedule import Schedule, StageCursor


class ZeroBubbleV(Schedule):
    """ZB-V (Qi et al. 2023, arXiv:2401.10241, section 6): no rank idles between its first and its last action.

    This holds if forward, input and weight backward take equally long and there are at least 2 * ranks - 1
    microbatches. Rank r has the stages r and 2 * ranks - 1 - r: rank 0 has both the first and the last stage. Every
    rank keeps the activations of 2 * ranks microbatches in a stage, as many as rank 0 does with 1F1B.
    """

    stages_per_rank = 2

    def placement(self, num_ranks: int) -> tuple[int, ...]:
        """Place stages down the ranks and up again."""
        return v_placement(num_ranks)

    def order(self, rank: int, num_ranks: int, num_microbatches: int) -> Iterator[Action]:
        """Return the order for at least 2 * num_ranks - 1 microbatches, without those that do not exist."""
        full = max(num_microbatches, 2 * num_ranks - 1)
        return (action for action in _order(rank, num_ranks, full) if action.microbatch < num_microbatches)


def _order(rank: int, num_ranks: int, num_microbatches: int) -> Iterator[Forward | BackwardInput | BackwardWeight]:
    down, up = StageCursor(rank), StageCursor(2 * num_ranks - 1 - rank)

    # Until the first microbatch comes back up, only forwards on the way down can run.
    for _ in range(2 * (num_ranks - rank) - 1):
        yield down.next(Forward)
    for _ in range(rank):
        yield up.next(Forward)
        yield down.next(Forward)
    for _ in range(num_ranks - rank):
        yield up.next(Forward)
        yield up.next(BackwardInput)
        yield up.next(BackwardWeight)

    # Every microbatch passes both ways, in both stages.
    while up.num_forwards < num_microbatches:
        if down.num_forwards < num_microbatches:
            yield down.next(Forward)
        yield down.next(BackwardInput)
        yield down.next(BackwardWeight)
        yield up.next(Forward)
        yield up.next(BackwardInput)
        yield up.next(BackwardWeight)

    # Input backwards come first, as ranks before this one wait for them; weight backwards run where there is nothing
    # else.
    for _ in range(rank):
        yield down.next(BackwardInput)
        yield up.next(BackwardInput)
    for _ in range(num_ranks - rank):
        yield down.next(BackwardInput)
        yield down.next(BackwardWeight)
    while up.split:
        yield up.next(BackwardWeight)
    while down.split:
        yield down.next(BackwardWeight)
