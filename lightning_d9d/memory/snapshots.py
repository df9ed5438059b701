"""Snapshots of a GPU's memory: what lies where, and which lines of Python have asked for it.

https://pytorch.org/memory_viz shows them. All of it needs CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import torch

_MAX_ENTRIES = 200_000
"""Allocations that are remembered at most; each takes some KB of the host's memory."""

_actions: list[Callable[[], None]] = []
_attached = False


@contextmanager
def recorded_history() -> Generator[None]:
    """Remember allocations, and the Python stack of each, while open. Local; not to be nested.

    Raises:
        RuntimeError: The allocator cannot remember them, as that of `backend:cudaMallocAsync`.
    """
    torch.cuda.init()
    torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=_MAX_ENTRIES)
    try:
        yield
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


@contextmanager
def at_out_of_memory(action: Callable[[], None]) -> Generator[None]:
    """Call an action whenever memory runs out while open, before anything is freed. Local.

    Code may catch the error and try otherwise, so memory may run out more than once.

    Args:
        action: Must not raise.

    Raises:
        RuntimeError: The allocator does not say so, as that of `backend:cudaMallocAsync`.
    """
    global _attached
    if not _attached:
        torch._C._cuda_attach_out_of_memory_observer(_tell)  # type: ignore[attr-defined]  # only with CUDA
        _attached = True  # for the rest of the process: torch has no way back
    _actions.append(action)
    try:
        yield
    finally:
        _actions.remove(action)


def write_snapshot(path: Path) -> None:
    """Write what the allocator holds now, and what was remembered. Local.

    Raises:
        OSError: The file cannot be written.
    """
    torch.cuda.memory._dump_snapshot(str(path))


def _tell(device: int, wanted: int, total: int, free: int) -> None:
    for action in tuple(_actions):
        action()
