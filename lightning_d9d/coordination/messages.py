"""Values that ranks write to the store for each other, and messages to the user: neither can block a watchdog."""

from __future__ import annotations

import json
import reprlib
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

from lightning_d9d.errors import RankError, printable

SAY_SECONDS = 1.0
"""Time limit of a message, because the reader of a pipe may have stopped."""
_MAX_VALUE_BYTES = 2**22
_MAX_SUMMARY, _MAX_TRACEBACK = 10_000, 100_000


class ForeignValueError(ValueError):
    """The store has a value under a key of this job that none of its ranks wrote."""


class LateError(RankError):
    """The other ranks did not arrive in time."""


@dataclass(frozen=True)
class Failure:
    """The first failure of a job."""

    rank: int
    summary: str
    """One line: type and message of the exception."""
    traceback: str = ""
    """The formatted exception, or empty for a process that ended without one."""

    @staticmethod
    def of(rank: int, error: BaseException) -> Failure:
        """Convert an error to the failure that other ranks see."""
        summary = "".join(traceback.format_exception_only(error)).strip()
        trace = "".join(traceback.format_exception(error))
        return Failure(rank, summary[:_MAX_SUMMARY], trace[-_MAX_TRACEBACK:])

    def to_store(self) -> str:
        """Return the content that `from_store` reads."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_store(key: str, content: bytes) -> Failure:
        """Return the failure that a rank has written under a key.

        Raises:
            ForeignValueError: The content is not such a value.
        """
        return Failure(**value_of(key, content, _is_failure))

    def is_told_by(self, rank: int) -> bool:
        """Return whether a rank is the lowest of those that are left."""
        return rank == (1 if self.rank == 0 else 0)

    def __str__(self) -> str:
        return f"rank {self.rank} failed: {self.summary}"


def value_of(key: str, content: bytes, is_valid: Callable[[Any], bool]) -> Any:
    """Return the JSON value that a rank has written to the store.

    Args:
        key: The key in the store.
        content: The content that was read.
        is_valid: Returns whether ranks write such a value under the key.

    Raises:
        ForeignValueError: The content is not a failure.
    """
    try:
        value = json.loads(content.decode()) if len(content) <= _MAX_VALUE_BYTES else None
        is_ours = len(content) <= _MAX_VALUE_BYTES and is_valid(value)
    except (ValueError, RecursionError):
        value, is_ours = None, False
    if not is_ours:
        raise ForeignValueError(
            f"the store has {reprlib.repr(content)} under {key!r}, which no rank of this job wrote. Another process "
            "uses the job's MASTER_ADDR and MASTER_PORT: start the job with a port of its own"
        )
    return value


def count(store: dist.Store, key: str, more: int = 0) -> int:
    """Add to a number in the store, and return it.

    The server disconnects a client that adds to a value other than a number.

    Raises:
        ForeignValueError: The store has another value there.
    """
    number = value_of(key, store.compare_set(key, "0", "0"), is_count)  # which also reads what is missing
    return store.add(key, more) if more else number


def is_count(value: Any) -> bool:
    """Return whether a value is a number of batches or ranks."""
    return type(value) is int and value >= 0


def is_signal(value: Any) -> bool:
    """Return whether a value is the number of a signal."""
    return type(value) is int and value in {int(each) for each in signal.Signals}


def is_stop(value: Any) -> bool:
    """Return whether a value is a rank and its signal."""
    return isinstance(value, list) and len(value) == 2 and is_count(value[0]) and is_signal(value[1])


def is_position(value: Any) -> bool:
    """Return whether a value is a pair of numbers of batches: of training and of evaluation."""
    return isinstance(value, list) and len(value) == 2 and all(map(is_count, value))


def is_end(value: Any) -> bool:
    """Return whether a value is the end of a rank's epoch: batches, whether there is more to do, the rank."""
    return isinstance(value, list) and len(value) == 3 and isinstance(value[1], bool) and all(map(is_count, value[::2]))


def is_connection_error(error: BaseException) -> bool:
    """Return whether a collective failed because a peer disconnected. Gloo raises plain RuntimeErrors."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "/gloo/" in str(error))


def is_silence(error: BaseException) -> bool:
    """Return whether an error says that others did not answer, but not why."""
    return is_connection_error(error) or isinstance(error, LateError)


def silence_text(silent: Sequence[int] | None) -> str:
    """Return what is known of the ranks that do not answer. None means that the store did not say in time."""
    if silent is None:
        return "it is not known which ranks still answer: the store of rank 0 did not say so in time"
    if not silent:
        return (
            "all ranks still answer: one was slower than TimeoutConfig.step_seconds, or a connection between two broke"
        )
    ranks = f"rank{'s' * (len(silent) > 1)} {', '.join(map(str, silent))}"
    return (
        f"no answer from {ranks}: a process ended (the output of what launched it has its exit code) or is stopped, or "
        "the network is down"
    )


def _is_failure(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"rank", "summary", "traceback"}
        and is_count(value["rank"])
        and isinstance(value["summary"], str)
        and isinstance(value["traceback"], str)
    )


def say(text: str) -> None:
    """Write a line to stderr and flush both streams, for at most `SAY_SECONDS`.

    Another thread does so, because the streams may be full, closed, None, or pipes that nobody reads.
    """
    thread = threading.Thread(target=_write, args=(printable(text),), name="lightning_d9d message", daemon=True)
    with suppress(RuntimeError):  # there cannot be another thread
        thread.start()
        thread.join(SAY_SECONDS)


def _write(text: str) -> None:
    for stream, content in ((sys.stderr, f"{text}\n"), (sys.stdout, "")):
        with suppress(Exception):
            stream.write(content)
            stream.flush()
