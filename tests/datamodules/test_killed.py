"""A job that is killed in the middle of an epoch goes on with the rows of one that was not, whatever it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_d9d.data import BufferSortedDataset, ShardedDataset, pad_stack_1d
from tests.datamodules.rows_job import GLOBAL_BATCH, rows_of_steps, train
from tests.datamodules.sources import DATA, Maker, with_packages
from tests.harness.jobs import end_job, start_job

# Loaders of a user's own, of ten batches, which the run that goes on reads with as many workers


class Numbers(Dataset[dict[str, Tensor]]):
    """Rows of different lengths, each with its number."""

    def __len__(self) -> int:
        return 10 * GLOBAL_BATCH

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": torch.full((1 + index * 7 % 11,), index)}

    def sort_key(self, index: int) -> int:
        return len(self[index]["input_ids"])


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter([Numbers()[index] for index in torch.randperm(len(Numbers())).tolist()])


def padded(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {"input_ids": pad_stack_1d([item["input_ids"] for item in items], pad_value=-1)}


def shard() -> Dataset[Any]:
    return ShardedDataset(Numbers(), total_shards=2, current_shard=1, pad_to_equal_size_across_shards=False)


class Own(L.LightningDataModule):
    """A loader, whose order is drawn from another seed in each run."""

    def __init__(self, make: Callable[[], Any], seed: int) -> None:
        super().__init__()
        self.make, self.seed = make, seed

    def train_dataloader(self) -> Any:
        torch.manual_seed(self.seed)
        return self.make()


OPTIONS: dict[str, Any] = {"batch_size": GLOBAL_BATCH, "collate_fn": padded, "num_workers": 1}
LOADERS: dict[str, Callable[[], Any]] = {
    "map-style": lambda: DataLoader(Numbers(), shuffle=True, **OPTIONS),
    "stream": lambda: DataLoader(Stream(), **OPTIONS),
    "stateful": lambda: StatefulDataLoader(Numbers(), shuffle=True, **OPTIONS),
    "sorted by length": lambda: StatefulDataLoader(BufferSortedDataset(Numbers(), 40, GLOBAL_BATCH), **OPTIONS),
    "shard": lambda: DataLoader(shard(), shuffle=True, **OPTIONS),
}


def own(name: str, seed: int) -> Own:
    return Own(LOADERS[name], seed)


def of_litdata(folder: Path) -> Maker:
    from litdata.streaming.writer import BinaryWriter

    (folder / "data").mkdir()
    writer = BinaryWriter(str(folder / "data"), chunk_size=4)
    for index in range(len(Numbers())):
        writer[index] = {"input_ids": torch.full((3,), index)}
    writer.done()
    writer.merge()
    return partial(litdata, str(folder / "data"))


def litdata(folder: str, seed: int) -> Own:
    return Own(partial(litdata_loader, folder), seed)


def litdata_loader(folder: str) -> Any:
    from litdata import StreamingDataLoader, StreamingDataset

    data = StreamingDataset(folder, shuffle=True, seed=3, drop_last=False)
    return StreamingDataLoader(data, batch_size=GLOBAL_BATCH, num_workers=1)


OWN: dict[str, Callable[[Path], Maker]] = {
    **{name: lambda folder, name=name: partial(own, name) for name in LOADERS},
    "litdata": of_litdata,
}


@pytest.mark.jobs
@pytest.mark.parametrize("kind", with_packages([*DATA, *OWN]))
def test_after_sigkill(tmp_path: Path, kind: str) -> None:
    """Loaders have one worker. Other tests read the data of a data module without workers."""
    data, folders = {**DATA, **OWN}[kind](tmp_path), [tmp_path / name for name in ("killed", "after", "whole")]
    for folder in folders:
        folder.mkdir()
    killed, after, whole = folders
    job = start_job(1, killed, train, killed, partial(data, 1), 1, {"killed_at": 7})
    assert end_job(job, seconds=120) == [-9]
    before = rows_of_steps(killed)
    assert len(before) == 8
    train(after, partial(data, 0), 1, {"resumed": killed / "step=6.ckpt", "max_steps": 12})
    train(whole, partial(data, 1 if kind in OWN else 0), 1, {"max_steps": 12})
    assert rows_of_steps(after)[:2] == before[6:]
    assert before[:6] + rows_of_steps(after) == rows_of_steps(whole)
    assert len(rows_of_steps(whole)) == 12
    assert len({str(rows) for rows in rows_of_steps(whole)}) > 5
