"""Runs the tests of the fault tables and writes their times into the page: `python -m tests.strategy.fault_times`."""

from __future__ import annotations

import re
import sys
from collections import defaultdict

import pytest

from tests.strategy import test_faults, test_pipeline_faults
from tests.strategy.fault_table import PAGE

STARTS_THE_RANKS = "tests/strategy/test_restore.py::test_all_ranks_refuse_it"  # which is not to be measured


class Times:
    """Seconds by node id: from the fault to the end of the last rank if the test prints them, else those of the whole
    test."""

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
    tables = [test_faults.TABLE, test_pipeline_faults.TABLE]
    tests = [test for table in tables for test in table.node_ids]
    exit_code = pytest.main(["-q", STARTS_THE_RANKS, *dict.fromkeys(tests)], plugins=[times])
    if exit_code == 0:
        lines = PAGE.read_text().splitlines()
        heads = [number for number, line in enumerate(lines) if line == "|---|---|---|---|---|---|"]
        for head, table in reversed([*zip(heads, tables, strict=True)]):
            last = next(number for number in range(head, len(lines) + 1) if not "".join(lines[number:][:1]))
            lines[head + 1 : last] = table.page_rows(lambda test: f"{times.seconds[test]:.1f}")
        PAGE.write_text("\n".join(lines) + "\n")
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
