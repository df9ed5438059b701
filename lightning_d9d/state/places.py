"""Directories and files, on a file system or under a URL that fsspec knows."""

from __future__ import annotations

import errno
import os
import posixpath
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath, PurePosixPath
from types import TracebackType
from typing import IO, Any, Self

import fsspec
from fsspec.implementations.local import LocalFileSystem

from lightning_d9d.errors import StateError

_PARTIAL = re.compile(r"\.(\d{1,12})-[0-9a-f]{16}\.partial")
_SECONDS_OF_A_SAVE = 24 * 3600
"""A save under a URL, which has no locks, is a leftover if it began longer ago than this."""

MAX_SMALL_BYTES = 100_000_000
"""Largest file that is read whole: a table, or one beside weights. Published tokenizers have up to 35 MB."""


class UrlPath:
    """The part of a `Path` that reading and writing weights needs, for a URL such as `s3://bucket/model`.

    Raises:
        OSError: A package of fsspec failed. The message has the URL; all methods may raise it.
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
        """The last part of the path."""
        return self._url.rpartition("/")[2]

    @property
    def normal(self) -> tuple[object, PurePath]:
        """The store (None for the local file system), and the path in it in its normal form."""
        if isinstance(self._files, LocalFileSystem):
            return None, Path(self._path).resolve()
        store = type(self._files), self._files.storage_options.get("host")
        return store, PurePosixPath(posixpath.normpath("/" + self._path.lstrip("/")))

    def exists(self) -> bool:
        """Return True if a file or directory is there."""
        with _named(self._url):
            return bool(self._files.exists(self._path))

    def is_file(self) -> bool:
        """Return True if it is a file."""
        with _named(self._url):
            return bool(self._files.isfile(self._path))

    def open(self, mode: str) -> UrlFile:
        """Open the file for writing."""
        with _named(self._url):
            return UrlFile(self._url, self._files.open(self._path, mode))

    def size(self) -> int:
        """Return the size of the file in bytes."""
        with _named(self._url):
            return int(self._files.size(self._path))

    def read_bytes(self, start: int = 0, stop: int | None = None) -> bytes:
        """Return a range of the file, fetched again each time."""
        with _named(self._url):
            return self._files.cat_file(self._path, start=start, end=stop) if stop is None or stop > start else b""

    def entries(self) -> list[str]:
        """List the names of all entries of the directory, without new folders that others may still write into."""
        now = time.time()
        started = {name: _PARTIAL.fullmatch(name) for name in self._types()}
        return [name for name, found in started.items() if not found or now - int(found[1]) > _SECONDS_OF_A_SAVE]

    def names(self) -> list[str]:
        """List the names of the files in the directory."""
        return [name for name, kind in self._types().items() if kind == "file"]

    def _types(self) -> dict[str, str]:
        with _named(self._url):
            self._files.invalidate_cache()  # others write there too
            found = self._files.ls(self._path, detail=True) if self._files.exists(self._path) else []
            return {str(each["name"]).rstrip("/").rpartition("/")[2]: each["type"] for each in found}

    def new_partial(self) -> UrlPath:
        """Return a new place in the directory for incomplete content, with a unique name."""
        return self / f".{int(time.time())}-{secrets.token_hex(8)}.partial"

    def move(self, target: UrlPath) -> None:
        """Move the file to another name in the same store, replacing a file there."""
        with _named(self._url):
            self._files.mv(self._path, target._path)

    def make_directory(self) -> None:
        """Make the directory, if the store has directories."""
        with _named(self._url):
            self._files.makedirs(self._path, exist_ok=True)

    def remove(self) -> None:
        """Remove the directory or file, with everything in it."""
        with _named(self._url):
            if self.exists():
                self._files.rm(self._path, recursive=True)


class UrlFile:
    """A file under a URL. Content is sent at the latest when the file is closed. It raises like `UrlPath`."""

    def __init__(self, url: str, file: IO[Any]) -> None:
        self._url, self._file = url, file

    def write(self, content: Any) -> None:
        """Write more bytes."""
        with _named(self._url):
            self._file.write(content)

    def flush(self) -> None:
        """Send all bytes that can be sent."""
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
"""A path or URL of weights."""


def place_of(path: str | Path | UrlPath) -> Place:
    """Return a `UrlPath` for a URL, and a `Path` for other paths and URLs of the local file system."""
    if isinstance(path, UrlPath):
        return path
    for scheme in ("file://", "local://"):
        path = str(path).removeprefix(scheme) if str(path).startswith(scheme) else path
    return UrlPath(str(path)) if "://" in str(path) else Path(path)


def refuse_overlap(source: Place, target: Place) -> None:
    """Refuse to replace a source that is read. Local.

    Paths are compared without links, and URLs by their store and their path in it.

    Raises:
        StateError: The target is the source, lies in it, or contains it.
    """
    (store, read), (other_store, written) = _normal(source), _normal(target)
    if store != other_store or not (read.is_relative_to(written) or written.is_relative_to(read)):
        return
    relation = "is" if read == written else "contains" if read.is_relative_to(written) else "lies in"
    raise StateError(f"the target {target} {relation} {source}, which is read; choose another target")


def lies_in(place: Place, folder: Place) -> bool:
    """Return True if a place is a folder or lies in it. Local; places are compared as by `refuse_overlap`."""
    (store, inner), (other_store, outer) = _normal(place), _normal(folder)
    return store == other_store and inner.is_relative_to(outer)


def _normal(place: Place) -> tuple[object, PurePath]:
    """Return the store, and the path in it in a form that is equal for equal places."""
    if isinstance(place, UrlPath):
        place = place_of(str(place).rpartition("::")[2])  # without the caches in front of the store
    return place.normal if isinstance(place, UrlPath) else (None, place.resolve())


def is_occupied(place: Place) -> bool:
    """Return True if something is there, other than an empty directory."""
    if isinstance(place, UrlPath):
        return bool(place.entries())
    return place.exists() and (not place.is_dir() or any(place.iterdir()))


def names_in(place: Place) -> list[str]:
    """List the names of the files in a directory."""
    return place.names() if isinstance(place, UrlPath) else [path.name for path in place.iterdir() if path.is_file()]


def read_small(path: Place) -> bytes:
    """Return the content of a regular file of at most `MAX_SMALL_BYTES`; never wait for a pipe or device.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is not a regular one, or is too large.
    """
    if isinstance(path, UrlPath):
        content = path.read_bytes(0, min(path.size(), MAX_SMALL_BYTES + 1))
    else:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ValueError("it is not a regular file")
            content = file.read(MAX_SMALL_BYTES + 1)
    if len(content) > MAX_SMALL_BYTES:
        raise ValueError(f"it is larger than {MAX_SMALL_BYTES} bytes, the limit for a file that is read whole")
    return content


def check_link(folder: Place, name: str, named_by: Place) -> None:
    """Refuse a file that is a link out of its directory.

    In the cache of Hugging Face's hub, `snapshots/REVISION/FILE` may be a link to `blobs/HASH`.

    Args:
        folder: The directory.
        name: The file's path in it.
        named_by: Beginning of error messages.

    Raises:
        StateError: The link leads elsewhere, or cannot be followed.
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
            f"{named_by}: the file {name!r} is a link out of the directory, to {real}. Give the directory that "
            "contains the file, or do not use this checkpoint."
        )


def flush(file: IO[Any] | UrlFile) -> None:
    """Flush written bytes to the disk; files under URLs do so when they are closed."""
    file.flush()
    if not isinstance(file, UrlFile):
        os.fsync(file.fileno())
