"""Reports of jobs that hang: who keeps the others waiting, and where all ranks are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.strategy.fault_table import PAGE
from tests.strategy.hangs import HANGS, page_rows

IN_CI = ("endless Python loop", "C call that holds the interpreter", "another order")


@pytest.mark.jobs
@pytest.mark.parametrize("name", IN_CI)
def test_a_job_that_hangs_says_where_it_is(name: str, tmp_path: Path) -> None:
    HANGS[name].run(tmp_path)


def test_the_page_shows_the_table_of_hangs() -> None:
    shown = [re.sub(r" \| \d+\.\d \| (?=\d+ \|$)", " | ? | ", row) for row in PAGE.read_text().splitlines()]
    rows = page_rows(lambda name: "?")
    assert [row for row in shown if row in rows] == rows
