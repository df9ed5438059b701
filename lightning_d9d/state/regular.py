"""Files of others are opened as files alone: no link is followed, and no pipe or device is waited for."""

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
        follow_links: The last part of the path may be a link, because the user gave it.

    Raises:
        StateError: A link, a pipe, a device or a directory is there.
        OSError: It cannot be opened.
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
        raise StateError(f"{str(path)!r} is no regular file; put the file itself there")
    return os.fdopen(descriptor, "rb")
