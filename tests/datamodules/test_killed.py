"""A job that is killed in the middle of an epoch goes on with the rows of one that was not, whatever it reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_d9d.data import BufferSortedDataset, ShardedDataset, TokenFileWriter, pad_stack_1d
from lightning_d9d.datamodules import ByteTextDataModule, TokenDataModule
from tests.data.chats import write_chats
from tests.datamodules.rows_job import GLOBAL_BATCH, SEQUENCE_LENGTH, chats, rows_of_steps, tokens, train
from tests.harness.jobs import end_job, start_job

Maker = Callable[[int], L.LightningDataModule]
"""Makes the data of a run for a number of worker processes."""
TEXTS = [f"text {number} " * (1 + number % 5) for number in range(60)]


def of_tokens(folder: Path) -> Maker:
    writer = TokenFileWriter(folder / "text")
    writer.add(np.arange(first, first + first % 30) for first in range(1000))
    writer.finish()
    return partial(tokens, {str(folder / "text"): 1.0})


def of_tokens_without_index(folder: Path) -> Maker:
    (folder / "train.bin").write_bytes(np.arange(5000, dtype=np.uint16).tobytes())
    return partial(tokens, {str(folder / "train.bin"): 1.0}, borders=False)


def of_json_lines(folder: Path) -> Maker:
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return partial(texts, str(folder / "a.jsonl"))


def of_parquet(folder: Path) -> Maker:
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), folder / "a.parquet", row_group_size=25)
    return partial(texts, str(folder / "a.parquet"))


def texts(path: str, num_workers: int) -> TokenDataModule:
    cache = str(Path(path).with_name("cache"))
    return tokens({path: 1.0}, num_workers, tokenizer="bytes", cache_folder=cache)


def of_bytes(folder: Path) -> Maker:
    (folder / "a.py").write_text("".join(TEXTS))
    return partial(byte_text, str(folder))


def byte_text(folder: str, num_workers: int) -> ByteTextDataModule:
    sizes = {"sequence_length": SEQUENCE_LENGTH, "global_batch_size": GLOBAL_BATCH}
    return ByteTextDataModule(folder, num_workers=num_workers, validation_fraction=0.1, **sizes)


def of_chats(folder: Path, packing: bool) -> Maker:
    return partial(chats, str(write_chats(folder / "chats.jsonl", 240)), packing)


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


def of_litdata_tokens(folder: Path) -> Maker:
    from litdata.streaming import Cache
    from litdata.streaming.item_loader import TokensLoader

    (folder / "data").mkdir()
    cache: Any = Cache(str(folder / "data"), chunk_size=909, item_loader=TokensLoader())
    for number in range(20):
        cache._add_item(number, torch.arange(200 * number, 200 * (number + 1)).int())
    cache.done()
    cache.merge()
    return partial(tokens, {str(folder / "data"): 1.0}, borders=False)


DATA: dict[str, Callable[[Path], Maker]] = {
    "tokens": of_tokens,
    "tokens without index": of_tokens_without_index,
    "JSON lines": of_json_lines,
    "Parquet": of_parquet,
    "bytes": of_bytes,
    "packed chats": partial(of_chats, packing=True),
    "chats of similar length": partial(of_chats, packing=False),
    **{name: lambda folder, name=name: partial(own, name) for name in LOADERS},
    "litdata": of_litdata,
    "tokens of litdata": of_litdata_tokens,
}
NEEDS = {"Parquet": "datasets", "litdata": "litdata", "tokens of litdata": "litdata"}
KINDS = [pytest.param(kind, marks=getattr(pytest.mark, NEEDS[kind]) if kind in NEEDS else ()) for kind in DATA]


@pytest.mark.jobs
@pytest.mark.parametrize("kind", KINDS)
def test_after_sigkill(tmp_path: Path, kind: str) -> None:
    """With a worker; what a data module gives is read without one by the others."""
    data, folders = DATA[kind](tmp_path), [tmp_path / name for name in ("killed", "after", "whole")]
    for folder in folders:
        folder.mkdir()
    killed, after, whole = folders
    job = start_job(1, killed, train, killed, partial(data, 1), 1, {"killed_at": 7})
    assert end_job(job, seconds=120) == [-9]
    before = rows_of_steps(killed)
    assert len(before) == 8
    train(after, partial(data, 0), 1, {"resumed": killed / "step=6.ckpt", "max_steps": 12})
    is_own = kind in LOADERS or kind == "litdata"
    train(whole, partial(data, 1 if is_own else 0), 1, {"max_steps": 12})
    assert rows_of_steps(after)[:2] == before[6:]
    assert before[:6] + rows_of_steps(after) == rows_of_steps(whole)
    assert len(rows_of_steps(whole)) == 12
    assert len({str(rows) for rows in rows_of_steps(whole)}) > 5
