"""Directories and files, on a file system or under a URL that fsspec knows."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import fsspec

from lightning_d9d.errors import StateError

MAX_SMALL_BYTES = 100_000_000
"""Largest file that is read whole: a table, or one beside weights. Published tokenizers have up to 35 MB."""


class UrlPath:
    """The few things of a `Path` that reading and writing weights needs, for a URL such as `s3://bucket/model`.

    Raises:
        OSError: Whatever a package of fsspec's raises, with the URL; in all methods.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        with _named(self._url):
            self._files, self._path = fsspec.core.url_to_fs(self._url)

    def __truediv__(self, name: str) -> UrlPath:
        return UrlPath(f"{self._url}/{name}")

    def __str__(self) -> str:
        return self._url

    @property
    def name(self) -> str:
        """The last part."""
        return self._url.rpartition("/")[2]

    def exists(self) -> bool:
        """Whether a file or directory is there."""
        with _named(self._url):
            return bool(self._files.exists(self._path))

    def open(self, mode: str) -> UrlFile:
        """The file, to write to."""
        with _named(self._url):
            return UrlFile(self._url, self._files.open(self._path, mode))

    def size(self) -> int:
        """Of the file in bytes."""
        with _named(self._url):
            return int(self._files.size(self._path))

    def read_bytes(self, start: int = 0, stop: int | None = None) -> bytes:
        """A range of the file. Fetched anew each time."""
        with _named(self._url):
            return self._files.cat_file(self._path, start=start, end=stop) if stop is None or stop > start else b""

    def has_files(self) -> bool:
        """Whether something is in the directory."""
        with _named(self._url):
            return self.exists() and bool(self._files.ls(self._path, detail=False))

    def names(self) -> list[str]:
        """Of the files in the directory."""
        with _named(self._url):
            found = self._files.ls(self._path, detail=True)
            return [str(each["name"]).rpartition("/")[2] for each in found if each["type"] == "file"]

    def make_directory(self) -> None:
        """Where there are directories."""
        with _named(self._url):
            self._files.makedirs(self._path, exist_ok=True)

    def remove(self) -> None:
        """The directory or file, with everything in it."""
        with _named(self._url):
            if self.exists():
                self._files.rm(self._path, recursive=True)


class UrlFile:
    """What is written goes to the URL, at the latest when the file is closed. Raises as `UrlPath` does."""

    def __init__(self, url: str, file: IO[Any]) -> None:
        self._url, self._file = url, file

    def write(self, content: Any) -> None:
        """More bytes."""
        with _named(self._url):
            self._file.write(content)

    def flush(self) -> None:
        """Send what can be sent."""
        with _named(self._url):
            self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _named(self._url):
            self._file.close()


@contextmanager
def _named(url: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) and error.filename == url:
            raise
        number, text = getattr(error, "errno", None), getattr(error, "strerror", None)
        raise OSError(number or errno.EIO, text or f"{type(error).__name__}: {error}", url) from error


Place = Path | UrlPath
"""Where weights are."""


def place_of(path: str | Path | UrlPath) -> Place:
    """A path, or a URL where it has the form of one."""
    if isinstance(path, UrlPath):
        return path
    path = str(path).removeprefix("file://") if str(path).startswith("file://") else path
    return UrlPath(str(path)) if "://" in str(path) else Path(path)


def is_occupied(place: Place) -> bool:
    """Whether something is there that is no empty directory."""
    if isinstance(place, UrlPath):
        return place.has_files()
    return place.exists() and (not place.is_dir() or any(place.iterdir()))


def names_in(place: Place) -> list[str]:
    """Of the files in a directory."""
    return place.names() if isinstance(place, UrlPath) else [path.name for path in place.iterdir() if path.is_file()]


def read_small(path: Place) -> bytes:
    """The content of a regular file of at most `MAX_SMALL_BYTES`; a pipe or device is not waited for.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no regular file, or too large.
    """
    if isinstance(path, UrlPath):
        content = path.read_bytes(0, min(path.size(), MAX_SMALL_BYTES + 1))
    else:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ValueError("it is no regular file")
            content = file.read(MAX_SMALL_BYTES + 1)
    if len(content) > MAX_SMALL_BYTES:
        raise ValueError(f"it is larger than {MAX_SMALL_BYTES} bytes, the limit for a file that is read whole")
    return content


def check_link(folder: Place, name: str, named_by: Place) -> None:
    """Refuses a file that is a link out of its directory.

    In the cache of Hugging Face's hub, `snapshots/REVISION/FILE` may be a link to `blobs/HASH`.

    Args:
        folder: The directory.
        name: The file's path in it.
        named_by: What error messages begin with.

    Raises:
        StateError: It leads elsewhere, or cannot be followed.
    """
    if isinstance(folder, UrlPath):
        return
    home = folder.resolve()
    try:
        real = (folder / name).resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise StateError(f"{named_by}: the file {name!r} cannot be found ({error}).") from error
    if home not in real.parents and real.parent != home.parent.parent / "blobs":
        raise StateError(
            f"{named_by}: the file {name!r} is a link that leads outside of the directory, to {real}; give the "
            "directory where it is, or do not use this checkpoint."
        )


def flush(file: IO[Any] | UrlFile) -> None:
    """Put what was written on the disk; URLs see to it when they are closed."""
    file.flush()
    if not isinstance(file, UrlFile):
        os.fsync(file.fileno())
