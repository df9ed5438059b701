"""Documents in files: every one once, however a file is divided, and what is invalid with its place."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_d9d.data import records
from lightning_d9d.data.documents import DocumentReader, matching
from lightning_d9d.data.records import Piece
from lightning_d9d.errors import ConfigError

TEXTS = ["one", "zwei ä\n", "", "three " * 9, "4\u2028", "five"]


def read(path: Path | str, **options: Any) -> list[str | None]:
    reader = DocumentReader(**options)
    return [text for piece in reader.pieces(str(path)) for text in reader.read(piece)]


def json_lines(path: Path, values: list[Any], end: str = "\n") -> Path:
    path.write_text("\n".join(value if isinstance(value, str) else json.dumps(value) for value in values) + end)
    return path


@pytest.mark.parametrize("size", [1, 2, 3, 7, 20, 10**6])
@pytest.mark.parametrize("end", ["", "\n", "\n\n"])
def test_json_lines_in_pieces_of_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, end: str) -> None:
    monkeypatch.setattr(records, "PIECE_BYTES", size)
    path = json_lines(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS], end)
    assert read(path) == TEXTS
    pieces = DocumentReader().pieces(str(path))
    assert sum(piece.num_bytes for piece in pieces) == path.stat().st_size
    assert len(pieces) == -(-path.stat().st_size // size)


def test_text(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("first\nsecönd\r\n\nlast".encode())
    assert read(path) == ["first\nsecönd\r\n\nlast"]
    assert read(path, lines=True) == ["first", "secönd", "", "last"]


def test_parquet_and_arrow(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({"content": TEXTS, "id": list(range(6))})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    assert DocumentReader().pieces(str(tmp_path / "a.parquet"))[1:] == [
        Piece(str(tmp_path / "a.parquet"), start, start + 1, (tmp_path / "a.parquet").stat().st_size // 3)
        for start in (1, 2)
    ]
    for name, make in (("file.arrow", pa.ipc.new_file), ("stream.arrow", pa.ipc.new_stream)):
        with make(tmp_path / name, table.schema) as writer:
            writer.write_table(table, max_chunksize=4)
    for name in ("a.parquet", "file.arrow", "stream.arrow"):
        assert read(tmp_path / name, column="content") == TEXTS
    with pytest.raises(ConfigError, match=r"a\.parquet has no column 'text', but content, id; name another column"):
        read(tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"a\.parquet, row 0 of group 0 has no text in 'id', but 0"):
        read(tmp_path / "a.parquet", column="id")
    (tmp_path / "b.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(ConfigError, match=r"b\.parquet cannot be read as parquet"):
        read(tmp_path / "b.parquet")


@pytest.mark.datasets
def test_a_saved_dataset_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow as pa
    from datasets import Dataset

    Dataset(pa.table({"text": TEXTS, "id": list(range(6))}), fingerprint="texts").save_to_disk(tmp_path / "saved")
    size = (tmp_path / "saved/data-00000-of-00001.arrow").stat().st_size
    monkeypatch.setattr(records, "PIECE_BYTES", size // 3)
    pieces = DocumentReader().pieces(str(tmp_path / "saved"))
    assert len(pieces) > 2
    assert sum(piece.num_bytes for piece in pieces) <= size
    assert read(tmp_path / "saved") == TEXTS
    assert matching([str(tmp_path / "s*")]) == [str(tmp_path / "saved")]
    with pytest.raises(ConfigError, match="saved has no column 'story', but text, id; name another column"):
        read(tmp_path / "saved", column="story")
    with pytest.raises(ConfigError, match="saved, row 0 has no text in 'id', but 0"):
        read(tmp_path / "saved", column="id")


def test_tables_name_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").touch()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"a\.parquet needs pyarrow: pip install 'lightning-d9d\[parquet\]'"):
        read(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a"', r"a\.jsonl, line 3 is not JSON: Expecting ',' delimiter"),
        ('{"txt": "a"}', r"a\.jsonl, line 3 has no field 'text' \(it has 'txt'\); name another column"),
        ("[1]", r"line 3 has no field 'text' \(it is no mapping\)"),
        ('{"text": null}', "line 3 has no text in 'text', but None"),
        ('{"text": "\\ud800"}', "line 3 has half of a surrogate pair"),
        ("\xff", "line 3 is not JSON"),
    ],
)
def test_invalid_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, message: str) -> None:
    monkeypatch.setattr(records, "PIECE_BYTES", 20)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "first"}\n\n' + line.encode("latin-1") + b'\n{"text": "last"}\n')
    with pytest.raises(ConfigError, match=f"{message}.*--skip-invalid"):
        read(path)
    assert read(path, skip_invalid=True) == ["first", None, "last"]


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"good\nse\xf1or\n")
    with pytest.raises(ConfigError, match=r"a\.txt is not UTF-8 text \(invalid continuation byte at byte 7\)"):
        read(path)
    with pytest.raises(ConfigError, match=r"a\.txt, line 2 is not UTF-8 text"):
        read(path, lines=True)
    assert read(path, lines=True, skip_invalid=True) == ["good", None]


def test_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("b.txt", "a.txt", "deep/c.txt"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).touch()
    assert matching(["deep/c.txt", "*.txt"]) == ["deep/c.txt", "a.txt", "b.txt"]
    assert matching(["**/*.txt"]) == ["a.txt", "b.txt", "deep/c.txt"]
    for sources, message in (
        (["*.md"], r"no file matches '\*\.md'"),
        (["deep/"], r"deep/ is a folder; name its files, such as deep/\*\.jsonl"),
        (["a.txt", "*.txt"], r"a\.txt would be read more than once"),
    ):
        with pytest.raises(ConfigError, match=message):
            matching(sources)
    with pytest.raises(ConfigError, match=r"none\.txt cannot be read: it does not exist"):
        DocumentReader().pieces("none.txt")
    with pytest.raises(ConfigError, match=r"a\.jsonl\.gz is compressed; decompress it first"):
        DocumentReader().pieces("a.jsonl.gz")
