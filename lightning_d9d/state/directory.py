"""What appears under its name complete or not at all, whatever was there and whenever the job is killed."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lightning_d9d.errors import StateError
from lightning_d9d.mesh.agreement import Ranks
from lightning_d9d.state.places import Place, UrlPath, is_occupied, place_of

_OCCUPIED = "it exists and is not an empty directory; choose another or set overwrite=True"


@contextmanager
def complete_directory(target: str | Path, overwrite: bool, failure: str) -> Iterator[Place]:
    """A folder to write into that takes the target's place at the end, or vanishes if the body raises. Collective.

    The body must raise on all ranks if it raises on one. The folder lies beside the target, under a hidden name. Under
    a URL, where nothing can be renamed, it is the target, whose old files are removed before.

    Args:
        target: On a file system that all ranks share, or a URL that fsspec knows.
        overwrite: Replace what is there.
        failure: How errors begin.

    Raises:
        StateError: On every rank: the target has files and `overwrite` is not set, or it cannot be written.
    """
    place = place_of(target)
    if isinstance(place, UrlPath):
        with _emptied(place, overwrite, failure):
            yield place
        return
    ranks = Ranks()
    target = place.absolute()
    partial = hidden(target, "partial")
    try:
        with ranks.agreed(failure):
            if ranks.is_first:
                tidy(target)
                if is_occupied(target) and not target.is_dir():
                    raise StateError("it is a file, which is not replaced by a directory; choose another or remove it")
                if is_occupied(target) and not overwrite:
                    raise StateError(_OCCUPIED)
                partial.mkdir(parents=True)
        yield partial
        with ranks.agreed(failure):
            if ranks.is_first:
                publish(partial, target, overwrite)
    finally:
        if ranks.is_first:
            with suppress(OSError):  # that of the body says more
                tidy(target)


@contextmanager
def _emptied(place: UrlPath, overwrite: bool, failure: str) -> Iterator[None]:
    ranks = Ranks()
    with ranks.agreed(failure):
        if ranks.is_first and is_occupied(place):
            if not overwrite:
                raise StateError(_OCCUPIED)
            place.remove()
        if ranks.is_first:
            place.make_directory()
    try:
        yield
    except BaseException:
        if ranks.is_first:
            with suppress(OSError):
                place.remove()
        raise


def hidden(path: Path, purpose: str) -> Path:
    """A name beside `path` for what is not yet or no longer there: "partial", "replaced" or "removed".

    The former name is not in it, where others look for what is complete: Lightning for anything with `hpc_ckpt_2.ckpt`.
    """
    return path.with_name(f".{hashlib.blake2b(os.fsencode(path.name), digest_size=8).hexdigest()}.{purpose}")


def publish(new: Path, path: Path, overwrite: bool = False) -> None:
    """Put a directory or a file in place of what is under `path`.

    In one step; only where a file or link makes room for a directory, or the other way round, or a directory with files
    for another, and Linux or the file system cannot exchange names, in two. What was there is gone, or stays under a
    hidden name, for `tidy`. Where names cannot be changed at all (EXDEV), a file is copied, and that is not one step.

    Args:
        new: In the same directory as `path`; the content of files in it on the disk.
        path: Where it shall be.
        overwrite: Also in place of a directory with files, or by a file of any directory.
    """
    sync(new)
    try:
        os.rename(new, path)
    except OSError as error:
        has_files = error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.EISDIR)
        if error.errno == errno.EXDEV and new.is_file():
            _copy(new, path)
        elif error.errno == errno.ENOTDIR or (overwrite and has_files):
            _swap(new, path)
        else:
            raise
    sync(path.parent)


def _copy(new: Path, path: Path) -> None:
    """Write a file again under its name: its file system or mount, some by FUSE among them, renames nothing."""
    shutil.copyfile(new, path)
    sync(path)
    new.unlink()


def _swap(new: Path, path: Path) -> None:
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    here, exchange = -100, 2
    if renameat2 is None or renameat2(here, os.fsencode(new), here, os.fsencode(path), exchange) != 0:
        os.replace(path, hidden(path, "replaced"))
        os.rename(new, path)


def tidy(path: Path) -> None:
    """Remove what a save or removal, killed or failed, has left beside `path`."""
    replaced = hidden(path, "replaced")
    if os.path.lexists(replaced) and not os.path.lexists(path):
        os.replace(replaced, path)
    for purpose in ("partial", "replaced", "removed"):
        remove(hidden(path, purpose))


def remove(path: Path) -> None:
    """Remove a file, link or directory, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(FileNotFoundError):
            path.unlink()


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
