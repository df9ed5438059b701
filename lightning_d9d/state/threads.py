"""Work on many tensors of files at the same time: whoever waits for the disk, or for a store, keeps nobody else."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch

from lightning_d9d.state.progress import Progress

_MAX_THREADS = 8
_BUNDLE_BYTES = 2**22


def in_threads(work: Callable[[str], object], num_bytes: Mapping[str, int], progress: Progress) -> None:
    """Call `work` for each name, in several threads, without gradients. Local.

    Args:
        work: What it raises first, in the order of names, is raised here, when what has begun has ended.
        num_bytes: By name; many small ones are one piece of work.
        progress: Gets the number of bytes.
    """
    inference = torch.is_inference_mode_enabled()

    def work_on(names: list[str]) -> int:
        with torch.inference_mode(inference), torch.no_grad():  # threads begin without
            for name in names:
                work(name)
        return sum(num_bytes[name] for name in names)

    with ThreadPoolExecutor(max(2, min(_MAX_THREADS, os.cpu_count() or 1))) as pool:
        for done in pool.map(work_on, _bundles(num_bytes)):
            progress.add(done)


def _bundles(num_bytes: Mapping[str, int]) -> list[list[str]]:
    bundles: list[list[str]] = []
    filled = _BUNDLE_BYTES
    for name, size in num_bytes.items():
        if filled >= _BUNDLE_BYTES:
            bundles.append([])
            filled = 0
        bundles[-1].append(name)
        filled += size
    return bundles
