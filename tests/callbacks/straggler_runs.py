"""Real runs of two ranks, and whom `Stragglers` names: `python -m tests.callbacks.straggler_runs even.json`.

With `--slow 1` rank 1 needs a fifth more processor time in each step. Blocks of its reports are single steps. They are
put together for reports of other lengths, and `Comparison` sees these. `--only-read` does that for earlier files.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_d9d import D9DStrategy
from lightning_d9d.callbacks import Stragglers
from lightning_d9d.coordination.stragglers import ALL_PARTS, NUM_BLOCKS, Comparison, Times, of_block
from tests.strategy.plain import Plain, rows, trainer

THRESHOLD, SLOWER = 0.1, 0.2


class Working(Plain):
    """Multiplies matrices for so many rounds in each step, about 0.1 ms each, and then counts on if it is slow."""

    def __init__(self, num_rounds: int, is_slow: bool) -> None:
        super().__init__()
        self.num_rounds, self.is_slow = num_rounds, is_slow
        self.since = time.thread_time()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            matrix = torch.eye(160)
            for _ in range(self.num_rounds):
                matrix = matrix @ matrix
        if self.is_slow:
            now = time.thread_time()
            end = now + SLOWER * (now - self.since)  # since the same place in the step before
            while time.thread_time() < end:
                pass
            self.since = time.thread_time()
        return super().training_step(batch, batch_idx)


def run(file: Path, seconds: float, num_rounds: int, slow: int | None) -> None:
    """Train for so long on two ranks, and write all times to the file."""
    rank = int(os.environ.get("LOCAL_RANK", 0))
    stragglers = Stragglers(every_n_steps=NUM_BLOCKS)
    load = os.getloadavg()[0]
    fit = trainer(D9DStrategy(), 2, max_epochs=-1, max_time={"seconds": seconds}, callbacks=[stragglers])
    module = Working(num_rounds, rank == slow)
    fit.fit(module, DataLoader(rows(1000), batch_size=2))
    if rank == 0:
        steps = [[asdict(times) for times in report] for report in stragglers.reports]
        file.write_text(json.dumps({"slow": slow, "load": [load, *os.getloadavg()[1:2]], "steps": steps}))


def reports(steps: list[list[dict[str, Any]]], every_n_steps: int) -> Iterator[list[Times]]:
    """Return the reports that the run would have made every so many steps."""
    ranks = [
        {part: [step for report in steps for step in report[rank][part]] for part in ALL_PARTS}
        for rank in range(len(steps[0]))
    ]
    size = every_n_steps // NUM_BLOCKS
    for begin in range(0, len(ranks[0]["compute"]) - every_n_steps + 1, every_n_steps):
        places = range(begin, begin + every_n_steps, size)
        yield [
            Times(
                "node", 0, **{part: [of_block(parts[part][place : place + size]) for place in places] for part in parts}
            )
            for parts in ranks
        ]


def show(file: Path) -> None:
    """Print the conditions, and whom reports of several lengths name."""
    found = json.loads(file.read_text())
    steps = found["steps"]
    means = [
        {part: 1000 * fmean(step for report in steps for step in report[rank][part]) for part in ALL_PARTS}
        for rank in range(len(steps[0]))
    ]
    print(
        f"{file}: {sum(len(report[0]['compute']) for report in steps)} steps, "
        f"load {found['load']}, slow: {found['slow']}"
    )
    for rank, parts in enumerate(means):
        print(f"rank {rank}: " + ", ".join(f"{part} {value:.2f} ms" for part, value in parts.items()))
    for every_n_steps in (48, 96, 192, 384):
        comparison = Comparison(THRESHOLD)
        named = [[each.rank for each in comparison.add(report)] for report in reports(steps, every_n_steps)][1:]
        right = sum(each == [found["slow"]] for each in named)
        wrong = sum(any(rank != found["slow"] for rank in each) for each in named)
        print(f"every_n_steps={every_n_steps}: {len(named)} reports, {right} name the slow rank, {wrong} another")


def main() -> int:
    """Run and show."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--rounds", type=int, default=200, help="of work in a step")
    parser.add_argument("--slow", type=int, help="the rank that needs a fifth more")
    parser.add_argument("--only-read", action="store_true")
    options = parser.parse_args()
    if not options.only_read:
        run(options.file, options.seconds, options.rounds, options.slow)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        show(options.file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
