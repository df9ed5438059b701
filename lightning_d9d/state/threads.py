"""Processes many tensors of files at the same time: a thread that waits for a disk or a store does not block others."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

from lightning_d9d.state.progress import Progress

_MAX_THREADS = 16
"""Twice the number of concurrent reads, `MOST_READS`: the other threads check and copy meanwhile."""
_MIN_BUNDLE, _MAX_BUNDLE = 2**22, 2**26
"""Bytes of a group of neighbouring tensors. The system reads ahead for a thread that reads much in a row."""


@contextmanager
def uncollected() -> Generator[None]:
    """Stop Python's automatic garbage collection meanwhile, in all threads of the process. Local.

    It would examine the boxes of many tensors while they are made, and none of them is garbage. While a CUDA graph is
    captured, it would free earlier graphs, which CUDA forbids.
    """
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

    Neighbours form one piece of work, in their order. The largest pieces come first, so that threads end at about the
    same time.

    Args:
        work: The function. The first error, in the order of pieces, is raised here after the started pieces have ended.
        num_bytes: Number of bytes by name.
        progress: The progress bar that gets the number of bytes.
    """
    inference = torch.is_inference_mode_enabled()

    def work_on(names: list[str]) -> int:
        with torch.inference_mode(inference), torch.no_grad():  # new threads have neither mode set
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
    """Group neighbours into pieces of about the wanted number of bytes. A larger tensor is a piece by itself."""
    bundles: list[list[str]] = []
    filled = wanted
    for name, size in num_bytes.items():
        if filled >= wanted or size > wanted:
            bundles.append([])
            filled = 0
        bundles[-1].append(name)
        filled += size
    return bundles
