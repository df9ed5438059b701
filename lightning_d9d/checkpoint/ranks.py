"""Ranks that save or load one checkpoint: what fails on one of them fails on all."""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from lightning_d9d.errors import StateError
from lightning_d9d.mesh.collectives import all_gather_object

T = TypeVar("T")
K = TypeVar("K")
MAX_NAMED = 3
"""How many of a list an error names."""

_REMEDIES = {
    **dict.fromkeys(
        (errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "free space, raise the limit or save to another file system"
    ),
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM, errno.EROFS), "let this user write there or give a directory where it may"
    ),
    errno.ENAMETOOLONG: "give a shorter name",
}


class Ranks:
    """The ranks of a process group, or this process alone.

    Args:
        group: None for the default process group; without one, this process.
        alone: This process, whatever groups there are.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, alone: bool = False) -> None:
        self.group = group
        self.alone = alone or not dist.is_initialized()
        self.rank = 0 if self.alone else dist.get_rank(group)
        """Within the group."""

    @property
    def share(self) -> slice:
        """This rank's part of a list that all ranks have."""
        return slice(self.rank, None, 1 if self.alone else dist.get_world_size(self.group))

    @property
    def is_first(self) -> bool:
        """Whether this rank is the one that acts for all."""
        return self.rank == 0

    def together(self, failure: str, action: Callable[[], T]) -> list[T]:
        """What `action` returns on each rank, small and picklable. Collective.

        Args:
            failure: How the error begins.
            action: May raise anything, on any rank.

        Raises:
            StateError: It did; on every rank, with the ranks and their reasons.
        """
        value: T | None = None
        reason: str | None = None
        cause: BaseException | None = None
        try:
            value = action()
        except CheckpointException as error:  # torch raises it on all ranks, for the failures of some
            cause = error
            if self.rank in error.failures:
                reason = _reason(error.failures[self.rank][0])
        except Exception as error:
            cause, reason = error, _reason(error)
        if self.alone:
            if reason is not None:
                raise StateError(f"{failure}: {reason}") from cause
            return [value]  # type: ignore[list-item]
        answers = all_gather_object((value, reason), self.group)
        ranks = dist.get_process_group_ranks(self.group)
        failed: dict[str, list[int]] = {}
        for rank, (_, text) in zip(ranks, answers, strict=True):
            if text is not None:
                failed.setdefault(text, []).append(rank)
        if failed:
            texts = [f"{_named(those)}: {text}" for text, those in failed.items()]
            raise StateError(f"{failure}: {first_of(texts)}") from cause
        return [answer for answer, _ in answers]  # type: ignore[misc]

    def merge(self, values: Mapping[K, Any]) -> dict[K, Any]:
        """All ranks' values in one mapping, on every rank; of equal keys the lowest rank's. Collective.

        Hashes of the keys travel first, then only what the first rank with each set of keys has: one message for each
        pipeline stage, however many ranks it has.

        Args:
            values: Picklable; keys that can be sorted.
        """
        if self.alone:
            return dict(values)
        digest = hashlib.sha256(repr(sorted(values)).encode()).hexdigest()  # type: ignore[type-var]
        digests = all_gather_object(digest, self.group)
        merged: dict[K, Any] = {}
        for sender in sorted(map(digests.index, set(digests))):
            sent = [dict(values) if sender == self.rank else None]
            source = dist.get_process_group_ranks(self.group)[sender]
            dist.broadcast_object_list(sent, src=source, group=self.group)
            merged = {**(sent[0] or {}), **merged}
        return merged


def first_of(texts: list[str]) -> str:
    """Some of them, and how many more there are."""
    more = f"; and {len(texts) - MAX_NAMED} more" if len(texts) > MAX_NAMED else ""
    return "; ".join(texts[:MAX_NAMED]) + more


def _system_error(error: BaseException) -> BaseException:
    """The `OSError` that led to this error, if one did; else the error."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError):
            return seen
        seen = seen.__cause__ or seen.__context__
    return error


def _named(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - MAX_NAMED} more" if len(ranks) > MAX_NAMED else ""
    return f"ranks {', '.join(map(str, ranks[:MAX_NAMED]))}{more}"


def _reason(error: BaseException) -> str:
    if isinstance(error, StateError):
        return str(error)
    error = _system_error(error)
    text = (str(error).splitlines() or [""])[0]
    if isinstance(error, OSError):
        return f"{text}; {_REMEDIES.get(error.errno or 0, 'make it readable and writable or give another path')}"
    return f"{type(error).__name__}: {text}"
