"""Opens files of others only if they are regular files: it follows no link, and never waits for a pipe or a device."""

from __future__ import annotations

import errno
import io
import os
import stat
from pathlib import Path

from lightning_d9d.errors import StateError


def open_regular(path: str | Path, *, follow_links: bool = False) -> io.BufferedReader:
    """Open a file for reading.

    Args:
        path: The file.
        follow_links: Whether the last part of the path may be a link, because the user gave it.

    Raises:
        StateError: The path is a link, a pipe, a device or a directory.
        OSError: The file cannot be opened.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow_links else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link; a socket
            raise StateError(f"{str(path)!r} is a link or a special file; put the file itself there") from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise StateError(f"{str(path)!r} is not a regular file; put the file itself there")
    return os.fdopen(descriptor, "rb")
