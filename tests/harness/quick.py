"""The options `--quick` and `--write-durations`: tests that are quick, and how it is known which are.

`tests/durations.json` has the tests of one process that are slow, with their seconds. `--write-durations` writes it.
Seconds are processor time, of pytest and of the processes that it has waited for: a busy machine changes them little.
"""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

DURATIONS = Path(__file__).parents[1] / "durations.json"
SLOW_SECONDS = 0.1
QUICK_SECONDS = 90.0
"""What the quick tests of one process may take in each of two streams. Starting and collecting come on top."""
EQUALITY = "tests/meshes/test_equality.py::test_a_mesh_trains_as_one_process_does"
SPINE = (
    f"{EQUALITY}[rep2]",
    f"{EQUALITY}[shard2,mb2,acc2]",
    f"{EQUALITY}[shard2,mb2,tied,reshard_after_forward=True]",
    f"{EQUALITY}[rep2-ep2]",
    f"{EQUALITY}[tp2]",
    f"{EQUALITY}[cp2,heads2x2]",
    "tests/strategy/test_pipeline.py::test_two_stages_of_ranks_equal_plain_torch[1f1b]",
    "tests/strategy/test_ties.py::test_tied_parameters_start_equal_and_get_the_sum_of_their_gradients",
    "tests/strategy/test_resume.py::test_two_ranks[Dropping]",
    "tests/strategy/test_pipeline_faults.py::test_ranks_that_all_raise_can_run_again",
)
"""The tests of two ranks that are quick: each axis, accumulation, tied parameters, save and resume, a failure."""
NAMED_BY = {"ranks": ("mark.ranks", "RankContext"), "jobs": ("mark.jobs",)}
"""The words of a file whose tests have a marker, by marker. Cases of a table may bring the marker along."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="only the tests that are quick, and a few of two ranks")
    parser.addoption("--write-durations", action="store_true", help=f"note in {DURATIONS.name} which tests are slow")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(QuickTests(config), "quick-tests")


def may_have(marker: str, file: Path) -> bool:
    """Return whether a test of the file may have the marker "ranks" or "jobs", which runs in a stream of its own."""
    text = file.read_text()
    return any(name in text for name in NAMED_BY[marker])


def refuse_unseen(items: Iterable[pytest.Item]) -> None:
    """Refuse tests in files that do not show their marker to `may_have`.

    Raises:
        pytest.UsageError: With the files.
    """
    marked = {(marker, item.path) for item in items for marker in NAMED_BY if item.get_closest_marker(marker)}
    if unseen := [f"{file} ({marker})" for marker, file in sorted(marked) if not may_have(marker, file)]:
        raise pytest.UsageError(
            f"`python -m tests` would not run tests of {unseen}: name the marker there, see NAMED_BY in {__name__}"
        )


def merged(old: Mapping[str, float], ran: Mapping[str, float], collected: Collection[str]) -> dict[str, float]:
    """Return the seconds of slow tests: of those that ran now, else the old ones.

    What `old` has of a file that was collected, and that is not in the file any more, is left out.
    """
    files = {_file(name) for name in collected}
    kept = {name: seconds for name, seconds in old.items() if name in collected or _file(name) not in files}
    return {name: seconds for name, seconds in sorted((kept | dict(ran)).items()) if seconds >= SLOW_SECONDS}


class QuickTests:
    """Times the tests of one process, chooses the quick ones, and says when those have become slow."""

    def __init__(self, config: pytest.Config) -> None:
        self._chooses = bool(config.getoption("quick"))
        self._writes = bool(config.getoption("write_durations"))
        self._slow: dict[str, float] = json.loads(DURATIONS.read_text())
        self._collected: set[str] = set()
        self._seconds: dict[str, float] = {}
        self._fixtures: dict[Any, float] = {}
        """What each fixture took that several tests share."""
        self._shared = 0.0
        """What such fixtures took within the test that runs."""

    @pytest.hookimpl(tryfirst=True)  # before the option -m leaves some out
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        self._collected = {item.nodeid for item in items}
        files = {_file(name) for name in self._collected}
        missing = [name for name in SPINE if _file(name) in files and name not in self._collected]
        if missing and not any("::" in argument for argument in config.args):
            raise pytest.UsageError(f"there are no tests {missing}, which SPINE in {__name__} names: mend it")
        refuse_unseen(items)
        if self._chooses:
            config.hook.pytest_deselected(items=[item for item in items if not self._is_quick(item)])
            items[:] = [item for item in items if self._is_quick(item)]

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
        start, before = _now(), self._shared
        result = yield
        if fixturedef.scope != "function":
            self._fixtures[fixturedef] = _now() - start - (self._shared - before)
            self._shared += self._fixtures[fixturedef]
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        start, self._shared = _now(), 0.0
        result = yield
        if isinstance(item, pytest.Function) and _is_alone(item):
            own = _now() - start - self._shared
            used = [self._fixtures.get(each[-1], 0.0) for each in item._fixtureinfo.name2fixturedefs.values()]
            self._seconds[item.nodeid] = round(own + sum(used), 2)  # as if it had run alone
        return result

    def pytest_sessionfinish(self) -> None:
        if self._writes and self._seconds:
            written = json.dumps(merged(self._slow, self._seconds, self._collected), indent=0)
            DURATIONS.write_text(written + "\n")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        quick = {name: seconds for name, seconds in self._seconds.items() if name not in self._slow}
        if (total := sum(quick.values())) > QUICK_SECONDS:
            terminalreporter.section("quick tests")
            terminalreporter.line(
                f"quick tests took {total:.0f} s of processor time, {QUICK_SECONDS:.0f} s at most: make the slowest "
                "faster, or let `python -m tests --write-durations` take them out"
            )
            for name in sorted(quick, key=quick.__getitem__, reverse=True)[:10]:
                terminalreporter.line(f"{quick[name]:6.2f} s {name}")

    def _is_quick(self, item: pytest.Item) -> bool:
        return item.nodeid in SPINE or (_is_alone(item) and item.nodeid not in self._slow)


def _is_alone(item: pytest.Item) -> bool:
    """Return False where other processes have a part in a test: their time is not seen here."""
    return item.get_closest_marker("ranks") is None and item.get_closest_marker("jobs") is None


def _file(name: str) -> str:
    return name.split("::")[0]


def _now() -> float:
    waited_for = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + waited_for.ru_utime + waited_for.ru_stime
