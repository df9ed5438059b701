"""What appears under its name complete or not at all, whatever was there and whenever the job is killed."""

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
    """Where the new files are written."""
    publish: Callable[[], None]
    """Lets it take the place."""


@contextmanager
def complete_directory(target: str | Path, overwrite: bool, failure: str) -> Iterator[Place]:
    """A folder to write into that takes the target's place at the end, or vanishes if the body raises. Collective.

    The body must raise on all ranks if it raises on one. The folder lies beside the target, under a hidden name. If
    several processes do this at the same time, the target is the last one's, whole. Under a URL, where nothing can be
    renamed, the folder lies in the target: when it is complete, what was there is removed and the files are moved.

    Args:
        target: On a file system that all ranks share, or a URL that fsspec knows.
        overwrite: Replace what is there.
        failure: How errors begin.

    Raises:
        StateError: On every rank: the target has files and `overwrite` is not set, or it cannot be written.
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
                f"{error}; the new files are complete, those that were not moved yet are in {folder}: move them, or "
                "save again with overwrite=True"
            ) from error

    _refuse_occupied(place, overwrite)
    try:
        folder.make_directory()
        yield _Staged(folder, switch)
    except BaseException:
        if not is_complete:
            with suppress(OSError):  # that of the body says more
                folder.remove()
        raise


def _refuse_occupied(place: Place, overwrite: bool) -> None:
    if place.is_file():
        raise StateError("it is a file, which is not replaced by a directory; choose another or remove it")
    if is_occupied(place) and not overwrite:
        raise StateError("it exists and is not an empty directory; choose another or set overwrite=True")


def _switch(folder: UrlPath, place: UrlPath) -> None:
    """Replace what is under a URL. Readers find the old files, or no weights, or the new files."""

    def is_entry(name: str) -> bool:
        return name in (INDEX_FILE, ROWS_INDEX_FILE, WEIGHTS_FILE)

    for name in sorted(place.entries(), key=is_entry, reverse=True):
        (place / name).remove()
    for name in sorted(folder.names(), key=is_entry):
        (folder / name).move(place / name)
    folder.remove()


def make_directory(path: Path) -> None:
    """Make a directory and the parents that it lacks, and put their names on the disk."""
    if not path.is_dir():
        make_directory(path.parent)
        path.mkdir(exist_ok=True)
        sync(path.parent)


def publish(owner: Owner, overwrite: bool = False) -> None:
    """Put the owner's "partial" directory or file in place of what is under its path.

    In one step; only where a file or link makes room for a directory, or the other way round, or a directory with files
    for another, and Linux or the file system cannot exchange names, in two. What was there stays under a hidden name
    until the owner is closed. Where names cannot be changed at all (EXDEV), a file is copied, and that is not one step.

    Args:
        owner: Of the path. The content of files in a directory is on the disk.
        overwrite: Also in place of a directory with files, or by a file of any directory.
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
    """Write a file again under its name: its file system or mount, some by FUSE among them, renames nothing."""
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
            remove(replaced)  # another process has put something there in between
        else:
            return


def sync(path: Path) -> None:
    """Put the names in a directory, or the content of a file, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # not every file system can
            raise
    finally:
        os.close(descriptor)
