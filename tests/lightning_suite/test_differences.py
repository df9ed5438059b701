"""The list of differences, and how the outcomes of two runs are compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lightning_suite.__main__ import FOLDERS, REPOSITORY, differing, listed, messages, outcomes, report
from tests.lightning_suite.plugin import LOOKS_FOR_FILES, pytest_fixture_setup

NUM_DIFFERENCES = 49
"""The number of differences, which may become smaller and never larger."""


def test_the_list_does_not_grow() -> None:
    assert len(listed()) <= NUM_DIFFERENCES
    assert all(test.startswith(tuple(folder.removesuffix(".py") for folder in FOLDERS)) for test in listed())


def test_the_page_has_the_number_of_the_list() -> None:
    page = (REPOSITORY / "docs/explanation/lightning-compatibility.md").read_text(encoding="utf-8")
    assert f"| failed with `D9DStrategy()` alone | | {len(listed())} |" in page


class FixtureDef:
    """A fixture that pytest is about to set up, as far as the plugin looks at it."""

    cached_result: object = "not set up"

    def __init__(self, argname: str) -> None:
        self.argname = argname

    def cache_key(self, _: object) -> object:
        return self.argname


def test_only_the_fixture_that_looks_for_files_is_left_out() -> None:
    looks, other = FixtureDef(LOOKS_FOR_FILES), FixtureDef("tmp_path")
    assert pytest_fixture_setup(looks, None) is True  # type: ignore[arg-type]
    assert looks.cached_result == (None, LOOKS_FOR_FILES, None)
    assert pytest_fixture_setup(other, None) is None  # type: ignore[arg-type]
    assert other.cached_result == "not set up"


RESULTS = """<testsuites><testsuite>
<testcase classname="tests.tests_pytorch.core.test_a" name="test_good[1]"/>
<testcase classname="tests_pytorch.core.test_a" name="test_bad"><failure message="no">assert 1 == 2</failure></testcase>
<testcase classname="tests_pytorch.core.test_a" name="test_at_the_end"><error message="no"/></testcase>
<testcase classname="tests_pytorch.test_cli" name="test_left"><skipped/></testcase>
</testsuite></testsuites>"""


def test_outcomes_are_read_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.xml").write_text(RESULTS)
    theirs = outcomes(tmp_path / "a.xml")
    assert theirs == {
        "core/test_a::test_good[1]": "passed",
        "core/test_a::test_bad": "failed",
        "core/test_a::test_at_the_end": "failed",
        "test_cli::test_left": "skipped",
    }
    ours = {**theirs, "core/test_a::test_good[1]": "failed"}
    del ours["test_cli::test_left"]
    found = differing(theirs, ours)
    assert found == {
        "core/test_a::test_good[1]": "passed, with D9DStrategy failed",
        "test_cli::test_left": "skipped, with D9DStrategy missing",
    }
    said = messages(tmp_path / "a.xml")
    assert said == {"core/test_a::test_bad": "assert 1 == 2", "core/test_a::test_at_the_end": "no"}
    assert report(found, found, said) == 0
    assert report(found, ["test_cli::test_left"], {"core/test_a::test_good[1]": "assert 3 == 4"}) == 1
    assert report(found, [*found, "core/test_a::test_bad"], said) == 1
    printed = capsys.readouterr().out
    assert "new difference: core/test_a::test_good[1]: passed, with D9DStrategy failed\nassert 3 == 4\n" in printed
    assert "no difference any more: core/test_a::test_bad; take it off differences.toml" in printed
