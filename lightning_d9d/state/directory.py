"""Directories that appear complete or not at all, even if the job is killed at any moment."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from lightning_d9d.errors import StateError
from lightning_d9d.mesh.agreement import Ranks
from lightning_d9d.state.format import INDEX_FILE, ROWS_INDEX_FILE, WEIGHTS_FILE
from lightning_d9d.state.owner import Owner, owned, remove
from lightning_d9d.state.places import Place, UrlPath, is_occupied, place_of

_HAS_FILES = (errno.ENOTEMPTY, errno.EEXIST)


class _Staged(NamedTuple):
    folder: Place
    """Folder into which the new files are written."""
    publish: Callable[[], None]
    """Moves the folder to the target's place."""


@contextmanager
def complete_directory(target: str | Path, overwrite: bool, failure: str) -> Iterator[Place]:
    """Yield a folder that replaces the target at the end, or is removed if the body raises. Collective.

    The body must raise on all ranks if it raises on one. The folder lies beside the target, under a hidden name. If
    several processes do this at the same time, the target is the last one's, whole. Under a URL, where nothing can be
    renamed, the folder lies in the target. When it is complete, the old files are removed and the new ones moved.

    Args:
        target: Path on a file system that all ranks share, or a URL that fsspec knows.
        overwrite: Whether to replace an existing target.
        failure: Beginning of errors.

    Raises:
        StateError: The target has files and `overwrite` is not set, or it cannot be written. Every rank raises it.
    """
    place, ranks, staged = place_of(target), Ranks(), list[_Staged]()
    with ExitStack() as stack:

        def prepare() -> str | None:
            if not ranks.is_first:
                return None
            stage = _in_url(place, overwrite) if isinstance(place, UrlPath) else _beside(place.absolute(), overwrite)
            staged.append(stack.enter_context(stage))
            return str(staged[0].folder)

        def publish() -> None:
            for each in staged:  # on the first rank
                each.publish()

        folder = ranks.together(failure, prepare)[0]
        assert folder is not None
        yield place_of(folder)
        ranks.together(failure, publish)


@contextmanager
def _beside(path: Path, overwrite: bool) -> Iterator[_Staged]:
    make_directory(path.parent)
    with owned(path) as owner:
        _refuse_occupied(path, overwrite)
        folder = owner.hidden("partial")
        folder.mkdir()
        yield _Staged(folder, lambda: publish(owner, overwrite))


@contextmanager
def _in_url(place: UrlPath, overwrite: bool) -> Iterator[_Staged]:
    folder, is_complete = place.new_partial(), False

    def switch() -> None:
        nonlocal is_complete
        _refuse_occupied(place, overwrite)
        is_complete = True
        try:
            _switch(folder, place)
        except OSError as error:
            raise StateError(
                f"{error}; the new files are complete, but some are still in {folder}: move them, or save again "
                "with overwrite=True"
            ) from error

    _refuse_occupied(place, overwrite)
    try:
        folder.make_directory()
        yield _Staged(folder, switch)
    except BaseException:
        if not is_complete:
            with suppress(OSError):  # the body's error says more
                folder.remove()
        raise


def _refuse_occupied(place: Place, overwrite: bool) -> None:
    if place.is_file():
        raise StateError("it is a file, which a directory cannot replace; choose another path or remove it")
    if is_occupied(place) and not overwrite:
        raise StateError("it already exists and is not an empty directory; choose another path or set overwrite=True")


def _switch(folder: UrlPath, place: UrlPath) -> None:
    """Replace the content at a URL. Readers find the old files, no weights, or the new files."""

    def is_entry(name: str) -> bool:
        return name in (INDEX_FILE, ROWS_INDEX_FILE, WEIGHTS_FILE)

    for name in sorted(place.entries(), key=is_entry, reverse=True):
        (place / name).remove()
    for name in sorted(folder.names(), key=is_entry):
        (folder / name).move(place / name)
    folder.remove()


def make_directory(path: Path) -> None:
    """Make a directory and its missing parents, and flush their names to the disk."""
    if not path.is_dir():
        make_directory(path.parent)
        path.mkdir(exist_ok=True)
        sync(path.parent)


def publish(owner: Owner, overwrite: bool = False) -> None:
    """Move the owner's "partial" directory or file to its path.

    It takes one step if Linux and the file system can exchange names. If they cannot, it takes two steps to replace a
    file by a directory, a directory by a file, or a directory with files. The old content stays under a hidden name
    until the owner is closed. If names cannot be changed at all (EXDEV), a file is copied, which takes more than one
    step.

    Args:
        owner: Owner of the path. The content of files in a directory is on the disk.
        overwrite: If True, also replace a directory with files, or any directory by a file.
    """
    new, path = owner.hidden("partial"), owner.path
    sync(new)
    try:
        os.rename(new, path)
    except OSError as error:
        if error.errno == errno.EXDEV and new.is_file():
            _copy(new, path)
        elif error.errno == errno.ENOTDIR or (overwrite and error.errno in (*_HAS_FILES, errno.EISDIR)):
            _swap(new, path, owner.hidden("replaced"))
        else:
            raise
    sync(path.parent)


def _copy(new: Path, path: Path) -> None:
    """Copy a file to its name, if its file system or mount (some FUSE ones) cannot rename."""
    if path.is_symlink():
        path.unlink()
    with new.open("rb") as source, open(path, "wb", opener=_without_following) as target:
        shutil.copyfileobj(source, target)
    sync(path)
    new.unlink()


def _without_following(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def _swap(new: Path, path: Path, replaced: Path) -> None:
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    here, exchange = -100, 2
    if renameat2 is not None and renameat2(here, os.fsencode(new), here, os.fsencode(path), exchange) == 0:
        return
    while True:
        with suppress(FileNotFoundError):
            os.replace(path, replaced)
        try:
            os.rename(new, path)
        except OSError as error:
            if error.errno not in (*_HAS_FILES, errno.EISDIR, errno.ENOTDIR):
                raise
            remove(replaced)  # another process has put something there meanwhile
        else:
            return


def sync(path: Path) -> None:
    """Flush the names in a directory, or the content of a file, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # not every file system supports it
            raise
    finally:
        os.close(descriptor)
