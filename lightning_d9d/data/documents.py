"""Documents in files of text, JSON lines, Parquet and Arrow, read in pieces that processes share."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_d9d.errors import ConfigError, printable, reason

_JSON_LINES = (".jsonl", ".ndjson", ".json")
_TABLES = (".parquet", ".arrow")
_PACKED = (".gz", ".zst", ".xz", ".bz2", ".zip")
PIECE_BYTES = 1 << 24
"""Bytes of lines that are read together."""


@dataclass(frozen=True)
class Piece:
    """A part of a file: bytes in whose range lines begin, or groups of a table's rows.

    Args:
        path: The file.
        start: The first byte or group.
        stop: One behind the last.
        num_bytes: What it takes on the disk, for the progress.
    """

    path: str
    start: int
    stop: int
    num_bytes: int


@dataclass(frozen=True)
class DocumentReader:
    """How documents are found in files, by the ends of their names.

    `.jsonl`, `.ndjson` and `.json` are JSON lines, `.parquet` and `.arrow` are tables (which need pyarrow), and all
    else is UTF-8 text.

    Args:
        column: The field of a JSON line, or the column of a table, that has the text.
        lines: Whether each line of a text file is a document, rather than the file.
        skip_invalid: Whether lines and files without UTF-8, JSON or text are left out, rather than an
            error.
    """

    column: str = "text"
    lines: bool = False
    skip_invalid: bool = False

    def pieces(self, path: str) -> list[Piece]:
        """Return the pieces of a file. They have all of its documents in their order.

        Raises:
            ConfigError: The file cannot be read, is packed, or needs pyarrow.
        """
        suffix = Path(path).suffix
        if suffix in _PACKED:
            raise ConfigError(f"{path} is packed; unpack it first")
        try:
            size = Path(path).stat().st_size
            with open(path, "rb"):
                pass
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {reason(error)}") from error
        if suffix in _TABLES:
            count = _Table(path).num_groups
            return [Piece(path, each, each + 1, size // max(count, 1)) for each in range(count)]
        if suffix in _JSON_LINES or self.lines:
            starts = range(0, size, PIECE_BYTES)
            return [Piece(path, start, stop := min(start + PIECE_BYTES, size), stop - start) for start in starts]
        return [Piece(path, 0, size, size)]

    def read(self, piece: Piece) -> Iterator[str | None]:
        """Yield the documents of a piece; None for each that is left out as invalid.

        Raises:
            ConfigError: One is invalid. The message has the file and the line or row.
        """
        suffix = Path(piece.path).suffix
        if suffix in _TABLES:
            values = _Table(piece.path).column(self.column, piece.start)
            for row, value in enumerate(values):
                yield self._checked(value, lambda row=row: f"{piece.path}, row {row} of group {piece.start}")
        elif suffix in _JSON_LINES:
            for place, line in _lines(piece):
                if line.strip():
                    yield self._of_json(line, lambda place=place: _place_of_line(piece.path, place))
        elif self.lines:
            for place, line in _lines(piece):
                yield self._decoded(line.rstrip(b"\r\n"), lambda place=place: _place_of_line(piece.path, place))
        else:
            yield self._decoded(Path(piece.path).read_bytes(), lambda: piece.path)

    def _of_json(self, line: bytes, where: Any) -> str | None:
        try:
            value = json.loads(line)
        except ValueError as error:
            return self._invalid(f"{where()} is not JSON: {getattr(error, 'msg', None) or reason(error)}", error)
        if not isinstance(value, dict) or self.column not in value:
            fields = f"it has {', '.join(map(repr, value))}" if isinstance(value, dict) else "it is no mapping"
            return self._invalid(f"{where()} has no field {self.column!r} ({fields}); name another by --column")
        return self._checked(value[self.column], where)

    def _checked(self, value: Any, where: Any) -> str | None:
        if not isinstance(value, str):
            return self._invalid(f"{where()} has no text in {self.column!r}, but {printable(repr(value))[:60]}")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            return self._invalid(f"{where()} has half of a surrogate pair in {self.column!r}", error)
        return value

    def _decoded(self, content: bytes, where: Any) -> str | None:
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError as error:
            return self._invalid(f"{where()} is no UTF-8 text ({error.reason} at byte {error.start})", error)

    def _invalid(self, problem: str, cause: Exception | None = None) -> None:
        if not self.skip_invalid:
            raise ConfigError(f"{problem}; mend it, or leave out what is invalid with --skip-invalid") from cause


def has_column(path: str) -> bool:
    """Return whether the name of a file says that documents are fields in it."""
    return Path(path).suffix in (*_JSON_LINES, *_TABLES)


def matching(sources: list[str]) -> list[str]:
    """Return the files that paths and patterns name, each pattern's in the order of their names.

    Raises:
        ConfigError: A folder is named, a pattern matches nothing, or a file is named twice.
    """
    found = []
    for source in sources:
        names = sorted(filter(_is_file, glob.glob(source, recursive=True))) if glob.has_magic(source) else [source]
        if Path(source).is_dir():
            raise ConfigError(f"{source} is a folder; name its files, such as {source.rstrip('/')}/*.jsonl")
        if not names:
            raise ConfigError(f"no file matches {source!r}; correct the path")
        found += names
    twice = {name for name in found if found.count(name) > 1} if len(found) != len(set(found)) else set()
    if twice:
        raise ConfigError(f"{', '.join(sorted(twice))} would be read more than once; name each file once")
    return found


def _is_file(path: str) -> bool:
    return Path(path).is_file()


def _lines(piece: Piece) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that begin in a piece, and at which byte."""
    with open(piece.path, "rb") as file:
        if piece.start:
            file.seek(piece.start - 1)
            file.readline()  # the line that began before, or just its end
        while (place := file.tell()) < piece.stop and (line := file.readline()):
            yield place, line


def _place_of_line(path: str, place: int) -> str:
    """Return the file and the number of the line that begins at a byte."""
    number = 1
    with open(path, "rb") as file:
        while place > 0 and (chunk := file.read(min(place, 1 << 20))):
            number += chunk.count(b"\n")
            place -= len(chunk)
    return f"{path}, line {number}"


class _Table:
    """A file of Parquet, or of Arrow as a file or a stream, with rows in groups."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            import pyarrow as pa  # pyright: ignore[reportMissingImports]: an extra
            import pyarrow.parquet as pq  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ConfigError(f"{path} needs pyarrow: pip install 'lightning-d9d[parquet]'") from error
        self._batches: Any = None
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
        except (pa.ArrowException, OSError) as error:
            raise ConfigError(f"{path} cannot be read as {Path(path).suffix[1:]}: {reason(error)}") from error

    def column(self, name: str, group: int) -> list[Any]:
        """Return the values of a column in a group of rows."""
        if name not in self._schema.names:
            raise ConfigError(f"{self.path} has no column {name!r} but {', '.join(self._schema.names)}; see --column")
        if self._batches is None:
            return self._file.read_row_group(group, columns=[name]).column(0).to_pylist()
        return self._batches[group].column(name).to_pylist()
