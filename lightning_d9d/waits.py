"""The places where a rank's computation waits for other ranks, so that the time of a step can be split."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

_observers: list[WaitObserver] = []


class WaitObserver(Protocol):
    """Hears when computation begins to wait for other ranks, and when it may go on. Waits are not nested."""

    def begin_wait(self) -> None:
        """Computation comes to a wait. Local."""
        ...

    def end_wait(self) -> None:
        """Computation may go on. Local."""
        ...


class _Waiting(AbstractContextManager[None]):
    depth = 0

    def __enter__(self) -> None:
        self.depth += 1
        if self.depth == 1:
            for observer in _observers:
                observer.begin_wait()

    def __exit__(self, *_: object) -> None:
        self.depth -= 1
        if self.depth == 0:
            for observer in _observers:
                observer.end_wait()


_WAITING = _Waiting()


def waiting() -> AbstractContextManager[None]:
    """Open around what makes computation wait for other ranks: a collective, or the end of one that runs. Local.

    On CUDA the stream waits, and the body is done before: what counts is what it has put into the stream.
    """
    return _WAITING


@contextmanager
def observed_by(observer: WaitObserver) -> Generator[None]:
    """Tell an observer of waits while open. Local."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)
