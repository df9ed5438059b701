"""Work on many tensors of files at the same time: whoever waits for the disk, or for a store, keeps nobody else."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

from lightning_d9d.state.progress import Progress

_MAX_THREADS = 16
"""Twice as many as read at a time, `MOST_READS`: the others check and copy meanwhile."""
_MIN_BUNDLE, _MAX_BUNDLE = 2**22, 2**26
"""Bytes. A thread that reads much in a row is read ahead for."""


@contextmanager
def uncollected() -> Generator[None]:
    """Keep Python from looking for garbage: the boxes of many tensors are made at once, and none is. Local."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def in_threads(
    work: Callable[[str], object],
    num_bytes: Mapping[str, int],
    progress: Progress,
) -> None:
    """Call `work` for each name, in several threads, without gradients. Local.

    Neighbours are one piece of work, in their order. The largest pieces come first: no thread begins one at the end,
    when the others have nothing left.

    Args:
        work: What it raises first, in the order of pieces, is raised here, when what has begun has ended.
        num_bytes: By name.
        progress: Gets the number of bytes.
    """
    inference = torch.is_inference_mode_enabled()

    def work_on(names: list[str]) -> int:
        with torch.inference_mode(inference), torch.no_grad():  # threads begin without
            for name in names:
                work(name)
        return sum(num_bytes[name] for name in names)

    num_threads = max(2, min(_MAX_THREADS, os.cpu_count() or 1))
    share = sum(num_bytes.values()) // (4 * num_threads)
    wanted = min(max(share, _MIN_BUNDLE), _MAX_BUNDLE)
    bundles = _bundles(num_bytes, wanted)
    bundles.sort(key=lambda names: num_bytes[names[0]] <= wanted)
    with ThreadPoolExecutor(num_threads) as pool:
        for done in pool.map(work_on, bundles):
            progress.add(done)


def _bundles(num_bytes: Mapping[str, int], wanted: int) -> list[list[str]]:
    """Names of neighbours, in pieces of about the wanted number of bytes. What is larger is a piece by itself."""
    bundles: list[list[str]] = []
    filled = wanted
    for name, size in num_bytes.items():
        if filled >= wanted or size > wanted:
            bundles.append([])
            filled = 0
        bundles[-1].append(name)
        filled += size
    return bundles
