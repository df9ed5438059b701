"""Schedules that take turns between a forward and a backward once the first backward can run.

All have a fixed order of forwards and another of backwards; the forwards run ahead by some number, the same through the
whole batch, which is what keeps few microbatches alive.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator

from lightning_d9d.schedule.actions import Action, Backward, BackwardInput, BackwardWeight, Forward
from lightning_d9d.schedule.schedule import Schedule


class OneForwardOneBackward(Schedule):
    """1F1B, one stage a rank (Narayanan et al. 2019; Fan et al. 2020, arXiv:2007.01045).

    GPipe's bubble, but a rank keeps at most as many microbatches alive as there are ranks from it to the last.
    """

    def order(self, rank: int, num_ranks: int, num_microbatches: int) -> Iterator[Action]:
        """Forwards run ahead by the number of ranks behind this one."""
        forwards = [Forward(rank, microbatch) for microbatch in range(num_microbatches)]
        backwards = [Backward(rank, microbatch) for microbatch in range(num_microbatches)]
        return _take_turns(forwards, backwards, ahead=num_ranks - 1 - rank)


class Interleaved1F1B(Schedule):
    """1F1B with several stages a rank (Narayanan et al. 2021, arXiv:2104.04473): a smaller bubble for more messages.

    Microbatches pass in groups of at least as many as there are ranks (of all, if there are fewer), through all of a
    rank's stages before the next group. Every number of microbatches works; multiples of the ranks are the paper's.

    Args:
        stages_per_rank: Stages go round and round over the ranks, this many times. The bubble is divided by it.
    """

    def __init__(self, stages_per_rank: int = 2) -> None:
        self.stages_per_rank = stages_per_rank

    def order(self, rank: int, num_ranks: int, num_microbatches: int) -> Iterator[Action]:
        """Forwards run ahead by a group for each stage but the last, and by two for each rank behind this one."""
        stages = self.stages_of(rank, num_ranks)
        groups = _groups(num_ranks, num_microbatches)
        forwards = [Forward(stage, m) for group in groups for stage in stages for m in group]
        backwards = [Backward(stage, m) for group in groups for stage in reversed(stages) for m in group]
        ahead = (len(stages) - 1) * len(groups[0]) + 2 * (num_ranks - 1 - rank)
        return _take_turns(forwards, backwards, ahead)


class ZeroBubble(Schedule):
    """1F1B with split backwards, ZB-H1 or ZB1P (Qi et al. 2023, arXiv:2401.10241), also with several stages a rank.

    The stage before waits for input backwards only. Weight backwards lag behind by as many as there are ranks before
    this one, and fill its bubble at the end. As many microbatches are alive as with 1F1B on rank 0, on every rank.

    Args:
        stages_per_rank: Stages go round and round over the ranks, this many times.
    """

    def __init__(self, stages_per_rank: int = 1) -> None:
        self.stages_per_rank = stages_per_rank

    def order(self, rank: int, num_ranks: int, num_microbatches: int) -> Iterator[Action]:
        """Forwards run ahead by a group for each stage but the last, and by one for each rank behind this one."""
        stages = self.stages_of(rank, num_ranks)
        groups = _groups(num_ranks, num_microbatches)
        forwards = [Forward(stage, m) for group in groups for stage in stages for m in group]
        backwards = [BackwardInput(stage, m) for group in groups for stage in reversed(stages) for m in group]
        ahead = (len(stages) - 1) * len(groups[0]) + num_ranks - 1 - rank
        return _with_weights(_take_turns(forwards, backwards, ahead), lag=rank)


def _groups(num_ranks: int, num_microbatches: int) -> list[range]:
    """Microbatches in as many groups as can have `num_ranks` each, of sizes as equal as can be, larger ones first."""
    number = max(1, num_microbatches // num_ranks)
    size, left = divmod(num_microbatches, number)
    starts = [group * size + min(group, left) for group in range(number + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(starts)]


def _take_turns(forwards: list[Forward], backwards: Iterable[Action], ahead: int) -> Iterator[Action]:
    """`ahead` forwards, then a forward and a backward in turn, then the backwards that are left."""
    rest = iter(backwards)
    yield from forwards[:ahead]
    for forward in forwards[ahead:]:
        yield forward
        yield next(rest)
    yield from rest


def _with_weights(actions: Iterable[Action], lag: int) -> Iterator[Action]:
    """With each input backward's weight backward `lag` input backwards behind it; those left over at the end."""
    waiting: deque[BackwardWeight] = deque()
    for action in actions:
        yield action
        if isinstance(action, BackwardInput):
            waiting.append(BackwardWeight(action.stage, action.microbatch))
            if len(waiting) > lag:
                yield waiting.popleft()
    yield from waiting
