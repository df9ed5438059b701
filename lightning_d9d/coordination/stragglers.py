"""Which rank is slow: ranks that do the same work are compared, block of steps by block of steps. Pure Python."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

PARTS = ("compute", "data")
"""Parts of a step that a rank does by itself, which are compared. Other programs on its host come and go."""
ALL_PARTS = (*PARTS, "link", "queue")
NUM_BLOCKS = 10
"""A report has so many blocks of steps."""
NUM_REPORTS = 2
"""A rank is named by what this many reports have in common."""
_MOST_COMPARED = 64
"""A median over more ranks costs more and says the same."""
_SHARE_OF_BLOCKS = 0.7
"""The rank must be slow in so many blocks at least: a burst of other work fills fewer."""
_NUM_DEVIATIONS = 2.0
"""The median must be above zero by so many of its own standard deviations."""


@dataclass(frozen=True)
class Times:
    """The seconds of a step of one rank in a report, by block; see `of_block`."""

    host: str
    stage: int
    """Ranks of equal stages do the same work."""
    compute: list[float]
    """All that is not one of the others."""
    data: list[float]
    """The wait for a batch."""
    link: list[float]
    """The wait for other ranks."""
    queue: list[float]
    """The wait for a processor that other programs use; 0 where the system does not say."""

    @property
    def work(self) -> list[float]:
        """The seconds of both parts that the rank does by itself."""
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
        what = "waits for data" if self.part == "data" else "computes"
        return (
            f"rank {self.rank} on {self.host} is slow: in each step it {what} longer than the other ranks of its "
            f"stages, by {self.excess:.0%} of their own time"
        )


class Comparison:
    """Compares ranks report by report.

    A rank's excess in a block is its time less the median of the other ranks of its stages in the same block. It is a
    share of what these others do by themselves. So what slows all ranks makes no excess.

    The blocks of the last two reports decide. A rank is named if the median of its excess is above the threshold. The
    median must also be beyond two of its own standard deviations, as the median absolute deviation tells. And seven
    tenths of the blocks must be above half of the threshold. All this must hold for one part, and for both together: a
    rank that computes longer and waits less for data keeps nobody waiting.

    Args:
        threshold: A share of the others' own time in a step.
    """

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self._excess: dict[tuple[int, str], deque[list[float]]] = defaultdict(lambda: deque(maxlen=NUM_REPORTS))

    def add(self, report: Sequence[Times]) -> list[Straggler]:
        """Return the ranks that are slow as of this report.

        Args:
            report: One for each rank.
        """
        found = []
        for rank, own in enumerate(report):
            usual, slow = _usual(report, own.stage, rank), dict[str, float | None]()
            for part in (*PARTS, "work") if usual else ():
                pairs = zip(getattr(own, part), usual[part], usual["work"], strict=True)
                history = self._excess[rank, part]
                history.append([(value - other) / max(work, 1e-9) for value, other, work in pairs])
                slow[part] = self._slow([each for blocks in history for each in blocks])
            if slow.get("work") is not None and len(self._excess[rank, "work"]) == NUM_REPORTS:
                found += [Straggler(rank, own.host, part, excess) for part in PARTS if (excess := slow[part])]
        return found

    def _slow(self, excess: Sequence[float]) -> float | None:
        middle = median(excess)
        deviation = 1.4826 * median(abs(each - middle) for each in excess)
        error = 1.2533 * deviation / math.sqrt(len(excess))
        num_above = sum(each > self.threshold / 2 for each in excess)
        is_slow = (
            middle > self.threshold and middle > _NUM_DEVIATIONS * error and num_above >= _SHARE_OF_BLOCKS * len(excess)
        )
        return middle if is_slow else None


def of_block(steps: Sequence[float]) -> float:
    """Return the upper quartile: what takes some of a step's time for another makes steps too short, not too long."""
    return sorted(steps)[3 * len(steps) // 4]


def _usual(report: Sequence[Times], stage: int, rank: int) -> dict[str, list[float]]:
    """Return by part the median of each block over the other ranks of a stage; nothing where it is alone."""
    ranks = [each for other, each in enumerate(report) if each.stage == stage and other != rank][:_MOST_COMPARED]
    if not ranks:
        return {}
    parts = {part: [getattr(each, part) for each in ranks] for part in (*PARTS, "work")}
    return {part: [median(block) for block in zip(*values, strict=True)] for part, values in parts.items()}
