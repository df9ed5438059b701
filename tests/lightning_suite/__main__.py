"""Lightning's own tests, with its choice of strategy and with `D9DStrategy()`: `python -m tests.lightning_suite PATH`.

PATH is a checkout of the Lightning repository at the tag of the installed release, or the nearest one. The outcomes of
the two runs are compared test by test. Their differences must be those in `differences.toml`, no more and no fewer.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import tomllib
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import lightning as L
import pytest
import torch

REPOSITORY = Path(__file__).parents[2]
DIFFERENCES = Path(__file__).with_name("differences.toml")
FOLDERS = (
    *("callbacks", "checkpointing", "core", "loops", "models", "overrides", "plugins", "profilers", "trainer", "tuner"),
    *("utilities", "test_cli.py"),
)
LEFT_OUT = {
    "checkpointing/test_legacy_checkpoints.py": "needs files of old releases, which the repository does not have",
    "utilities/migration/test_utils.py": "the same",
    "models/test_onnx.py": "needs packages for ONNX",
}
SECONDS_A_TEST = 60


def main() -> int:
    """0 if the differences are the listed ones."""
    parser = argparse.ArgumentParser(prog="python -m tests.lightning_suite", description=__doc__)
    parser.add_argument("checkout", type=Path, help="a checkout of the Lightning repository")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes that run tests")
    arguments = parser.parse_args()
    tests = arguments.checkout.resolve() / "tests"
    if not (tests / "tests_pytorch" / "conftest.py").exists():
        parser.error(f"{arguments.checkout} has no tests/tests_pytorch; give a checkout of the Lightning repository")
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests send it; under `nohup` they would find it ignored
    print(f"Lightning {L.__version__}, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        theirs = run(tests, Path(folder, "theirs.xml"), arguments.workers)
        before = files(tests)
        ours = run(tests, Path(folder, "ours.xml"), arguments.workers, "--d9d")
        said = messages(Path(folder, "ours.xml"))
        left = files(tests) - before
    for name, outcomes in (("Lightning's choice", theirs), ("D9DStrategy()", ours)):
        print(f"{name}: {', '.join(f'{count} {what}' for what, count in sorted(Counter(outcomes.values()).items()))}")
    for path in sorted(left):
        print(f"left behind with D9DStrategy() alone: {path}")
    return report(differing(theirs, ours), listed(), said) or int(bool(left))


def files(folder: Path) -> set[Path]:
    """The files and folders below a folder, but for compiled modules."""
    return {path for path in folder.rglob("*") if "__pycache__" not in path.parts}


def run(tests: Path, results: Path, workers: int, *options: str) -> dict[str, str]:
    """The outcome of each test, by its name. End if pytest has not run them all."""
    command = [
        *(sys.executable, "-m", "pytest", "-p", "tests.lightning_suite.plugin", *options),
        *(f"tests_pytorch/{each}" for each in FOLDERS),
        *(f"--ignore=tests_pytorch/{each}" for each in LEFT_OUT),
        # Native tracebacks: others parse whole files, for which Python before 3.11.5 may end a worker (gh-106905).
        *("-n", str(workers), "--timeout", str(SECONDS_A_TEST), "-q", "--tb=native", "-o", "addopts=--strict-markers"),
        f"--junitxml={results}",
    ]
    path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    ended = subprocess.run(command, cwd=tests, env=environment, stdout=subprocess.DEVNULL, check=False)
    if ended.returncode > pytest.ExitCode.TESTS_FAILED or ended.returncode < 0:
        sys.exit(f"pytest ended with {ended.returncode} before all tests had run, whose outcomes would say nothing")
    return outcomes(results)


def outcomes(results: Path) -> dict[str, str]:
    """What a JUnit file says of each test: passed, failed or skipped."""
    found = {}
    for case in ElementTree.parse(results).iter("testcase"):
        kinds = {child.tag for child in case}
        found[_name(case)] = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
    return found


def messages(results: Path) -> dict[str, str]:
    """The text of each failure in a JUnit file, by the name of the test."""
    return {_name(case): text for case in ElementTree.parse(results).iter("testcase") if (text := _text(case))}


def _text(case: ElementTree.Element) -> str:
    return "\n".join(child.text or child.get("message", "") for child in case if child.tag in ("failure", "error"))


def _name(case: ElementTree.Element) -> str:
    file = case.get("classname", "").split("tests_pytorch.", 1)[-1].replace(".", "/")
    return f"{file}::{case.get('name')}"


def differing(theirs: Mapping[str, str], ours: Mapping[str, str]) -> dict[str, str]:
    """The tests with another outcome, and both outcomes."""
    names = sorted({*theirs, *ours})
    pairs = {name: (theirs.get(name, "missing"), ours.get(name, "missing")) for name in names}
    return {name: f"{first}, with D9DStrategy {second}" for name, (first, second) in pairs.items() if first != second}


def listed() -> dict[str, str]:
    """The known differences: tests and their reasons."""
    entries = tomllib.loads(DIFFERENCES.read_text(encoding="utf-8"))["difference"]
    return {test: entry["reason"] for entry in entries for test in entry["tests"]}


def report(found: Mapping[str, str], known: Iterable[str], said: Mapping[str, str]) -> int:
    """Print what changed, with the text of new failures; 0 if nothing did."""
    known = set(known)
    new, gone = sorted(found.keys() - known), sorted(known - found.keys())
    for name in new:
        print(f"new difference: {name}: {found[name]}\n{said.get(name, '')}".rstrip())
    for name in gone:
        print(f"no difference any more: {name}; take it off {DIFFERENCES.name}")
    print(f"{len(found)} differences, {len(known)} listed, {len(new)} new, {len(gone)} gone")
    return int(bool(new or gone))


if __name__ == "__main__":
    sys.exit(main())
