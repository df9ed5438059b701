"""Folders that litdata writes, as rows and in the data module of tokens."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_d9d.data.litdata_rows import LitDataRows, is_litdata
from lightning_d9d.data.token_files import BorderToken
from lightning_d9d.datamodules import TokenDataModule
from lightning_d9d.errors import ConfigError

END = 0
pytestmark = pytest.mark.litdata


def document(number: int) -> Iterator[Tensor]:
    """100 ids that count over all documents, and the token that ends it."""
    yield torch.cat([torch.arange(100 * number + 1, 100 * number + 101), torch.tensor([END])]).int()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Nine documents in three chunks."""
    from litdata.streaming import Cache
    from litdata.streaming.item_loader import TokensLoader

    path = tmp_path_factory.mktemp("litdata")
    cache = Cache(str(path), chunk_size=303, item_loader=TokensLoader())
    for number in range(9):
        cache._add_item(number, next(document(number)))
    cache.done()
    cache.merge()
    return str(path)


def test_rows(folder: str) -> None:
    rows = LitDataRows(folder, 9, BorderToken(END, is_first=False))
    assert is_litdata(folder)
    assert len(rows) == 3 * 30  # of 303 tokens in a chunk
    assert rows.num_left_out == 9
    assert rows[0]["input_ids"].tolist() == list(range(1, 10))
    assert rows[0]["labels"].tolist() == list(range(2, 11))
    assert rows[10]["input_ids"].tolist() == [END, *range(101, 109)]
    assert rows[10]["labels"].tolist() == [-100, *range(102, 110)]
    assert rows[10]["document_ids"].tolist() == [0] + [1] * 8
    assert rows[89]["input_ids"].tolist() == list(range(889, 898))
    assert "document_ids" not in LitDataRows(folder, 9, None)[0]
    with pytest.raises(ConfigError, match=r"block 10 has the id 101 at token 1, but vocab_size=101"):
        LitDataRows(folder, 9, None, vocab_size=101)[10]
    with pytest.raises(IndexError, match="row 90 of 90"):
        rows[90]


def test_in_the_data_module(folder: str) -> None:
    def read(num_workers: int) -> tuple[list[list[int]], list[list[int]]]:
        data = TokenDataModule(
            {folder: 1.0}, 9, batch_size=4, validation_fraction=0.1, last_token=END, num_workers=num_workers
        )
        data.setup()
        loaders = data.train_dataloader(), data.val_dataloader()
        first, second = ([row for batch in each for row in batch["input_ids"].tolist()] for each in loaders)
        return first, second

    training, held_out = read(0)
    assert (len(training), len(held_out)) == (80, 9)  # of 81
    assert not {row[1] for row in training} & {row[1] for row in held_out}
    assert read(2) == (training, held_out)
    with pytest.raises(ConfigError, match=r"does not store where documents begin.*borders=False"):
        TokenDataModule(folder).setup()


def test_refused(tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "index.json").write_text(json.dumps({"chunks": [{"filename": "a"}]}))
    with pytest.raises(ConfigError, match=r"index\.json does not give the tokens of chunks \(KeyError"):
        LitDataRows(str(tmp_path), 9, None)
    monkeypatch.setitem(sys.modules, "litdata", None)
    with pytest.raises(ConfigError, match=r"needs litdata: pip install 'lightning-d9d\[litdata\]'"):
        LitDataRows(folder, 9, None)
