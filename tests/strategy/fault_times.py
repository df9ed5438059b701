"""Runs the tests of the fault table and writes their times into the page: `python -m tests.strategy.fault_times`."""

from __future__ import annotations

import re
import sys
from collections import defaultdict

import pytest

from tests.strategy.test_faults import PAGE, TABLE, node_id, page_rows

STARTS_THE_RANKS = "tests/strategy/test_restore.py::test_all_ranks_refuse_it"  # which is not to be measured


class Times:
    """From the fault to the end of the last rank where a test prints that, and else all of a test, by node id."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            printed = re.search(r"ended after (\d+\.\d) s", report.capstdout)
            seconds = float(printed[1]) if printed else report.duration
            for name in (report.nodeid, report.nodeid.partition("[")[0]):
                self.seconds[name] = max(self.seconds[name], seconds)


def main() -> int:
    times = Times()
    tests = [test for cell in TABLE if (test := node_id(cell)) is not None]
    exit_code = pytest.main(["-q", STARTS_THE_RANKS, *dict.fromkeys(tests)], plugins=[times])
    if exit_code == 0:
        rows = page_rows(lambda test: f"{times.seconds[test]:.1f}")
        lines = PAGE.read_text().splitlines()
        first = lines.index("|---|---|---|---|---|---|") + 1
        last = next(number for number in range(first, len(lines) + 1) if not "\n".join(lines[number:]).startswith("|"))
        PAGE.write_text("\n".join([*lines[:first], *rows, *lines[last:]]) + "\n")
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
