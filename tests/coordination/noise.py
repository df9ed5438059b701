"""How often ranks are named under noise: `python -m tests.coordination.noise` prints the table of the page."""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Iterator
from itertools import islice

from lightning_d9d.coordination.stragglers import NUM_BLOCKS, Comparison, Times, of_block

THRESHOLD, STEPS_OF_BLOCK = 0.1, 2  # those of a `Stragglers()` without arguments
SLOWER = 0.2

Noise = Callable[[random.Random], Iterator[float]]
"""Makes the times of one rank's blocks, which are 1 without noise."""


def independent(deviation: float, has_heavy_tails: bool = False) -> Noise:
    """Steps are normal, or have Student's distribution of three degrees of freedom, with this standard deviation."""

    def step(chance: random.Random) -> float:
        value = chance.gauss(0, 1)
        if has_heavy_tails:
            value /= math.sqrt(chance.gammavariate(1.5, 2))
        return max(0.0, 1 + deviation * value)

    def blocks(chance: random.Random) -> Iterator[float]:
        while True:
            yield of_block([step(chance) for _ in range(STEPS_OF_BLOCK)])

    return blocks


def drifting(deviation: float, length: float) -> Noise:
    """Blocks have this standard deviation, and their correlation falls by a factor e over `length` blocks."""

    def blocks(chance: random.Random) -> Iterator[float]:
        kept = math.exp(-1 / length)
        drift = chance.gauss(0, deviation)
        while True:
            yield max(0.0, 1 + drift)
            drift = kept * drift + math.sqrt(1 - kept**2) * chance.gauss(0, deviation)

    return blocks


def bursts(length: int, share: float) -> Noise:
    """Other work makes `length` blocks take 30 % longer, after pauses at random; this share of all blocks is slow."""

    def blocks(chance: random.Random) -> Iterator[float]:
        usual = independent(0.1)(chance)
        pause = length * (1 - share) / share
        while True:
            yield from islice(usual, int(chance.expovariate(1 / pause)))
            yield from (1.3 * block for block in islice(usual, length))

    return blocks


def share_named(noise: Noise, num_ranks: int, num_reports: int, slower: float = 0.0) -> float:
    """Return the share of reports that name a rank: any of an even run, or the last, if it is slower.

    Args:
        noise: Of each rank.
        num_ranks: That do the same work.
        num_reports: How many are tried. Each is compared with the one before.
        slower: By what share the last rank takes longer.
    """
    comparison, nothing = Comparison(THRESHOLD), [0.0] * NUM_BLOCKS
    ranks = [noise(random.Random(rank)) for rank in range(num_ranks)]
    factors = [1.0] * (num_ranks - 1) + [1 + slower]
    num_named = 0
    for _ in range(num_reports + 1):  # the first has none before it and names nobody
        works = [
            [factor * block for block in islice(rank, NUM_BLOCKS)] for rank, factor in zip(ranks, factors, strict=True)
        ]
        found = comparison.add([Times("node", 0, work, nothing, nothing, nothing, nothing) for work in works])
        named = {each.rank for each in found}
        num_named += num_ranks - 1 in named if slower else bool(named)
    return num_named / num_reports


ROWS = {
    "steps of 10 %": independent(0.1),
    "steps of 14 %, so blocks of 10 %": independent(0.14),
    "steps of 20 %": independent(0.2),
    "steps of 20 %, heavy tails": independent(0.2, has_heavy_tails=True),
    "blocks of 5 %, that last 6 blocks": drifting(0.05, 6),
    "blocks of 5 %, that last half a report": drifting(0.05, 24),
    "blocks of 5 %, that last a report": drifting(0.05, 48),
    "bursts of a quarter of a report": bursts(12, 0.1),
    "bursts of a report": bursts(48, 0.1),
    "bursts of two reports": bursts(96, 0.1),
}


def main() -> None:
    """Print a row for each noise: false names an even report, and how often a slow rank is named by two reports."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--reports", type=int, default=20000, help="of two ranks; of more ranks fewer in proportion")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 8, 64])
    parser.add_argument("--rows", default="", help="only rows with this in their name")
    options = parser.parse_args()
    for name in (each for each in ROWS if options.rows in each):
        cells = [name]
        for ranks in options.ranks:
            num_reports = 2 * options.reports // ranks
            false = share_named(ROWS[name], ranks, num_reports)
            named = share_named(ROWS[name], ranks, -(-num_reports // 10), SLOWER)
            cells.append(f"{false * num_reports:.0f} of {num_reports}, {named:.1%}")
        print("|", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
