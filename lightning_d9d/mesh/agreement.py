"""Ranks act together: an error on one of them is raised on all."""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from lightning_d9d.errors import ConfigError, RankError, StateError, StateNotFoundError
from lightning_d9d.mesh.collectives import all_gather_object

T = TypeVar("T")
K = TypeVar("K")
MAX_NAMED = 3
"""Maximum number of items of a list that an error names."""

_REMEDIES = {
    **dict.fromkeys(
        (errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "free space, raise the limit or save to another file system"
    ),
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM, errno.EROFS), "give this user permission to write there, or give another directory"
    ),
    errno.ENAMETOOLONG: "give a shorter name",
}


class Ranks:
    """The ranks of a process group, or this process alone.

    Args:
        group: The ranks; None for the default process group, or for this process if there is none.
        alone: Whether to use this process only, even if there are groups.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, alone: bool = False) -> None:
        self.group = group
        self.alone = alone or not dist.is_initialized()
        self.rank = 0 if self.alone else dist.get_rank(group)
        """The rank within the group."""

    @property
    def share(self) -> slice:
        """Return this rank's part of a list that all ranks have."""
        return slice(self.rank, None, 1 if self.alone else dist.get_world_size(self.group))

    @property
    def is_first(self) -> bool:
        """True if this rank acts for all."""
        return self.rank == 0

    def all_gather(self, value: T) -> list[T]:
        """Return every rank's picklable value, in the order of ranks. Collective."""
        return [value] if self.alone else all_gather_object(value, self.group)

    def together(self, failure: str, action: Callable[[], T]) -> list[T]:
        """Run `action` on every rank and return all ranks' results, small and picklable. Collective.

        It may take as long as the group's timeout lets the other ranks wait.

        Args:
            failure: The beginning of the error message.
            action: A function that may raise any `Exception`, on any rank.

        Raises:
            StateError: The action failed on some rank. Every rank raises the same error, with the ranks and their
                reasons, and a remedy for errors of the file system. On a rank that failed, its own exception is the
                cause.
            ConfigError: The action failed, and the lowest rank that failed had a ConfigError.
            RankError: The action failed, and the lowest rank that failed had a RankError.
        """
        value: T | None = None
        problem: tuple[type[Exception], str] | None = None
        cause: Exception | None = None
        try:
            value = action()
        except Exception as error:
            cause, problem = error, _problem(error)
        answers = self.all_gather((value, problem))
        ranks = [0] if self.alone else dist.get_process_group_ranks(self.group)
        failed: dict[tuple[type[Exception], str], list[int]] = {}
        for rank, (_, theirs) in zip(ranks, answers, strict=True):
            if theirs is not None:
                failed.setdefault(theirs, []).append(rank)
        if failed:
            kind, _ = next(iter(failed))
            texts = [text if self.alone else f"{_named(those)}: {text}" for (_, text), those in failed.items()]
            raise kind(f"{failure}: {first_of(texts)}") from cause
        return [answer for answer, _ in answers]  # type: ignore[misc]

    @contextmanager
    def agreed(self, failure: str) -> Iterator[None]:
        """Run a block like the action of `together`: it succeeds on all ranks or on none. Collective."""
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught

        def outcome() -> None:
            if error is not None:
                raise error

        self.together(failure, outcome)

    def merge(self, values: Mapping[K, Any]) -> dict[K, Any]:
        """Return all ranks' values in one mapping, on every rank; for equal keys the lowest rank's. Collective.

        Ranks send hashes of their keys first. Then only the first rank with each set of keys sends its values: one
        message for each pipeline stage.

        Args:
            values: Picklable values; the keys can be sorted.
        """
        if self.alone:
            return dict(values)
        digest = hashlib.sha256(repr(sorted(values)).encode()).hexdigest()  # type: ignore[type-var]
        digests = self.all_gather(digest)
        merged: dict[K, Any] = {}
        for sender in sorted(map(digests.index, set(digests))):
            sent = [dict(values) if sender == self.rank else None]
            source = dist.get_process_group_ranks(self.group)[sender]
            dist.broadcast_object_list(sent, src=source, group=self.group)
            merged = {**(sent[0] or {}), **merged}
        return merged


def first_of(texts: list[str]) -> str:
    """Return the first of some texts, and the number of the others."""
    more = f"; and {len(texts) - MAX_NAMED} more" if len(texts) > MAX_NAMED else ""
    return "; ".join(texts[:MAX_NAMED]) + more


def _named(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - MAX_NAMED} more" if len(ranks) > MAX_NAMED else ""
    return f"ranks {', '.join(map(str, ranks[:MAX_NAMED]))}{more}"


def _problem(error: Exception) -> tuple[type[Exception], str]:
    """Return the type of the error that all ranks raise, and the reason, with a remedy for system errors."""
    for kind in (ConfigError, StateNotFoundError, StateError, RankError):
        if isinstance(error, kind):
            return kind, str(error)
    system_error = _system_error(error)
    text = (str(system_error or error).splitlines() or [""])[0]
    if system_error is None:
        return StateError, f"{type(error).__name__}: {text}"
    remedy = _REMEDIES.get(system_error.errno or 0, "make it readable and writable or give another path")
    return StateError, f"{text}; {remedy}"


def _system_error(error: BaseException | None) -> OSError | None:
    """Return the `OSError` that led to this error, if there is one."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error
