"""Legal values of a setting, for errors that name the nearest ones."""

from __future__ import annotations

import math
from collections.abc import Iterable


def divisors(number: int) -> list[int]:
    """Return the positive divisors of a number, ascending; 0 has none."""
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*low, *(number // n for n in low)})


def nearest(value: int, legal: Iterable[int]) -> list[int]:
    """Return the largest legal number below a value and the smallest one above it, or the one that exists."""
    ascending = sorted(legal)
    return [n for n in ascending if n < value][-1:] + [n for n in ascending if n > value][:1]
