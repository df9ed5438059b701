"""Files that are made once for all ranks of a machine, or of all machines that share a folder, and kept for later runs.

One rank makes the file, while all ranks signal each other at short intervals that they are alive. So the others wait as
long as it makes progress, however large the data are, and a failure there fails on all ranks.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from lightning_d9d.errors import ConfigError, RankError, printable, reason
from lightning_d9d.mesh.agreement import Ranks

VARIABLE = "LIGHTNING_D9D_CACHE"
"""The environment variable that names the folder if no setting does."""
_TURN_SECONDS = 5.0
"""Ranks signal each other at least this often."""
SILENT_SECONDS = 7200.0
"""The longest time that a rank may make a file without progress."""
_CHUNK = 1 << 24
_SETTLED_NS = 2_000_000_000
"""Minimum age of a file when it is hashed: a later write could leave its times unchanged."""

Progress = Callable[[], None]
"""A function that is called whenever the making of a file has advanced."""


def folder_of_cache(given: str | Path | None) -> Path:
    """Return the folder of kept files: a given one, that of the environment, or the user's own. Local."""
    if given is not None:
        return Path(given).expanduser()
    if named := os.environ.get(VARIABLE):
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_d9d"


def made_once(
    folder: Path, name: Callable[[Progress], str], make: Callable[[Path, Progress], None], ranks: Ranks
) -> Path:
    """Return a file, which is made unless the folder has it. Collective over `ranks`.

    The first rank makes it. If other ranks do not see it, because the folder is not shared, the first rank of each
    machine makes it there.

    Args:
        folder: The folder.
        name: Returns the file's name, which must follow from everything that determines its content. Called only where
            the file is made.
        make: Makes the file at a path, all at once, unless it exists and is whole.
        ranks: The ranks that need it.

    Raises:
        ConfigError: Some rank failed, machines have different sources, or the folder cannot be written. The error is
            the same on all ranks.
        RankError: A rank made no progress for `SILENT_SECONDS`.
    """

    def work(tell: Progress) -> str:
        found = name(tell)
        with _writable(folder):
            folder.mkdir(parents=True, exist_ok=True)
        with _alone(folder / f"{found}.lock", tell):
            make(folder / found, tell)
        return found

    names = _run_on([0], work, ranks)
    agreed = names[0]
    assert agreed is not None
    made_by: set[int] = {0}
    while True:
        seen = ranks.all_gather((socket.gethostname(), (folder / agreed).is_file()))
        without = [rank for rank, (_, is_there) in enumerate(seen) if not is_there]
        if not without:
            return folder / agreed
        if again := made_by.intersection(without):
            raise ConfigError(f"rank {min(again)} has made {folder / agreed} but does not find it; set another folder")
        makers = [
            next(rank for rank in without if seen[rank][0] == host)
            for host in dict.fromkeys(seen[rank][0] for rank in without)
        ]
        made_by.update(makers)
        names = _run_on(makers, work, ranks)
        if other := next((rank for rank, found in enumerate(names) if found not in (None, agreed)), None):
            raise ConfigError(
                f"rank {other} on {seen[other][0]} has other files, another tokenizer or other versions than rank 0; "
                "copy them to all machines"
            )


def _run_on(makers: Sequence[int], work: Callable[[Progress], str], ranks: Ranks) -> list[str | None]:
    """Return the results of work on some ranks, and None on the others. Collective."""
    if ranks.alone:
        return [work(lambda: None)]
    job = _Job(work) if ranks.rank in makers else None
    try:
        while any(ranks.all_gather(job is not None and job.is_busy(_TURN_SECONDS))):
            pass
    except RuntimeError as error:  # of the backend: the watchdog adds which rank
        error.add_note(
            f"a rank has ended while data were prepared on rank{'s' * (len(makers) > 1)} "
            f"{', '.join(map(str, makers))}; run the same again: texts go on where they were, chats begin again"
        )
        raise
    return ranks.together("data cannot be prepared", lambda: None if job is None else job.result())


class _Job:
    """Work in a separate thread, which ends with the process."""

    def __init__(self, work: Callable[[Progress], str]) -> None:
        self._work = work
        self._value: str | None = None
        self._error: Exception | None = None
        self._progress = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="prepares data", daemon=True)
        self._thread.start()

    def is_busy(self, seconds: float) -> bool:
        """Wait for a while, and return whether the work is still running."""
        self._thread.join(seconds)
        return self._thread.is_alive() and time.monotonic() - self._progress < SILENT_SECONDS

    def result(self) -> str | None:
        """Return the result of the work, or raise its error."""
        if self._thread.is_alive():
            raise RankError(f"the preparation of data has made no progress for {SILENT_SECONDS:.0f} seconds")
        if self._error is not None:
            raise self._error
        return self._value

    def _run(self) -> None:
        try:
            self._value = self._work(self._tell)
        except Exception as error:
            self._error = error

    def _tell(self) -> None:
        self._progress = time.monotonic()


def digest_of_files(paths: Sequence[str | Path], folder: Path, tell: Progress) -> str:
    """Return a hash of the content of files; files of directories are taken in the order of their names. Local.

    A file that was hashed before is not read again as long as its size, its times and its inode stay the same. Its
    change time (`ctime`) is one of them, which no program can set. Hashes are kept in the folder `digests`.

    Args:
        paths: Files and directories.
        folder: Folder that keeps the hashes of files.
        tell: Called whenever more has been read.

    Raises:
        ConfigError: A file cannot be read, or the folder cannot be written.
    """
    digest = hashlib.sha256()
    for path in map(Path, paths):
        for each in sorted(path.rglob("*")) if path.is_dir() else [path]:
            try:
                if path.is_dir() and not each.is_file():
                    continue
                content = _digest_of_file(each, folder / "digests", tell)
            except OSError as error:
                raise ConfigError(f"{each} cannot be read: {reason(error)}") from error
            digest.update(content + str(path.suffix).encode())
    return digest.hexdigest()


def _digest_of_file(path: Path, folder: Path, tell: Progress) -> bytes:
    note, began = folder / hashlib.sha256(str(path.resolve()).encode()).hexdigest(), time.time_ns()
    with path.open("rb") as file:
        before = _stamp(file)
        with suppress(OSError, ValueError, KeyError, TypeError):  # none, or a damaged one
            noted = json.loads(note.read_text())
            if noted["stamp"] == before:
                return bytes.fromhex(noted["sha256"])
        content = hashlib.sha256()
        while chunk := file.read(_CHUNK):
            content.update(chunk)
            tell()
        is_settled = _stamp(file) == before and max(before[1:3]) < began - _SETTLED_NS
    if is_settled:
        with _writable(folder):
            folder.mkdir(parents=True, exist_ok=True)
        with replacing(note) as part:
            part.write_text(json.dumps({"path": str(path), "stamp": before, "sha256": content.hexdigest()}))
    return content.digest()


def _stamp(file: BinaryIO) -> list[int]:
    """Return a value that changes whenever the file is written."""
    found = os.fstat(file.fileno())
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary name beside a path; its file gets the path's name at the end of the block if nothing is raised.

    Local.

    Raises:
        ConfigError: The file cannot be written.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(5)}.part")
    try:
        with _writable(path.parent):
            yield part
            part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def _alone(path: Path, tell: Progress) -> Iterator[None]:
    """Wait until no other job makes the file. The lock of a process ends with the process, however it ends."""
    with _writable(path.parent):
        lock = path.open("wb")
    with lock:
        while not _try_lock(lock):
            time.sleep(0.2)
            tell()
        yield


def _try_lock(file: BinaryIO) -> bool:
    """Return whether the lock was taken, or the file system has no locks. Forks of this process do not hold it."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return True
    return True


@contextmanager
def _writable(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{printable(str(folder))} keeps prepared data but cannot be written: {reason(error)}. Set another folder "
            f"with cache_folder, or for all runs with the variable {VARIABLE}"
        ) from error
