"""Kill jobs at random moments: `python -m tests.chaos --kills 200 --jobs 4`.

Each of several loops has its share of the kills, jobs of its own and another seed. If a checkpoint that was left
cannot be read, or a job does not end with the right weights, the traceback is printed and the exit code is 1.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.chaos.kill import Report, run


def main() -> int:
    """Run the loops side by side and say how they ended."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="loops side by side, each of two to four processes")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="kill nothing after this time")
    options = parser.parse_args()
    shares = [options.kills // options.jobs + (i < options.kills % options.jobs) for i in range(options.jobs)]
    total, num_failed = Report(), 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as loops:
        running = [
            loops.submit(run, Path(folder) / f"loop {i}", share, options.seed + i, True, options.seconds)
            for i, share in enumerate(shares)
        ]
        for number, each in enumerate(running):
            try:
                total += each.result()
            except Exception:
                num_failed += 1
                print(f"loop {number}, seed {options.seed + number}, failed:\n{traceback.format_exc()}", flush=True)
    print(f"{total}; {num_failed} of {options.jobs} loops failed")
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
