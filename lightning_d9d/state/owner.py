"""Ownership of a path: hidden names beside it for processes that save, and locks for processes that read."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from lightning_d9d.state.regular import open_regular

_PURPOSES = ("partial", "replaced", "removed", "owner")
"""Suffixes of hidden names; the lock is removed last."""
_SILENT_SECONDS = 3600
"""A hidden file without a usable lock is a leftover if it has not changed for this long."""


class Owner:
    """An owner of a path for one save or removal, with hidden names beside it that no other has. Local.

    The names have a random token, and a common beginning for each path. The file `.HASH.TOKEN.owner` is locked while
    the owner lives. The system releases the lock when the process ends, in any way. So a leftover has a lock that is
    free or missing. On some file systems locks do not reach other machines, or are missing. Therefore files of another
    machine, or files that cannot be locked, must also be unchanged for an hour.

    Args:
        path: The path, in an existing directory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # The name does not have the path's own name: Lightning takes any file with `hpc_ckpt_2.ckpt` in its name for
        # complete.
        self._prefix = f".{hashlib.blake2b(os.fsencode(path.name), digest_size=8).hexdigest()}."
        while True:
            self.token = _machine() + secrets.token_hex(5)
            self._lock = os.open(self.hidden("owner"), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            status = os.fstat(self._lock)
            if _try_lock(self._lock) is not False and os.fstat(self._lock).st_nlink > 0:
                break
            os.close(self._lock)  # another process removed the new file as a leftover before it was locked
        self._began = status.st_mtime

    def hidden(self, purpose: str, token: str | None = None) -> Path:
        """Return the hidden name of the "partial", "replaced" or "removed" content; by default this owner's."""
        return self.path.with_name(f"{self._prefix}{token or self.token}.{purpose}")

    def is_kept(self, token: str) -> bool:
        """Return True until the owner with this token is closed, or removed as a leftover."""
        return os.path.lexists(self.hidden("owner", token))

    def tidy(self) -> None:
        """Remove the leftovers of saves and removals of this path whose processes have ended."""
        pattern = re.compile(rf"{re.escape(self._prefix)}([0-9a-f]+)\.({'|'.join(_PURPOSES)})")
        for token in {found[1] for name in os.listdir(self.path.parent) if (found := pattern.fullmatch(name))}:
            with suppress(OSError):  # it stays, for instance if it is another user's
                self._tidy(token)

    def close(self) -> None:
        """Remove the leftovers of this save or removal and of ended ones, and release the lock."""
        try:
            with suppress(OSError):  # an earlier error says more
                self._clear(self.token)
        finally:
            os.close(self._lock)
        self.tidy()

    def _tidy(self, token: str) -> None:
        try:
            lock = os.open(self.hidden("owner", token), os.O_RDWR | os.O_NOFOLLOW)
        except FileNotFoundError:
            self._clear(token)
            return
        try:
            if self._has_ended(lock, token):
                self._clear(token)
        finally:
            os.close(lock)

    def _has_ended(self, lock: int, token: str) -> bool:
        is_free = _try_lock(lock)
        if is_free is False:
            return False
        return (is_free and token.startswith(_machine())) or self._began - self._changed(token) > _SILENT_SECONDS

    def _changed(self, token: str) -> float:
        """Return when another owner's files changed last, by the clock of the file system."""
        roots = [self.hidden(purpose, token) for purpose in _PURPOSES]
        paths = [path for root in roots if os.path.lexists(root) for path in (root, *root.rglob("*"))]
        return max(os.lstat(path).st_mtime for path in paths)

    def _clear(self, token: str) -> None:
        replaced = self.hidden("replaced", token)
        if os.path.lexists(replaced) and not os.path.lexists(self.path):
            os.rename(replaced, self.path)
        for purpose in _PURPOSES:
            remove(self.hidden(purpose, token))


@contextmanager
def owned(path: Path) -> Iterator[Owner]:
    """Yield an owner of the path after removing leftovers; at the end remove leftovers again, including its own.

    Local.
    """
    owner = Owner(path)
    try:
        owner.tidy()
        yield owner
    finally:
        owner.close()


def hold(path: Path) -> BinaryIO | None:
    """Open a file for reading; until it is closed, `unless_held` yields False on every process. Local.

    Returns:
        The file; None if it cannot be read, or is being removed.

    Raises:
        StateError: The path is a link, a pipe, a device or a directory.
    """
    try:
        file = open_regular(path)
    except OSError:
        return None
    if _try_lock(file.fileno(), fcntl.LOCK_SH) is not False and os.fstat(file.fileno()).st_nlink > 0:
        return file
    file.close()
    return None


@contextmanager
def unless_held(path: Path) -> Iterator[bool]:
    """Yield True if no process holds a file; none can hold it until the block ends. Local; always True without locks.

    Raises:
        OSError: The file cannot be written, for example because it belongs to another user.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        yield True
        return
    try:
        yield _try_lock(descriptor) is not False
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a file, link or directory, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(FileNotFoundError):
            path.unlink()


def _try_lock(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool | None:
    """Return True if the lock was taken; None if the file system has no locks."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


@functools.cache
def _machine() -> str:
    """Return six digits that identify a machine until it reboots; its containers share them."""
    try:
        name = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:  # not Linux
        name = socket.gethostname()
    return hashlib.blake2b(name.encode(), digest_size=3).hexdigest()
