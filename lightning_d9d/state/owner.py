"""Who has a path: hidden names beside it of the processes that save, and locks of those that read."""

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
"""What hidden names end with; the lock goes last."""
_SILENT_SECONDS = 3600
"""What has not changed for so long is a leftover where no lock can tell."""


class Owner:
    """One save or removal of a path, with hidden names beside it that no other save or removal has. Local.

    The names have a random token, and one beginning for each path. The file `.HASH.TOKEN.owner` is locked while the
    owner lives: the system lets go of the lock when the process ends, in whatever way. So leftovers are known by a
    lock that can be taken, or is not there. Locks of some file systems do not reach other machines, or are missing:
    what another machine made, or what cannot be locked, must also have been without a change for an hour.

    Args:
        path: In a directory that is there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # Without the path's own name: Lightning takes anything with `hpc_ckpt_2.ckpt` in its name for complete.
        self._prefix = f".{hashlib.blake2b(os.fsencode(path.name), digest_size=8).hexdigest()}."
        while True:
            self.token = _machine() + secrets.token_hex(5)
            self._lock = os.open(self.hidden("owner"), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            status = os.fstat(self._lock)
            if _try_lock(self._lock) is not False and os.fstat(self._lock).st_nlink > 0:
                break
            os.close(self._lock)  # another process took the new file for a leftover before it was locked
        self._began = status.st_mtime

    def hidden(self, purpose: str, token: str | None = None) -> Path:
        """The name for what is "partial", "replaced" or "removed"; by default this owner's."""
        return self.path.with_name(f"{self._prefix}{token or self.token}.{purpose}")

    def is_kept(self, token: str) -> bool:
        """Whether the owner with this token has not been closed, or removed as a leftover."""
        return os.path.lexists(self.hidden("owner", token))

    def tidy(self) -> None:
        """Remove what saves and removals of this path have left whose processes have ended."""
        pattern = re.compile(rf"{re.escape(self._prefix)}([0-9a-f]+)\.({'|'.join(_PURPOSES)})")
        for token in {found[1] for name in os.listdir(self.path.parent) if (found := pattern.fullmatch(name))}:
            with suppress(OSError):  # of another user, say: it stays
                self._tidy(token)

    def close(self) -> None:
        """Remove what is left of this save or removal and of those that have ended, and let go of the lock."""
        try:
            with suppress(OSError):  # of what came before says more
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
        """When something of another owner's changed last, by the clock of the file system."""
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
    """An owner of the path, after leftovers were removed; they are again at the end, with its own. Local."""
    owner = Owner(path)
    try:
        owner.tidy()
        yield owner
    finally:
        owner.close()


def hold(path: Path) -> BinaryIO | None:
    """Open a file for reading; until it is closed, no `unless_held` is true. Local.

    Returns:
        None if the file cannot be read, or is just being removed.

    Raises:
        StateError: It is a link, a pipe, a device or a directory.
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
    """Whether no process holds a file; until the block ends, none can. Local, and always true where there are no locks.

    Raises:
        OSError: The file cannot be written to: it is another user's, say.
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
    """Remove a file, link or directory, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(FileNotFoundError):
            path.unlink()


def _try_lock(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool | None:
    """Whether the lock was taken; None where the file system has none."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


@functools.cache
def _machine() -> str:
    """Six digits that a machine has from one start to the next; its containers share them."""
    try:
        name = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:  # not Linux
        name = socket.gethostname()
    return hashlib.blake2b(name.encode(), digest_size=3).hexdigest()
