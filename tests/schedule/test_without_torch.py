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
READ_LATER = """
import sys
sys.path.insert(0, ".")
import tests.schedule.conftest, lightning_d9d.schedule
assert "torch" not in sys.modules
from lightning_d9d import ConfigError, D9DStrategy
import lightning_d9d
from lightning.pytorch.strategies import StrategyRegistry
assert isinstance(StrategyRegistry.get("d9d"), D9DStrategy) and lightning_d9d.__version__
"""


def run(code: str) -> str:
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_collecting_imports_no_torch() -> None:
    assert run(COLLECT).splitlines()[-1] == "0"


def test_the_package_is_read_when_it_is_asked_for_more() -> None:
    run(READ_LATER)
