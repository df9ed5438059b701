"""DualPipeV: Forwards and backwards of different microbatches in overlapped pairs, with two stages a rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from lightning_d9d.schedule.actions import Action, Backward, BackwardInput, BackwardWeight, Forward, Overlapped
from lightning_d9d.schedule.program import v_placement
from lightning_d9d.schedule.schedule import Schedule, StageCursor


class DualPipeV(Schedule):
    """DualPipeV (DeepSeek-AI 2024, arXiv:2412.19437, folded in half): it overlaps expert exchange with computation.

    Rank r has the stages r and 2 * ranks - 1 - r. In the main part each action pairs a forward in one stage with a full
    backward in the other. They overlap with `ParallelConfig.overlap_pairs`. It needs at least 2 * ranks microbatches.
    """

    stages_per_rank = 2

    def placement(self, num_ranks: int) -> tuple[int, ...]:
        """Place stages down the ranks and up again."""
        return v_placement(num_ranks)

    def takes(self, num_ranks: int, num_microbatches: int) -> bool:
        """Return True for at least as many microbatches as stages."""
        return num_microbatches >= 2 * num_ranks

    def order(self, rank: int, num_ranks: int, num_microbatches: int) -> Iterator[Action]:
        """Run forwards on the way down, then forwards both ways, pairs, and backwards."""
        down, up = StageCursor(rank), StageCursor(2 * num_ranks - 1 - rank)
        behind = num_ranks - 1 - rank

        for _ in range(2 * behind):
            yield down.next(Forward)
        for _ in range(rank + 1):
            yield down.next(Forward)
            yield up.next(Forward)
        for _ in range(behind):
            yield up.next(BackwardInput)
            yield up.next(BackwardWeight)
            yield up.next(Forward)

        for turn in range(num_microbatches - 2 * num_ranks + rank + 1):
            if turn == 0 and behind == 0:  # the last rank's neighbour waits for this forward alone
                yield down.next(Forward)
                yield up.next(Backward)
            else:
                yield Overlapped(down.next(Forward), up.next(Backward))
            yield Overlapped(up.next(Forward), down.next(Backward))

        for _ in range(behind):
            yield up.next(Backward)
            yield Overlapped(up.next(Forward), down.next(Backward))

        # The second half of what is left is split: inputs at once, weights while this rank would wait or at the end.
        split: deque[StageCursor] = deque()
        for turn in range(2 * (rank + 1)):
            stage = down if turn % 2 else up
            if turn <= rank:
                yield stage.next(Backward)
            else:
                yield stage.next(BackwardInput)
                split.append(stage)
        for _ in range(behind):
            yield split.popleft().next(BackwardWeight)
            yield down.next(BackwardInput)
            split.append(down)
        while split:
            yield split.popleft().next(BackwardWeight)
