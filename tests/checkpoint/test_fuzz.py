"""Files changed at random are read or refused: with the package's own errors, soon, and with little memory."""

from __future__ import annotations

import re
import time
import warnings
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from lightning_d9d.errors import ConfigError, StateError
from tests.checkpoint.fuzz_targets import TARGETS

MAX_SECONDS = 2
MAX_BYTES = 200 * 2**20


def memory(peak: bool) -> int:
    status = Path("/proc/self/status").read_text()
    found = re.search(rf"{'VmHWM' if peak else 'VmRSS'}:\s+(\d+) kB", status)
    assert found is not None
    return 1024 * int(found[1])


@pytest.mark.parametrize("name", TARGETS)
def test_changed_files(tmp_path: Path, name: str) -> None:
    mutated, valid, read = TARGETS[name]
    path = tmp_path / "checkpoint"
    content = valid(path)
    read(path, content)

    @settings(
        max_examples=100,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def check(data: st.DataObject) -> None:
        changed = data.draw(mutated(content))
        Path("/proc/self/clear_refs").write_text("5")  # what was the peak is forgotten
        before, begin = memory(peak=False), time.process_time()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                read(path, changed)
        except (StateError, ConfigError):
            pass
        assert time.process_time() - begin < MAX_SECONDS
        assert memory(peak=True) - before < MAX_BYTES

    check()
