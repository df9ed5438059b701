"""Chats in files: JSON lines, tables, and directories that Hugging Face's `datasets` has saved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lightning_d9d.data.records import JSON_LINES, TABLES, Piece, Place, pieces_of, read_records
from lightning_d9d.errors import ConfigError


def read_chats(paths: Iterable[str | Path]) -> Iterator[tuple[Place, Any]]:
    """Yield the chats of files one after the other, each with its place as text. Local.

    Args:
        paths: Files of JSON lines (`.jsonl`, `.ndjson`, `.json`), tables (`.parquet`, `.arrow`), or directories that
            `datasets` saved.

    Raises:
        ConfigError: A path cannot be read, a line is not JSON, or the package for a format is not installed.
    """
    for piece in chat_pieces(paths):
        for record in read_records(piece):
            yield record.place, record.checked()


def chat_pieces(paths: Iterable[str | Path]) -> list[Piece]:
    """Return the pieces of files of chats, as `pieces_of` does; errors are those of `read_chats`."""
    pieces = []
    for path in map(Path, paths):
        if not path.is_dir() and path.suffix not in (*JSON_LINES, *TABLES):
            raise ConfigError(
                f"{path} is not a file of chats: give JSON lines ({', '.join(JSON_LINES)}), a table "
                f"({', '.join(TABLES)}) or a directory that `datasets` saved"
            )
        pieces += pieces_of(str(path))
    return pieces
