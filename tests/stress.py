"""Tests whose processes fork or end, over and over, several at a time: `python -m tests.stress --rounds 200 --jobs 3`.

For failures that show once in hundreds of runs on a busy machine. Run more jobs than there are cores. Every round is a
process of its own; what a failing one printed is printed, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = (
    "tests/strategy/test_workers.py",
    "tests/loop/test_uneven_batches.py::test_a_run_goes_on_in_the_middle_of_an_epoch[with workers-2-1]",
    *(
        f"tests/loop/test_shutdown.py::test_{name}"
        for name in (
            "ranks_ignore_ctrl_c_and_a_process_waits_for_threads_of_gloo_at_its_exit",
            "ranks_stop_before_the_same_batch",
            "rank_that_ends_without_a_word",
            "error_of_all_ranks_may_be_caught",
        )
    ),
)


class Loop:
    """Rounds that several threads take one by one.

    Args:
        rounds: How many to run.
        seconds: Begin none after this time.
    """

    def __init__(self, rounds: int, seconds: float) -> None:
        self.failed: list[int] = []
        self.num_run = 0
        self._rounds = iter(range(rounds))
        self._end = time.monotonic() + seconds
        self._lock = threading.Lock()

    def run(self) -> None:
        """Take rounds until there are none."""
        while time.monotonic() < self._end:
            with self._lock:
                if (number := next(self._rounds, None)) is None:
                    return
            ended = subprocess.run(
                [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            with self._lock:
                self.num_run += 1
                if ended.returncode != 0:
                    self.failed.append(number)
                    print(ended.stdout)
                print(f"round {number}: {'failed' if ended.returncode else 'passed'}", flush=True)


def main() -> int:
    """Run the loop and say how it ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no round after this time")
    options = parser.parse_args()
    loop = Loop(options.rounds, options.seconds)
    jobs = [threading.Thread(target=loop.run) for _ in range(options.jobs)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    failed = f"failed: {', '.join(map(str, loop.failed))}" if loop.failed else "none failed"
    print(f"{loop.num_run} rounds, {options.jobs} at a time: {failed}")
    return int(bool(loop.failed))


if __name__ == "__main__":
    sys.exit(main())
