"""Documents: Texts in text files and in records."""

from __future__ import annotations

import glob
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_d9d.data.records import (
    Piece,
    Place,
    has_records,
    is_saved_dataset,
    pieces_of,
    read_lines,
    read_records,
)
from lightning_d9d.errors import ConfigError, printable


@dataclass(frozen=True)
class DocumentReader:
    """How documents are found in files, by their suffixes.

    `.jsonl`, `.ndjson` and `.json` are JSON lines. `.parquet` and `.arrow` are tables, which need pyarrow. Directories
    are what `datasets` saved, and all else is UTF-8 text.

    Args:
        column: The field of a JSON line, or the column of a table, with the text.
        lines: Whether each line of a text file is a document, instead of the whole file.
        skip_invalid: Whether lines and files without UTF-8, JSON or text are left out instead of raising an error.
    """

    column: str = "text"
    lines: bool = False
    skip_invalid: bool = False

    def pieces(self, path: str) -> list[Piece]:
        """Return the pieces of a file. The pieces have all of its documents in their order.

        Raises:
            ConfigError: The file cannot be read, is compressed, or needs a package that is not installed.
        """
        return pieces_of(path, self.lines or has_records(path))

    def read(self, piece: Piece) -> Iterator[str | None]:
        """Yield the documents of a piece; None for each invalid one that is left out.

        Raises:
            ConfigError: A document is invalid. The message has the file and the line or row.
        """
        if has_records(piece.path):
            for record in read_records(piece, self.column):
                if record.problem is not None:
                    yield self._invalid(record.said_problem(), record.problem)
                else:
                    yield self._text_of(record.value, record.place)
        elif self.lines:
            for start, line in read_lines(piece):
                yield self._decoded(line.rstrip(b"\r\n"), Place(piece.path, start))
        else:
            yield self._decoded(Path(piece.path).read_bytes(), piece.path)

    def _text_of(self, record: Any, place: Place) -> str | None:
        if not isinstance(record, dict) or self.column not in record:
            fields = f"it has {', '.join(map(repr, record))}" if isinstance(record, dict) else "it is no mapping"
            return self._invalid(f"{place} has no field {self.column!r} ({fields}); name another column (--column)")
        value = record[self.column]
        if not isinstance(value, str):
            return self._invalid(f"{place} has no text in {self.column!r}, but {printable(repr(value))[:60]}")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            return self._invalid(f"{place} has half of a surrogate pair in {self.column!r}", error)
        return value

    def _decoded(self, content: bytes, place: Place | str) -> str | None:
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError as error:
            return self._invalid(f"{place} is not UTF-8 text ({error.reason} at byte {error.start})", error)

    def _invalid(self, problem: str, cause: Exception | None = None) -> None:
        if not self.skip_invalid:
            raise ConfigError(f"{problem}; correct it, or leave out invalid documents with --skip-invalid") from cause


def matching(sources: list[str]) -> list[str]:
    """Return the files that paths and patterns name, each pattern's in the order of their names.

    Raises:
        ConfigError: A folder is named that `datasets` has not saved, a pattern matches nothing, or a file is named
            twice.
    """
    found = []
    for source in sources:
        names = sorted(filter(_is_source, glob.glob(source, recursive=True))) if glob.has_magic(source) else [source]
        if Path(source).is_dir() and not is_saved_dataset(source):
            raise ConfigError(f"{source} is a folder; name its files, such as {source.rstrip('/')}/*.jsonl")
        if not names:
            raise ConfigError(f"no file matches {source!r}; correct the path")
        found += names
    twice = {name for name in found if found.count(name) > 1} if len(found) != len(set(found)) else set()
    if twice:
        raise ConfigError(f"{', '.join(sorted(twice))} would be read more than once; name each file once")
    return found


def _is_source(path: str) -> bool:
    return Path(path).is_file() or is_saved_dataset(path)
