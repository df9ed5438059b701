"""Contenders must read the same values. The memory that a model of 200 MB needs besides its own is checked, too."""

from __future__ import annotations

import pytest
import torch

from tests.benchmarks.frame import measure
from tests.benchmarks.streaming import OURS, PLAIN, VERIFIED, cases
from tests.benchmarks.streaming_memory import ALLOWED_BYTES, GROUP_BYTES, peaks_of


def test_all_read_the_same() -> None:
    case = cases("cpu", quick=True)[0]
    measured = measure(case, torch.device("cpu"))
    losses = [measured[name]["warmup_loss"] for name in (PLAIN, OURS, VERIFIED)]
    assert losses[0] == losses[1] == losses[2] > 0


@pytest.mark.parametrize("num_processes", [1, 2])
def test_processes_need_little_private_memory(num_processes: int) -> None:
    """Beyond their shares of 200 MB: two tensors, and two fifths of what may be there with large models."""
    num_tensors = 12
    share = num_tensors * GROUP_BYTES // num_processes
    for peak in peaks_of(num_tensors, num_processes):
        assert share / 2 < peak <= share + 2 * GROUP_BYTES + ALLOWED_BYTES * 2 // 5
