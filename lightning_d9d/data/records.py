"""Records in files of JSON lines, Parquet and Arrow, and in directories that Hugging Face's `datasets` has saved.

Files are read in pieces, which processes can share. `documents.py` finds texts in records, and `chat_files.py` chats.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from lightning_d9d.errors import ConfigError, reason

JSON_LINES = (".jsonl", ".ndjson", ".json")
TABLES = (".parquet", ".arrow")
_PACKED = (".gz", ".zst", ".xz", ".bz2", ".zip")
PIECE_BYTES = 1 << 24
"""Bytes of lines, or of a saved dataset, that are read together."""
_ROWS_AT_A_TIME = 1000
_ALTERNATIVE = ", or write JSON lines"


@dataclass(frozen=True)
class Piece:
    """A part of a file: a range of bytes in which lines begin, groups of a table's rows, or rows of a saved dataset.

    Args:
        path: The file or directory.
        start: The first byte, group or row.
        stop: The end: one after the last byte, group or row.
        num_bytes: Bytes on the disk, for the progress.
    """

    path: str
    start: int
    stop: int
    num_bytes: int


@dataclass(frozen=True)
class Place:
    """The place of a record; as text, the file and the number of the line or row.

    Args:
        path: The file or directory.
        line_at: The byte at which its line begins; None in tables.
        row: Index of the row in its group, from 0.
        group: Group of a table's rows; None if there is none.
    """

    path: str
    line_at: int | None = None
    row: int = 0
    group: int | None = None

    def __str__(self) -> str:
        if self.line_at is not None:
            return f"{self.path}, line {_line_number(self.path, self.line_at)}"
        return f"{self.path}, row {self.row}" + ("" if self.group is None else f" of group {self.group}")


class Record(NamedTuple):
    """A value of a file, or the reason why it is missing."""

    place: Place
    value: Any
    problem: Exception | None = None

    def checked(self) -> Any:
        """Return the value.

        Raises:
            ConfigError: The line is not JSON.
        """
        if self.problem is not None:
            raise ConfigError(f"{self.said_problem()}; correct the line, or leave it out") from self.problem
        return self.value

    def said_problem(self) -> str:
        """Return the problem of the line, with its place."""
        return f"{self.place} is not JSON: {getattr(self.problem, 'msg', None) or reason(self.problem)}"  # type: ignore[arg-type]


def is_saved_dataset(path: str | Path) -> bool:
    """Return whether a path is a directory that `save_to_disk` of `datasets` may have written."""
    return any((Path(path) / name).is_file() for name in ("state.json", "dataset_dict.json"))


def has_records(path: str | Path) -> bool:
    """Return whether a file or directory has records, by its name and form."""
    return Path(path).suffix in (*JSON_LINES, *TABLES) or is_saved_dataset(path)


def pieces_of(path: str, by_lines: bool = True) -> list[Piece]:
    """Return the pieces of a file or directory. The pieces have all of its records in their order. Local.

    Args:
        path: A file, or a directory that `datasets` saved.
        by_lines: Whether a file other than a table is divided at lines, instead of being one piece.

    Raises:
        ConfigError: The file cannot be read, is compressed, or needs a package that is not installed.
    """
    if Path(path).is_dir():
        return _pieces_of_saved(path)
    suffix = Path(path).suffix
    if suffix in _PACKED:
        raise ConfigError(f"{path} is compressed; decompress it first")
    try:
        size = Path(path).stat().st_size
        with open(path, "rb"):
            pass
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {reason(error)}") from error
    if suffix in TABLES:
        count = _Table(path).num_groups
        return [Piece(path, each, each + 1, size // max(count, 1)) for each in range(count)]
    if not by_lines:
        return [Piece(path, 0, size, size)]
    starts = range(0, size, PIECE_BYTES)
    return [Piece(path, start, stop := min(start + PIECE_BYTES, size), stop - start) for start in starts]


def read_records(piece: Piece, column: str | None = None) -> Iterator[Record]:
    """Yield the records of a piece of JSON lines, a table or a saved dataset. Local.

    Args:
        piece: A piece that `pieces_of` returned.
        column: The only column of a table that is read; records are then mappings with this key. None: all.

    Raises:
        ConfigError: A table cannot be read, or has no such column.
    """
    if Path(piece.path).is_dir():
        yield from _read_saved(piece, column)
    elif Path(piece.path).suffix in TABLES:
        row = 0
        for rows in _Table(piece.path).rows(piece.start, column):
            for value in rows:
                yield Record(Place(piece.path, None, row, piece.start), value)
                row += 1
    else:
        for start, line in read_lines(piece):
            if line.strip():
                yield _of_json(line, Place(piece.path, start))


def read_lines(piece: Piece) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that begin in a piece, and the byte at which each begins."""
    with open(piece.path, "rb") as file:
        if piece.start:
            file.seek(piece.start - 1)
            file.readline()  # the line that began before, or just its end
        while (place := file.tell()) < piece.stop and (line := file.readline()):
            yield place, line


def _of_json(line: bytes, place: Place) -> Record:
    try:
        return Record(place, json.loads(line))
    except ValueError as error:  # UnicodeDecodeError, too
        return Record(place, None, error)


def _line_number(path: str, start: int) -> int:
    """Return the number of the line that begins at a byte."""
    number = 1
    with open(path, "rb") as file:
        while start > 0 and (chunk := file.read(min(start, 1 << 20))):
            number += chunk.count(b"\n")
            start -= len(chunk)
    return number


# Directories that `datasets` saved


@lru_cache(maxsize=4)
def _saved_dataset(path: str) -> Any:
    try:
        from datasets import load_from_disk  # pyright: ignore[reportMissingImports]: an extra
    except ImportError as error:
        raise ConfigError(
            f"the directory {path} needs datasets: pip install 'lightning-d9d[data]'{_ALTERNATIVE}"
        ) from error
    try:
        table = load_from_disk(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not a directory that `datasets` saved: {reason(error)}") from error
    if isinstance(table, Mapping):
        splits = ", ".join(f"{path}/{name}" for name in table)
        raise ConfigError(f"{path} has several splits; give one of {splits}")
    return table.with_format(None)


def _pieces_of_saved(path: str) -> list[Piece]:
    _saved_dataset.cache_clear()  # the directory may be another by now
    num_rows = len(_saved_dataset(path))
    size = sum(file.stat().st_size for file in Path(path).glob("*.arrow"))
    step = max(1, num_rows * PIECE_BYTES // max(size, 1))
    ranges = [range(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]
    return [Piece(path, each.start, each.stop, size * len(each) // num_rows) for each in ranges]


def _read_saved(piece: Piece, column: str | None) -> Iterator[Record]:
    table = _saved_dataset(piece.path)
    if column is not None:
        _check_column(piece.path, column, table.column_names)
        table = table.select_columns([column])
    for row in range(piece.start, piece.stop):
        yield Record(Place(piece.path, None, row), table[row])


# Tables


class _Table:
    """A file of Parquet, or of Arrow as a file or a stream, with rows in groups."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            import pyarrow as pa  # pyright: ignore[reportMissingImports]: an extra
            import pyarrow.parquet as pq  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ConfigError(f"{path} needs pyarrow: pip install 'lightning-d9d[parquet]'{_ALTERNATIVE}") from error
        self._batches: Any = None
        self._errors = (pa.ArrowException, OSError)
        try:
            if path.endswith(".parquet"):
                self._file = pq.ParquetFile(path)
                self.num_groups, self._schema = self._file.num_row_groups, self._file.schema_arrow
            else:
                source = pa.memory_map(path)
                try:
                    self._file = pa.ipc.open_file(source)
                    self._batches = [self._file.get_batch(each) for each in range(self._file.num_record_batches)]
                except pa.ArrowInvalid:
                    self._file = pa.ipc.open_stream(pa.memory_map(path))
                    self._batches = list(self._file)
                self.num_groups, self._schema = len(self._batches), self._file.schema
        except self._errors as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: Exception) -> ConfigError:
        return ConfigError(f"{self.path} cannot be read as {Path(self.path).suffix[1:]}: {reason(error)}")

    def rows(self, group: int, column: str | None) -> Iterator[list[Any]]:
        """Yield the rows of a group as mappings, some at a time."""
        if column is not None:
            _check_column(self.path, column, self._schema.names)
        columns = None if column is None else [column]
        try:
            if self._batches is None:
                parts = self._file.iter_batches(_ROWS_AT_A_TIME, row_groups=[group], columns=columns)
            else:
                whole = self._batches[group]
                starts = range(0, whole.num_rows, _ROWS_AT_A_TIME)
                parts = (whole.select(columns or whole.schema.names).slice(at, _ROWS_AT_A_TIME) for at in starts)
            for part in parts:
                yield part.to_pylist()
        except self._errors as error:
            raise self._unreadable(error) from error


def _check_column(path: str, column: str, columns: Sequence[str]) -> None:
    if column not in columns:
        raise ConfigError(f"{path} has no column {column!r}, but {', '.join(columns)}; name another column (--column)")
