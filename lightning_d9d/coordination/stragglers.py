"""Finds slow ranks: ranks that do the same work are compared, block of steps by block of steps. Pure Python."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import islice
from statistics import median, median_high
from typing import Any

PARTS = ("compute", "data")
"""Parts of a step that a rank does by itself, which are compared. Other programs on its host come and go."""
ALL_PARTS = (*PARTS, "link", "queue")
NUM_BLOCKS = 48
"""Number of blocks of steps in a report."""
NUM_REPORTS = 2
"""Number of consecutive reports that must agree to name a rank."""
MOST_FALSE_NAMES = 1e-4
"""Largest probability that a report names a rank although all ranks are alike."""
_MOST_COMPARED = 16
"""Largest number of ranks in a comparison; a median over more ranks costs more and gives the same result."""


@dataclass(frozen=True)
class Times:
    """The seconds of a step of one rank in a report, by block; see `of_block`."""

    host: str
    stage: int
    """Ranks of equal stages do the same work."""
    compute: list[float]
    """Time of everything that the other parts do not cover."""
    data: list[float]
    """The wait for a batch."""
    link: list[float]
    """The wait for other ranks."""
    queue: list[float]
    """The wait for a processor that other programs use; 0 if the system does not tell."""

    @cached_property
    def work(self) -> list[float]:
        """The seconds of both parts that the rank does by itself."""
        return [sum(parts) for parts in zip(*(getattr(self, part) for part in PARTS), strict=True)]

    def mean(self, part: str) -> float:
        """Return the mean of a part's blocks."""
        return sum(getattr(self, part)) / NUM_BLOCKS

    @staticmethod
    def is_valid(value: Any) -> bool:
        """Return whether JSON holds the fields of this class."""
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
    """Extra time of the part over the median of the other ranks, as a share of their own time."""

    def __str__(self) -> str:
        what = "waits for data" if self.part == "data" else "computes"
        return (
            f"rank {self.rank} on {self.host} is slow: in each step it {what} longer than the other ranks of its "
            f"stages, by {self.excess:.0%} of their own time"
        )


class Comparison:
    """Compares ranks report by report.

    A rank's excess in a block is its time less the median of the other ranks of its stages in the same block. It is
    given as a share of the time that these others spend by themselves. So a disturbance that slows all ranks makes no
    excess. Both parts together count: if a rank computes longer and waits less for data, no other rank waits for it.

    The blocks of the last two reports decide. A rank is named if all of these hold:

    - The median of its excess is above the threshold.
    - The lower end of a confidence interval for this median is above half of the threshold. Its ends are order
      statistics, so the distribution does not matter; `num_slow_blocks` gives the assumptions.
    - The median of each half of a report is above half of the threshold, too: a burst of other work comes and goes.

    The part with the larger median is named.

    Args:
        threshold: Threshold, as a share of the others' own time in a step.
    """

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self._reports: deque[Sequence[Times]] = deque(maxlen=NUM_REPORTS)

    def add(self, report: Sequence[Times]) -> list[Straggler]:
        """Return the ranks that are slow according to this report.

        Args:
            report: Times, one for each rank.
        """
        self._reports.append(report)
        if len(self._reports) < NUM_REPORTS:
            return []
        found = []
        for rank, own in enumerate(report):
            work = self._excess(rank, "work")
            if work and self._is_slow(work, num_slow_blocks(len(report))):
                medians = {part: median(self._excess(rank, part)) for part in PARTS}
                part = max(PARTS, key=medians.__getitem__)
                found.append(Straggler(rank, own.host, part, medians[part]))
        return found

    def _is_slow(self, excess: Sequence[float], needed: int) -> bool:
        half = NUM_BLOCKS // 2
        halves = [excess[begin : begin + half] for begin in range(0, len(excess), half)]
        lower_end = sorted(excess)[len(excess) - needed]
        return median(excess) > self.threshold and min(lower_end, *map(median, halves)) > self.threshold / 2

    def _excess(self, rank: int, part: str) -> list[float]:
        """Return the excess of each block; nothing if no other rank does the same work."""
        found = []
        for report in self._reports:
            stage = report[rank].stage
            alike = (each for other, each in enumerate(report) if each.stage == stage and other != rank)
            others = list(islice(alike, _MOST_COMPARED))
            blocks = zip(getattr(report[rank], part), _usual(others, part), _usual(others, "work"), strict=False)
            found += [(own - usual) / max(work, 1e-9) for own, usual, work in blocks]
        return found


@cache
def num_slow_blocks(num_ranks: int) -> int:
    """Return in how many of all n blocks the excess of a named rank must be above half of the threshold.

    Suppose that ranks are alike: in a block the times of a stage are exchangeable, and blocks are independent. Then a
    rank is above the higher median of the others with a probability of at most 1/2. The number X of such blocks has
    `P(X >= k) <= sum(C(n, i) for i in k..n) / 2**n`, as in the sign test. The smallest k for which this is at most
    `MOST_FALSE_NAMES / num_ranks` is needed (Bonferroni), or all blocks. If k blocks are above a value, so is the order
    statistic n - k + 1, the lower end of the interval. See Thompson, Annals of Mathematical Statistics 7, 1936.
    """
    num_blocks = NUM_REPORTS * NUM_BLOCKS
    tail, needed = 1, num_blocks
    while (tail + math.comb(num_blocks, needed - 1)) * num_ranks <= MOST_FALSE_NAMES * 2**num_blocks:
        needed -= 1
        tail += math.comb(num_blocks, needed)
    return needed


def of_block(steps: Sequence[float]) -> float:
    """Return the interquartile mean, which ignores single steps that are far too long or too short."""
    cut = len(steps) // 4
    middle = sorted(steps)[cut : len(steps) - cut]
    return sum(middle) / len(middle)


def _usual(ranks: Sequence[Times], part: str) -> list[float]:
    """Return the higher median of each block over ranks; nothing without ranks."""
    return [median_high(block) for block in zip(*(getattr(each, part) for each in ranks), strict=True)]
