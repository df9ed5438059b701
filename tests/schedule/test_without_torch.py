"""The tests of schedules start without torch and Lightning, which take longer to import than these tests to run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
COLLECT = """
import sys, pytest
ended = pytest.main(["tests/schedule", "--collect-only", "-q", "-p", "no:cacheprovider"])
print(ended, *sorted({"torch", "lightning"} & sys.modules.keys()))
"""


def run(code: str) -> str:
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_collecting_imports_no_torch() -> None:
    assert run(COLLECT).splitlines()[-1] == "0"
