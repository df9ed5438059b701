"""The tests that need no GPU: `python -m tests`, all of them. Arguments of pytest may follow.

- `python -m tests quick` runs the tests that are quick, and ten of two ranks.
- `python -m tests changed` runs the tests that the changes of this branch can break; `--base` is where it began, "main"
  if nothing is said.

Tests of ranks and jobs run beside those of one process. Ranks wait for each other often, and tests of faults for their
time limits: side by side they fill the cores. What runs beside prints when all is over.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time

import pytest

from tests.changed import changed_files, files_above
from tests.harness.quick import SPINE

WITHOUT_GPU = "not gpu and not meshes"
WAITING = "(ranks or jobs)"
QUICK_WALL_SECONDS = 120


def run(arguments: list[str], waiting_only: list[str] | None = None) -> int:
    """Run pytest twice, side by side. Return the exit status of what failed, or 0.

    Args:
        arguments: Go to both.
        waiting_only: More that go to the one with ranks and jobs.
    """
    command = [sys.executable, "-m", "pytest", *arguments, "-m"]
    with tempfile.TemporaryFile("w+") as output:
        waiting = [*command, f"{WAITING} and {WITHOUT_GPU}", *(waiting_only or [])]
        with subprocess.Popen(waiting, stdout=output, stderr=output) as ranks:
            other = subprocess.run([*command, f"not {WAITING} and {WITHOUT_GPU}"], check=False)
        output.seek(0)
        print(output.read())
    ended = {ranks.returncode, other.returncode}
    return max(
        ended - {pytest.ExitCode.NO_TESTS_COLLECTED} if len(ended) > 1 else ended
    )  # what was asked for may be of one


def quick(arguments: list[str]) -> int:
    """Run the quick tests, and say so if they were not. Return the exit status."""
    start = time.monotonic()
    status = run(["--quick", *arguments], sorted({name.split("::")[0] for name in SPINE}))
    took = time.monotonic() - start
    late = (
        f": more than {QUICK_WALL_SECONDS} s, on a busy machine or for slow tests" if took > QUICK_WALL_SECONDS else ""
    )
    print(f"quick tests: {took:.0f} s{late}")
    return status


def changed(arguments: list[str]) -> int:
    """Run the tests that changes since `--base` can break. Return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests changed")
    parser.add_argument("--base", default="main", help="the branch or commit where the changes begin")
    options, others = parser.parse_known_args(arguments)
    files = files_above(changed_files(options.base))
    print(f"{len(files)} files of tests:", *files)
    return run([*others, *files]) if files else 0


def main(arguments: list[str]) -> int:
    """Return the exit status."""
    match arguments:
        case ["quick", *others]:
            return quick(others)
        case ["changed", *others]:
            return changed(others)
    return run(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
