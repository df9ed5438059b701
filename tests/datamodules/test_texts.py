"""Texts of every kind give the rows of the file of tokens that `prepare-data` makes of them, and are prepared once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_d9d.data.documents import DocumentReader
from lightning_d9d.datamodules import TokenDataModule, texts
from lightning_d9d.errors import ConfigError
from lightning_d9d.prepare import Settings, prepare
from tests.data.chats import make_tokenizer

TEXTS = [f"text {number} " * (1 + number % 5) for number in range(60)]


def rows(files: Any, **options: Any) -> list[Any]:
    module = TokenDataModule(files, **{"sequence_length": 16, "batch_size": 2, **options})
    module.setup()
    return [[row.tolist() for row in batch.values()] for batch in module.train_dataloader()]


def as_json_lines(folder: Path) -> str:
    (folder / "a.jsonl").write_text("".join(json.dumps({"content": text}) + "\n" for text in TEXTS))
    return str(folder / "a.jsonl")


def as_table(folder: Path) -> Any:
    import pyarrow

    return pyarrow.table({"content": TEXTS})


def as_parquet(folder: Path) -> str:
    import pyarrow.parquet

    pyarrow.parquet.write_table(as_table(folder), folder / "a.parquet", row_group_size=25)
    return str(folder / "a.parquet")


def as_saved(folder: Path) -> str:
    from datasets import Dataset

    Dataset(as_table(folder), fingerprint="texts").save_to_disk(folder / "saved")
    return str(folder / "saved")


@pytest.fixture
def expected(tmp_path: Path) -> list[Any]:
    settings = Settings(DocumentReader("content"), "bytes", ends=True, begins=False)
    prepare(tmp_path / "prepared", [as_json_lines(tmp_path)], settings)
    return rows(str(tmp_path / "prepared"))


@pytest.mark.datasets
@pytest.mark.parametrize("write", [as_json_lines, as_parquet, as_saved])
def test_records(tmp_path: Path, expected: list[Any], write: Any) -> None:
    found = rows(write(tmp_path), tokenizer="bytes", column="content", cache_folder=str(tmp_path / "cache"))
    assert found == expected
    assert len(found) > 10


def test_texts_beside_tokens(tmp_path: Path) -> None:
    """Each part of a mixture is prepared by itself, and patterns take texts and tokens."""
    for name in ("a.txt", "b.txt", "c.py"):
        (tmp_path / name).write_text(name * 400)
    options = {"tokenizer": "bytes", "cache_folder": str(tmp_path / "cache"), "validation_fraction": 0.1}
    settings = Settings(DocumentReader(), "bytes", ends=True, begins=False)
    prepare(tmp_path / "c", [str(tmp_path / "c.py")], settings)
    prepare(tmp_path / "ab", [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")], settings)
    of_texts = {str(tmp_path / "[ab].txt"): 0.75, str(tmp_path / "c.bin"): 0.25}
    of_tokens = {str(tmp_path / "ab"): 0.75, str(tmp_path / "c"): 0.25}
    assert rows(of_texts, **options) == rows(of_tokens, validation_fraction=0.1)


def test_texts_are_prepared_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(texts, "prepare", lambda *arguments: (made.append(1), prepare(*arguments)))
    make_tokenizer("chatml").save_pretrained(tmp_path / "tokenizer")
    file, cache = as_json_lines(tmp_path), tmp_path / "cache"
    options = {"tokenizer": str(tmp_path / "tokenizer"), "column": "content", "cache_folder": str(cache)}
    first = rows(file, **options)
    assert rows(file, **options) == first
    assert len(made) == 1
    (kept,) = cache.glob("*.bin")
    kept.write_bytes(kept.read_bytes()[:-2])  # truncated
    assert rows(file, **options) == first
    assert len(made) == 2
    assert rows(file, **{**options, "tokenizer": "bytes"}) != first
    assert len(made) == 3
    assert rows(as_json_lines(tmp_path / "cache"), **options) == first
    assert len(made) == 3


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("a.jsonl", {}, r"a\.jsonl has texts; name their tokenizer"),
        ("a.txt", {}, r"a\.txt has texts; name their tokenizer"),
        ("a.txt", {"column": "b"}, "are for texts, which need a tokenizer"),
        ("a.txt", {"column": "b", "tokenizer": "bytes"}, "column='b' has no effect"),
        ("a", {"tokenizer": "bytes"}, "the tokenizer 'bytes' has no effect: all files have tokens"),
        ("a.jsonl", {"tokenizer": "bytes"}, r"a\.jsonl, line 1 has no field 'text' \(it has 'content'\)"),
        ("broken.jsonl", {"tokenizer": "bytes"}, r"broken\.jsonl, line 1 is not JSON"),
        ("empty.txt", {"tokenizer": "bytes"}, r"no document has any text \(1 empty\)"),
        ("none.txt", {"tokenizer": "bytes"}, r"none\.txt\.bin cannot be read: it does not exist"),
        ("a.txt", {"tokenizer": "nowhere/at/all"}, "tokenizer='nowhere/at/all' does not exist, nor does"),
    ],
)
def test_refused(tmp_path: Path, name: str, options: dict[str, Any], message: str) -> None:
    as_json_lines(tmp_path)
    (tmp_path / "a.txt").write_text("text " * 200)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "broken.jsonl").write_text("nothing\n")
    prepare(tmp_path / "a", [str(tmp_path / "a.txt")], Settings(DocumentReader(), "bytes", True, False))
    with pytest.raises(ConfigError, match=message):
        rows(str(tmp_path / name), **options)
