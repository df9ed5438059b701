"""Data of every kind that data modules read, for tests of their streams."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch

from lightning_d9d.data import TokenFileWriter
from lightning_d9d.datamodules import ByteTextDataModule, TokenDataModule
from tests.data.chats import write_chats
from tests.datamodules.rows_job import GLOBAL_BATCH, SEQUENCE_LENGTH, chats, tokens

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
    "tokens of litdata": of_litdata_tokens,
}
"""Writes data to a folder, and returns what reads them."""
NEEDS = {"Parquet": "datasets", "litdata": "litdata", "tokens of litdata": "litdata"}


def with_packages(kinds: Iterable[str]) -> list[Any]:
    """Kinds of data as parameters, with the marker of the package that they need."""
    return [pytest.param(kind, marks=getattr(pytest.mark, NEEDS[kind]) if kind in NEEDS else ()) for kind in kinds]
