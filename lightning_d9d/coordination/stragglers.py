"""Which rank is slow: ranks that do the same work are compared, block of steps by block of steps. Pure Python."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import islice
from statistics import median, median_high
from typing import Any

PARTS = ("compute", "data", "blocked")
"""Parts of a step that a rank does by itself, which are compared one by one. Other programs on its host come and go."""
ALL_PARTS = (*PARTS, "link", "queue")
NUM_BLOCKS = 48
"""A report has so many blocks of steps."""
NUM_REPORTS = 2
"""A rank is named by what this many reports have in common."""
MOST_FALSE_NAMES = 1e-4
"""A report of ranks that are alike has a name with at most this probability."""
_MOST_COMPARED = 16
"""A median over more ranks costs more and says the same."""


@dataclass(frozen=True)
class Times:
    """The seconds of a step of one rank in a report, by block; see `of_block`."""

    host: str
    stage: int
    """Ranks of equal stages do the same work."""
    compute: list[float]
    """Processor time of a rank on a CPU; on other devices the rest of the step, after all other parts."""
    data: list[float]
    """The wait for a batch."""
    blocked: list[float]
    """The wait for something else: a file, a lock, another thread."""
    link: list[float]
    """The wait for other ranks."""
    queue: list[float]
    """The wait for a processor that other programs use; 0 where the system does not say."""

    @cached_property
    def work(self) -> list[float]:
        """The seconds of all parts that the rank does by itself."""
        return [sum(parts) for parts in zip(*(getattr(self, part) for part in PARTS), strict=True)]

    def mean(self, part: str) -> float:
        """Return the mean of a part's blocks."""
        return sum(getattr(self, part)) / NUM_BLOCKS

    @staticmethod
    def is_valid(value: Any) -> bool:
        """Return whether JSON holds the fields of one."""
        if not (isinstance(value, dict) and value.keys() == set(Times.__annotations__)):
            return False
        lists = [value[part] for part in ALL_PARTS]
        return all(isinstance(each, list) and len(each) == NUM_BLOCKS for each in lists) and all(
            isinstance(number, float) for each in lists for number in each
        )


@dataclass(frozen=True)
class Straggler:
    """A rank for which the others wait."""

    rank: int
    host: str
    part: str
    excess: float
    """The part takes longer than the median of the other ranks by this share of their own time."""

    def __str__(self) -> str:
        what = {"data": "waits for data", "blocked": "waits for a file, a lock or a thread"}.get(self.part, "computes")
        return (
            f"rank {self.rank} on {self.host} is slow: in each step it {what} longer than the other ranks of its "
            f"stages, by {self.excess:.0%} of their own time"
        )


class Comparison:
    """Compares ranks report by report.

    A rank's excess in a block is its time less the median of the other ranks of its stages in the same block. It is a
    share of what these others do by themselves. So what slows all ranks makes no excess.

    The blocks of the last two reports decide. A rank is named if all of this holds for one part:

    - The median of its excess is above the threshold.
    - The lower end of a confidence interval for this median is above half of it. Its ends are order statistics, so the
      distribution does not matter; `num_slow_blocks` says what does.
    - The median of each half of a report is above half of it, too: a burst of other work comes and goes.
    - The median of the excess of all parts that the rank does by itself is above half of it, too. A rank that computes
      longer and waits less for data keeps nobody waiting.

    If this holds for several parts, the one with the largest median is named. Parts are not tested together: on a busy
    host small differences of all of them add up.

    Args:
        threshold: A share of the others' own time in a step.
    """

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self._reports: deque[Sequence[Times]] = deque(maxlen=NUM_REPORTS)
        self._usual: dict[tuple[tuple[int, ...], str], list[float]] = {}

    def add(self, report: Sequence[Times]) -> list[Straggler]:
        """Return the ranks that are slow as of this report.

        Args:
            report: One for each rank.
        """
        self._reports.append(report)
        if len(self._reports) < NUM_REPORTS:
            return []
        self._usual.clear()
        found, needed = [], num_slow_blocks(len(report))
        for rank, own in enumerate(report):
            work = self._excess(rank, "work")
            if not work or median(work) <= self.threshold / 2:
                continue
            excess = {part: self._excess(rank, part) for part in PARTS}
            slow = {part: median(blocks) for part, blocks in excess.items() if self._is_slow(blocks, needed)}
            if slow:
                part = max(slow, key=slow.__getitem__)
                found.append(Straggler(rank, own.host, part, slow[part]))
        return found

    def _is_slow(self, excess: Sequence[float], needed: int) -> bool:
        half = NUM_BLOCKS // 2
        halves = [excess[begin : begin + half] for begin in range(0, len(excess), half)]
        lower_end = sorted(excess)[len(excess) - needed]
        return median(excess) > self.threshold and min(lower_end, *map(median, halves)) > self.threshold / 2

    def _excess(self, rank: int, part: str) -> list[float]:
        """Return that of each block; nothing where no other rank does the same work."""
        found = []
        for number, report in enumerate(self._reports):
            stage = report[rank].stage
            alike = (other for other, each in enumerate(report) if each.stage == stage and other != rank)
            others = (number, *islice(alike, _MOST_COMPARED))
            usual = zip(self._usual_of(others, part), self._usual_of(others, "work"), strict=True)
            blocks = zip(getattr(report[rank], part), usual, strict=False)
            found += [(own - each) / max(work, 1e-9) for own, (each, work) in blocks]
        return found

    def _usual_of(self, others: tuple[int, ...], part: str) -> list[float]:
        """Return the higher median of each block over some ranks, or an empty list if there are none.

        Medians are kept, because most ranks have the same ranks beside them.

        Args:
            others: The number of the report, and ranks.
            part: The part of their times.
        """
        if (others, part) not in self._usual:
            number, *ranks = others
            times = (getattr(self._reports[number][rank], part) for rank in ranks)
            self._usual[others, part] = [median_high(block) for block in zip(*times, strict=True)]
        return self._usual[others, part]


@cache
def num_slow_blocks(num_ranks: int) -> int:
    """Return the number of blocks that name a rank: in each of them its excess is above half of the threshold.

    Let ranks be alike: in a block the times of a stage are exchangeable, and blocks are independent. Then a rank is
    above the higher median of the others with a probability of at most 1/2. The number X of such blocks has
    `P(X >= k) <= sum(C(n, i) for i in k..n) / 2**n`, as in the sign test. The smallest k for which this is at most
    `MOST_FALSE_NAMES / num_ranks / len(PARTS)` is needed (Bonferroni), or all blocks. If k blocks are above a value,
    so is the order statistic n - k + 1, the lower end of the interval. See Thompson, Annals of Mathematical Statistics
    7, 1936.
    """
    num_blocks, num_tests = NUM_REPORTS * NUM_BLOCKS, num_ranks * len(PARTS)
    tail, needed = 1, num_blocks
    while (tail + math.comb(num_blocks, needed - 1)) * num_tests <= MOST_FALSE_NAMES * 2**num_blocks:
        needed -= 1
        tail += math.comb(num_blocks, needed)
    return needed


def of_block(steps: Sequence[float]) -> float:
    """Return the interquartile mean: single steps that are far too long or too short do not count."""
    cut = len(steps) // 4
    middle = sorted(steps)[cut : len(steps) - cut]
    return sum(middle) / len(middle)
