"""Data modules of every kind give the same stream to any number of worker processes, and of data ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.datamodules.rows_job import GLOBAL_BATCH
from tests.datamodules.runs import run_of
from tests.datamodules.sources import DATA, Maker, with_packages

Row = tuple[int, ...]


def steps(data: Maker, num_workers: int, num_ranks: int) -> list[list[Row]]:
    """The rows of each global batch of the second epoch, in an order of their own, without padding."""
    shares = []
    for rank in range(num_ranks):
        module = data(num_workers)
        module.trainer = run_of(num_ranks, rank, is_global_zero=False)
        module.setup("fit")
        loader = module.train_dataloader()
        loader.sampler.set_epoch(1)
        shares.append([[row(each.tolist()) for each in batch["input_ids"]] for batch in loader])
    return [sorted(row for part in parts for row in part) for parts in zip(*shares, strict=True)]


def row(ids: list[int]) -> Row:
    """Return a row without the zeros at its end: ranks pad to different lengths."""
    return tuple(ids[: max((place + 1 for place, each in enumerate(ids) if each), default=0)])


@pytest.mark.parametrize("kind", with_packages(DATA))
def test_workers_and_ranks_change_nothing(tmp_path: Path, kind: str) -> None:
    data = DATA[kind](tmp_path)
    whole = steps(data, 0, 1)
    assert len(whole) > 10
    assert {len(rows) for rows in whole} == {GLOBAL_BATCH}
    assert len({each for rows in whole for each in rows}) > 2 * len(whole)
    for num_workers, num_ranks in ((1, 1), (4, 1), (0, 2), (1, 4)):
        assert steps(data, num_workers, num_ranks) == whole, (num_workers, num_ranks)
