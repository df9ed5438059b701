"""Directories and files, on a file system or under a URL that fsspec knows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, Any

import fsspec


class UrlPath:
    """The few things of a `Path` that reading and writing weights needs, for a URL such as `s3://bucket/model`."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._files, self._path = fsspec.core.url_to_fs(self._url)

    def __truediv__(self, name: str) -> UrlPath:
        return UrlPath(f"{self._url}/{name}")

    def __str__(self) -> str:
        return self._url

    def exists(self) -> bool:
        """Whether a file or directory is there."""
        return bool(self._files.exists(self._path))

    def open(self, mode: str, encoding: str | None = None) -> IO[Any]:
        """The file."""
        return self._files.open(self._path, mode, **({} if encoding is None else {"encoding": encoding}))

    def size(self) -> int:
        """Of the file in bytes."""
        return int(self._files.size(self._path))

    def read_bytes(self, start: int, stop: int) -> bytes:
        """A range of the file. Fetched anew each time."""
        return self._files.cat_file(self._path, start=start, end=stop) if stop > start else b""

    def has_files(self) -> bool:
        """Whether something is in the directory."""
        return self.exists() and bool(self._files.ls(self._path, detail=False))

    def make_directory(self) -> None:
        """Where there are directories."""
        self._files.makedirs(self._path, exist_ok=True)

    def remove(self) -> None:
        """The directory or file, with everything in it."""
        if self.exists():
            self._files.rm(self._path, recursive=True)


Place = Path | UrlPath
"""Where weights are."""


def place_of(path: str | Path | UrlPath) -> Place:
    """A path, or a URL where it has the form of one."""
    if isinstance(path, UrlPath):
        return path
    path = str(path).removeprefix("file://") if str(path).startswith("file://") else path
    return UrlPath(str(path)) if "://" in str(path) else Path(path)


def flush(file: IO[Any], path: Place) -> None:
    """Put what was written on the disk; URLs see to it when they are closed."""
    file.flush()
    if isinstance(path, Path):
        os.fsync(file.fileno())
