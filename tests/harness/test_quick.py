"""Quick tests are those that the file of durations does not name, and `--write-durations` writes that file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.quick import DURATIONS, SLOW_SECONDS, may_have, merged, refuse_unseen

ROOT = Path(__file__).parents[2]
TESTS = """
import subprocess, sys, time
import pytest

def work(seconds):
    start = time.process_time()
    while time.process_time() - start < seconds:
        pass

@pytest.fixture(scope="module")
def model():
    work(0.5)

def test_fast():
    pass

def test_that_waits():
    time.sleep(0.5)

def test_slow():
    work(0.5)

def test_slow_process():
    subprocess.run([sys.executable, "-c", "import time\\nwhile time.process_time() < 0.5: pass"])

@pytest.mark.parametrize("n", [0, 1])
def test_on_a_model(model, n):
    pass

@pytest.mark.jobs
def test_job():
    work(0.5)
"""
RUN = """
import pathlib, sys, pytest
import tests.harness.quick as quick
quick.DURATIONS = pathlib.Path("durations.json")
quick.QUICK_SECONDS = 0.1
sys.exit(pytest.main([*sys.argv[1:], "-q", "-rA", "-p", "tests.harness.plugin", "-p", "tests.harness.quick"]))
"""
SLOW = ("slow", "slow_process", "on_a_model[0]", "on_a_model[1]")


def run(folder: Path, *arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", RUN, *arguments]
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_slow_tests_are_written_and_left_out(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(TESTS)
    (tmp_path / "durations.json").write_text('{"test_a.py::test_gone": 1.0, "test_b.py::test_other": 1.0}')
    output = run(tmp_path, "--write-durations")
    assert "quick tests took" in output
    written = json.loads((tmp_path / "durations.json").read_text())
    assert written.keys() == {f"test_a.py::test_{name}" for name in SLOW} | {"test_b.py::test_other"}
    assert all(0.4 < seconds < 5 for name, seconds in written.items())

    output = run(tmp_path, "--quick")
    assert "2 passed, 5 deselected" in output
    assert "PASSED test_a.py::test_fast" in output
    assert "PASSED test_a.py::test_that_waits" in output
    assert "quick tests took" not in output


def test_quick_tests_are_chosen_beside_rows_for_meshes() -> None:
    """The table of such rows is compared with all tests of a file, also with those that are not quick."""
    command = [sys.executable, "-m", "pytest", "-q", "--quick", "--collect-only", "tests/strategy/test_pipeline.py"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "test_two_stages_of_ranks_equal_plain_torch[1f1b]" in ended.stdout


def test_merged_durations() -> None:
    old = {"a::gone": 9.0, "a::kept": 8.0, "a::faster": 7.0, "b::x": 6.0}
    ran = {"a::faster": SLOW_SECONDS / 2, "a::new": SLOW_SECONDS}
    assert merged(old, ran, {"a::kept", "a::faster", "a::new"}) == {"a::kept": 8.0, "a::new": SLOW_SECONDS, "b::x": 6.0}


def test_durations_name_tests_of_files_that_are_there() -> None:
    files = {name.split("::")[0] for name in json.loads(DURATIONS.read_text())}
    assert files
    assert not [name for name in files if not (ROOT / name).exists()]


def test_marked_tests_are_in_files_that_their_stream_runs(tmp_path: Path) -> None:
    """Each stream of `python -m tests` collects the files alone that may have its marker."""
    hidden = tmp_path / "test_hidden.py"
    hidden.write_text("def test_x(rank):\n    pass\n")
    named = tmp_path / "test_named.py"
    named.write_text("def test_x(rank: RankContext):\n    pass\n")
    assert not may_have("ranks", hidden)
    assert may_have("ranks", named)

    class Item:
        def __init__(self, path: Path) -> None:
            self.path, self.nodeid = path, path.name

        def get_closest_marker(self, name: str) -> bool:
            return name == "ranks"

    refuse_unseen([Item(named)])  # type: ignore[list-item]
    with pytest.raises(pytest.UsageError, match=r"would not run tests of \['.*test_hidden.py \(ranks\)'\]"):
        refuse_unseen([Item(named), Item(hidden)])  # type: ignore[list-item]


def test_a_name_of_the_spine_that_is_gone_stops_the_run(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(TESTS)
    (tmp_path / "durations.json").write_text("{}")
    code = RUN.replace("quick.QUICK_SECONDS = 0.1", "quick.SPINE = ('test_a.py::test_gone',)")
    command = [sys.executable, "-c", code, "--collect-only"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode != 0
    assert "test_a.py::test_gone" in ended.stdout + ended.stderr
