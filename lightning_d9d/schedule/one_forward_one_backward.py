"""Schedules that alternate between a forward and a backward once the first backward can run.

All have a fixed order of forwards and another of backwards. The forwards run ahead by a number that is constant through
the batch, so few microbatches are live.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator

from lightning_d9d.schedule.actions import Action, Backward, BackwardInput, BackwardWeight, Forward
from lightning_d9d.schedule.schedule import Schedule


class OneForwardOneBackward(Schedule):
    """1F1B, one stage a rank (Narayanan et al. 2019; Fan et al. 2020, arXiv:2007.01045).

    Its bubble is GPipe's, but a rank keeps at most as many microbatches as there are ranks from it to the last.
    """

    def order(self, rank: int, num_ranks: int, num_microbatches: int) -> Iterator[Action]:
        """Run forwards ahead by the number of ranks after this one."""
        forwards = [Forward(rank, microbatch) for microbatch in range(num_microbatches)]
        backwards = [Backward(rank, microbatch) for microbatch in range(num_microbatches)]
        return _take_turns(forwards, backwards, ahead=num_ranks - 1 - rank)


class Interleaved1F1B(Schedule):
    """1F1B with several stages a rank (Narayanan et al. 2021, arXiv:2104.04473): a smaller bubble for more messages.

    Microbatches form groups of at least as many as there are ranks, or one group if there are fewer. A group passes
    through all of a rank's stages before the next group. Every number of microbatches works; in the paper it is a
    multiple of the ranks.

    Args:
        stages_per_rank: Number of stages on each rank; stages are placed round-robin over the ranks. The bubble is
            divided by this number.
    """

    def __init__(self, stages_per_rank: int = 2) -> None:
        self.stages_per_rank = stages_per_rank

    def order(self, rank: int, num_ranks: int, num_microbatches: int) -> Iterator[Action]:
        """Run forwards ahead by a group for each stage but the last, and by two for each rank after this one."""
        stages = self.stages_of(rank, num_ranks)
        groups = _groups(num_ranks, num_microbatches)
        forwards = [Forward(stage, m) for group in groups for stage in stages for m in group]
        backwards = [Backward(stage, m) for group in groups for stage in reversed(stages) for m in group]
        ahead = (len(stages) - 1) * len(groups[0]) + 2 * (num_ranks - 1 - rank)
        return _take_turns(forwards, backwards, ahead)


class ZeroBubble(Schedule):
    """1F1B with split backwards, ZB-H1 or ZB1P (Qi et al. 2023, arXiv:2401.10241), also with several stages a rank.

    The previous stage waits only for input backwards. Weight backwards lag behind by the number of ranks before this
    one, and fill its bubble at the end. Every rank keeps as many microbatches as rank 0 does with 1F1B.

    Args:
        stages_per_rank: Number of stages on each rank; stages are placed round-robin over the ranks.
    """

    def __init__(self, stages_per_rank: int = 1) -> None:
        self.stages_per_rank = stages_per_rank

    def order(self, rank: int, num_ranks: int, num_microbatches: int) -> Iterator[Action]:
        """Run forwards ahead by a group for each stage but the last, and by one for each rank after this one."""
        stages = self.stages_of(rank, num_ranks)
        groups = _groups(num_ranks, num_microbatches)
        forwards = [Forward(stage, m) for group in groups for stage in stages for m in group]
        backwards = [BackwardInput(stage, m) for group in groups for stage in reversed(stages) for m in group]
        ahead = (len(stages) - 1) * len(groups[0]) + num_ranks - 1 - rank
        return _with_weights(_take_turns(forwards, backwards, ahead), lag=rank)


def _groups(num_ranks: int, num_microbatches: int) -> list[range]:
    """Split microbatches into as many groups of at least `num_ranks` as possible, nearly equal, larger ones first."""
    number = max(1, num_microbatches // num_ranks)
    size, left = divmod(num_microbatches, number)
    starts = [group * size + min(group, left) for group in range(number + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(starts)]


def _take_turns(forwards: list[Forward], backwards: Iterable[Action], ahead: int) -> Iterator[Action]:
    """Yield `ahead` forwards, then a forward and a backward in turn, then the remaining backwards."""
    rest = iter(backwards)
    yield from forwards[:ahead]
    for forward in forwards[ahead:]:
        yield forward
        yield next(rest)
    yield from rest


def _with_weights(actions: Iterable[Action], lag: int) -> Iterator[Action]:
    """Insert each weight backward `lag` input backwards after its own; the remaining ones come at the end."""
    waiting: deque[BackwardWeight] = deque()
    for action in actions:
        yield action
        if isinstance(action, BackwardInput):
            waiting.append(BackwardWeight(action.stage, action.microbatch))
            if len(waiting) > lag:
                yield waiting.popleft()
    yield from waiting
