"""litdata's StreamingDataLoader goes on in the middle of an epoch, which a stock Trainer does not let it do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_d9d import D9DStrategy
from tests.harness.ranks import RankContext
from tests.strategy.plain import Plain, trainer
from tests.strategy.test_resume_loaders import Saving, Seeing

ROWS, BATCH = 32, 4
pytestmark = pytest.mark.litdata


def write(folder: Path, share: range = range(ROWS)) -> Path:
    """Chunks of rows that begin with their number; each rank writes its share of them."""
    from litdata.streaming.writer import BinaryWriter

    folder.mkdir(exist_ok=True)
    writer = BinaryWriter(str(folder), chunk_size=4)
    numbers = torch.randn(ROWS, 7, generator=torch.Generator().manual_seed(0))
    for index, row in enumerate(share):
        writer[index] = (torch.cat([torch.tensor([float(row)]), numbers[row]]), row % 4)
    writer.done()
    writer.merge()
    return folder


def fit(folder: Path, num_workers: int, *callbacks: Any, devices: int = 1, path: Any = None, **options: Any) -> Seeing:
    from litdata import StreamingDataLoader, StreamingDataset

    torch.manual_seed(1)
    seeing = Seeing()
    data = StreamingDataset(str(folder), shuffle=True, seed=3, drop_last=False)
    loader = StreamingDataLoader(data, batch_size=BATCH, num_workers=num_workers)
    run = trainer(D9DStrategy(), devices, callbacks=[seeing, *callbacks], **{"max_epochs": 3, **options})
    run.fit(Plain(), loader, ckpt_path=path)
    return seeing


@pytest.mark.parametrize("limit", [1.0, 6])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("batch", [0, 2, 5])
def test_goes_on_exactly(tmp_path: Path, batch: int, num_workers: int, limit: float) -> None:
    """The run resumes in the second epoch. The rest of it and the third have the batches of an uninterrupted run."""
    folder, path = write(tmp_path / "data"), tmp_path / "middle.ckpt"
    whole = fit(folder, num_workers, Saving(batch, path), limit_train_batches=limit)
    resumed = fit(folder, num_workers, path=path, limit_train_batches=limit)
    length = ROWS // BATCH if limit == 1.0 else int(limit)
    assert len(whole.batches) == 3 * length
    assert whole.batches[:length] != whole.batches[length : 2 * length]
    assert resumed.batches == whole.batches[length + batch + 1 :]
    assert resumed.losses == whole.losses[length + batch + 1 :]


@pytest.mark.ranks(2)
def test_each_data_rank_goes_on_with_its_own(rank: RankContext) -> None:
    folder, path = write(rank.tmp_dir / "data", range(rank.rank, ROWS, 2)), rank.tmp_dir / "middle.ckpt"
    whole = fit(folder, 1, Saving(1, path), devices=2)
    resumed = fit(folder, 1, path=path, devices=2)
    length = ROWS // BATCH // 2
    assert resumed.batches == whole.batches[length + 2 :]
    read = [row for share in rank.all_gather_object(whole.batches[:length]) for batch in share for row in batch]
    assert sorted(read) == list(range(ROWS))
