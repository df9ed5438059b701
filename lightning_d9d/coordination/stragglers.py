"""Which rank is slow: ranks that do the same work are compared, block of steps by block of steps. Pure Python."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

PARTS = ("compute", "data")
"""What a rank does by itself, and is compared. Other programs on its host come and go."""
ALL_PARTS = (*PARTS, "link", "queue")
NUM_BLOCKS = 10
"""A report has so many blocks of steps."""
NUM_REPORTS = 2
"""A rank is named by what this many reports have in common."""
_SHARE_OF_BLOCKS = 0.75
"""In so many blocks at least the rank must be slow: a burst of other work fills fewer."""
_NUM_DEVIATIONS = 3.0
"""The median must be above zero by so many of its own standard deviations."""


@dataclass(frozen=True)
class Times:
    """What a rank did in a report: seconds of a step, the median of each block."""

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

    def step(self, block: int) -> float:
        """The whole step."""
        return sum(getattr(self, part)[block] for part in ALL_PARTS)

    def mean(self, part: str) -> float:
        """The mean of a part's blocks."""
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
    """By this share of a step the part takes longer than the median of the other ranks."""

    def __str__(self) -> str:
        what = "waits for data" if self.part == "data" else "computes"
        return (
            f"rank {self.rank} on {self.host} is slow: in each step it {what} for {self.excess:.0%} of the step longer "
            "than the other ranks of its stages"
        )


class Comparison:
    """Compares ranks report by report.

    A rank's excess in a block is its time less the median of the other ranks of its stages in the same block, as a
    share of the step: what slows all of them is none. It is named if its excess in the last two reports is above the
    threshold in the median, above half of it in three quarters of the blocks, and beyond three standard deviations of
    that median, as its median absolute deviation tells.

    Args:
        threshold: A share of a step.
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
            others = [each for other, each in enumerate(report) if each.stage == own.stage and other != rank]
            if not others:
                continue
            for part in PARTS:
                values = getattr(own, part)
                history = self._excess[rank, part]
                history.append(
                    [
                        (values[block] - median(getattr(each, part)[block] for each in others))
                        / max(median(each.step(block) for each in [own, *others]), 1e-9)
                        for block in range(NUM_BLOCKS)
                    ]
                )
                excess = self._slow([each for blocks in history for each in blocks])
                if len(history) == NUM_REPORTS and excess is not None:
                    found.append(Straggler(rank, own.host, part, excess))
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
