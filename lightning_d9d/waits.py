"""The places where a rank's computation waits for other ranks, from which the parts of a step are measured."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

_observers: list[WaitObserver] = []


class WaitObserver(Protocol):
    """Notified when computation begins to wait for other ranks, and when it continues. Waits are not nested."""

    def begin_wait(self) -> None:
        """Computation begins a wait. Local."""
        ...

    def end_wait(self) -> None:
        """Computation continues. Local."""
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
    """Mark a wait of computation for other ranks: a collective, or the end of a running one. Local.

    On CUDA the stream waits, while the body returns earlier: the work that it has put into the stream counts.
    """
    return _WAITING


@contextmanager
def observed_by(observer: WaitObserver) -> Generator[None]:
    """Notify an observer of waits inside the block. Local."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)
