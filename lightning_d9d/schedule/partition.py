"""Splits items into consecutive stages by their weights."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import accumulate, chain, combinations, pairwise, product
from typing import TypeVar

from lightning_d9d.errors import ConfigError


def split_evenly(weights: Sequence[int | float], num_stages: int) -> list[range]:
    """Split items into consecutive stages so that the heaviest stage is as light as possible.

    Among such splits it takes the one whose other stages are also most even (the least sum of squares). Among these it
    takes the one whose first stages have more items. The arithmetic is exact for all weights.

    Args:
        weights: Weights of the items, at least 0; for instance the cost or the number of parameters of each layer.
        num_stages: Number of stages, at most the number of items.

    Returns:
        One range of items for each stage, in order, none of them empty.

    Raises:
        ConfigError: There are fewer items than stages, or a weight is negative or not finite.
    """
    num_items = len(weights)
    check_num_stages(num_items, num_stages)
    for index, weight in enumerate(weights):
        if not (math.isfinite(weight) and weight >= 0):
            raise ConfigError(f"layer {index} has the weight {weight}; weights must be finite and at least 0")
    fractions = [Fraction(weight) for weight in weights]
    unit = math.lcm(*(fraction.denominator for fraction in fractions))
    starts = [0, *accumulate(int(fraction * unit) for fraction in fractions)]
    # The least limit under which few enough stages hold everything; splitting these further never exceeds it.
    heaviest = max(stop - start for start, stop in pairwise(starts))
    limits = sorted({stop - start for start, stop in combinations(starts, 2) if stop - start >= heaviest})
    limit = limits[bisect_left(limits, True, key=lambda limit: _num_stages_within(limit, starts) <= num_stages)]
    # From the last stage to the first: the best split of items i, i + 1, ..., by the first item i.
    best: dict[int, tuple[int, list[range]]] = {num_items: (0, [])}
    for _ in range(num_stages):
        longer: dict[int, tuple[int, list[range]]] = {}
        for first in range(num_items):
            candidates = []
            for stop in range(first + 1, num_items + 1):
                weight = starts[stop] - starts[first]
                if weight > limit:
                    break
                if stop in best:
                    candidates.append((best[stop][0] + weight**2, -stop))
            if candidates:
                squares, minus_stop = min(candidates)
                longer[first] = (squares, [range(first, -minus_stop), *best[-minus_stop][1]])
        best = longer
    return best[0][1]


def _num_stages_within(limit: int, starts: Sequence[int]) -> int:
    """Return the number of stages of at most `limit` that the items fill if each stage takes as many as possible."""
    num_stages, stage_start = 1, 0
    for start, stop in pairwise(starts):
        if stop - stage_start > limit:
            num_stages, stage_start = num_stages + 1, start
    return num_stages


def check_num_stages(num_layers: int, num_stages: int) -> None:
    """Refuse a number of stages that leaves one without a layer.

    Raises:
        ConfigError: There are more stages than layers. The message has the possible numbers.
    """
    if not 1 <= num_stages <= num_layers:
        raise ConfigError(
            f"{num_layers} layers cannot be split into {num_stages} stages, because each needs at least one; use 1 to "
            f"{num_layers} stages (pipeline ranks times stages on each)"
            if num_layers > 0
            else (
                f"a model without layers cannot be split into {num_stages} stages; give it at least one layer for each "
                "stage"
            )
        )


_Load = TypeVar("_Load", bound=tuple[int, ...])


def level(
    ranges: Sequence[range], placement: Sequence[int], loads: Callable[[Sequence[range]], Sequence[_Load]]
) -> list[range]:
    """Move boundaries until no move of one item from the most loaded rank would make the loads more even.

    Loads are compared as sorted lists, the largest first. The stage that gives an item gets shorter and the one that
    takes it longer; stages between keep their lengths.

    Args:
        ranges: The initial stages.
        placement: The rank of each stage.
        loads: Returns the load of each rank for the ranges of all stages. Loads are tuples whose first number matters
            most. They are whole numbers, because rounding would look like an improvement.

    Returns:
        One range of items for each stage, in order, none of them empty.
    """
    best, of_ranks = list(ranges), loads(ranges)
    while True:
        for moved in _moves(best, placement, sorted(range(len(of_ranks)), key=of_ranks.__getitem__)):
            found = loads(moved)
            if sorted(found, reverse=True) < sorted(of_ranks, reverse=True):
                best, of_ranks = moved, found
                break
        else:
            return best


def _moves(ranges: Sequence[range], placement: Sequence[int], ranks: Sequence[int]) -> Iterator[list[range]]:
    """Yield the splits in which a stage of the last of `ranks` gives an item to another; the first rank takes first."""
    sizes = [len(each) for each in ranges]
    shortest_first = sorted(range(len(ranges)), key=sizes.__getitem__)
    stages_of = [[stage for stage in shortest_first if placement[stage] == rank] for rank in ranks]
    for taker, giver in product(chain.from_iterable(stages_of), reversed(stages_of[-1])):
        if sizes[giver] > 1 and taker != giver:
            moved = list(sizes)
            moved[giver] -= 1
            moved[taker] += 1
            yield [range(*bounds) for bounds in pairwise(accumulate(moved, initial=0))]
