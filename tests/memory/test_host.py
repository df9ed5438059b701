"""The memory that a fit takes of the host."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_d9d import ConfigError
from lightning_d9d.memory import HostMemory, check_host, host, host_bytes
from lightning_d9d.memory.step import GIB


def test_what_cannot_fit_is_refused_and_what_is_close_is_said() -> None:
    needed = HostMemory(checkpoint=100 * GIB, inputs=20 * GIB)
    assert check_host(needed, 200 * GIB, 180 * GIB) is None
    note = check_host(needed, 200 * GIB, 130 * GIB)
    assert note is not None
    assert "needs at least 120.0 GiB of the host's memory, of which 130.0 GiB are free: checkpoint 100.0 GiB, " in note
    with pytest.raises(ConfigError, match=r"which has 119\.0 GiB: .*inputs 20\.0 GiB; give CheckpointConfig\(async"):
        check_host(needed, 119 * GIB, 119 * GIB)
    with pytest.raises(ConfigError, match=r'recompute="full"'):
        check_host(HostMemory(inputs=2), 1, 1)
    assert check_host(HostMemory(), 1, 1) is None


def test_a_limit_of_the_group_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(host, "_MEMORY_FILES", (tmp_path / "missing", limit))
    limit.write_text("max\n")
    whole = host_bytes()
    assert whole is not None
    assert 0 < whole[1] <= whole[0]
    limit.write_text("1000\n")
    assert host_bytes() == (1000, 1000)
