"""Chats in files: JSON lines, Parquet, and directories that Hugging Face's `datasets` has saved."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning_d9d.errors import ConfigError, reason

_JSON_LINES = (".jsonl", ".json")
_PARQUET = ".parquet"


def read_chats(paths: Iterable[str | Path]) -> Iterator[tuple[str, Any]]:
    """Yield the chats of files one after the other, each with its place for people. Local.

    Args:
        paths: Files of JSON lines (`.jsonl`, `.json`) or Parquet (`.parquet`), or directories that `datasets` saved.

    Raises:
        ConfigError: A path cannot be read, a line is not JSON, or the package for a format is not installed.
    """
    for path in map(Path, paths):
        if path.is_dir():
            yield from _read_saved(path)
        elif path.suffix in _JSON_LINES:
            yield from _read_lines(path)
        elif path.suffix == _PARQUET:
            yield from _read_parquet(path)
        else:
            raise ConfigError(
                f"{path} is not a file of chats: give JSON lines ({', '.join(_JSON_LINES)}), Parquet ({_PARQUET}) or "
                "a directory that `datasets` saved"
            )


def _read_lines(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    place = f"{path}:{number}"
                    yield place, _parsed(line, place)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {reason(error)}") from error


def _parsed(line: bytes, place: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:  # UnicodeDecodeError, too
        raise ConfigError(
            f"{place} is not JSON: {error}. Write each chat in one line, or leave the line out"
        ) from error


def _read_parquet(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow.parquet as parquet  # pyright: ignore[reportMissingImports]: an extra
    except ImportError as error:
        raise ConfigError(f"{path} needs pyarrow: {_INSTALL.format('parquet')}") from error
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1000):
                for row in batch.to_pylist():
                    yield f"{path}: row {number}", row
                    number += 1
    except (OSError, ValueError) as error:  # pyarrow's own are ValueErrors
        raise ConfigError(f"{path} cannot be read behind row {number}: {reason(error)}") from error


def _read_saved(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        from datasets import load_from_disk  # pyright: ignore[reportMissingImports]: an extra
    except ImportError as error:
        raise ConfigError(f"the directory {path} needs datasets: {_INSTALL.format('data')}") from error
    try:
        table = load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not a directory that `datasets` saved: {reason(error)}") from error
    if isinstance(table, Mapping):
        splits = ", ".join(f"{path}/{name}" for name in table)
        raise ConfigError(f"{path} has several splits; give one of {splits}")
    for number, row in enumerate(table):
        yield f"{path}: row {number}", row


_INSTALL = "pip install 'lightning-d9d[{}]', or write the chats as JSON lines"
