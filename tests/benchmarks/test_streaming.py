"""That what is compared reads the same values, and what a model of 200 MB needs besides its own memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.benchmarks.frame import measure
from tests.benchmarks.streaming import OURS, PLAIN, VERIFIED, cases
from tests.benchmarks.streaming_memory import GROUP_BYTES, load_and_export, make_files
from tests.harness.ranks import RankContext


def test_all_read_the_same() -> None:
    case = cases("cpu", quick=True)[0]
    measured = measure(case, torch.device("cpu"))
    losses = [measured[name]["warmup_loss"] for name in (PLAIN, OURS, VERIFIED)]
    assert losses[0] == losses[1] == losses[2] > 0


NUM_TENSORS = 12
ALLOWED = 2 * GROUP_BYTES + 40 * 10**6
"""Beyond the share of 200 MB: two tensors, and a fifth of what may be there with large models."""


def test_one_process_needs_little_private_memory(tmp_path: Path) -> None:
    make_files(NUM_TENSORS, tmp_path / "files")
    share = NUM_TENSORS * GROUP_BYTES
    assert share / 2 < load_and_export(NUM_TENSORS, tmp_path / "files", tmp_path / "exported") <= share + ALLOWED


@pytest.mark.ranks(2)
def test_each_rank_needs_little_private_memory(rank: RankContext, tmp_path: Path) -> None:
    make_files(NUM_TENSORS, tmp_path / "files")
    share = NUM_TENSORS * GROUP_BYTES // 2
    assert load_and_export(NUM_TENSORS, tmp_path / "files", tmp_path / "exported") <= share + ALLOWED
