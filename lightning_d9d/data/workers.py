"""Random numbers in the worker processes of a DataLoader."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_d9d.mesh.seeds import seed_for


def seed_workers(loader: DataLoader[Any], seed: int, coordinates: Mapping[str, int]) -> Callable[[], None]:
    """Let torch, NumPy and Python draw in worker processes what follows from the seed and the data rank, in place.

    Ranks that read the same samples then augment them alike, and others otherwise. A loader that has a generator or a
    `worker_init_fn` of its own keeps it.

    Args:
        loader: Its workers are not running yet.
        seed: Of the job.
        coordinates: `MeshDomains.coordinates`.

    Returns:
        What gives the loader back as it was.
    """
    generator, worker_init_fn = loader.generator, loader.worker_init_fn
    if generator is None:
        own = seed_for(seed, purpose="dataloader", coordinates=coordinates)
        loader.generator = torch.Generator().manual_seed(own)
    if worker_init_fn is None:
        loader.worker_init_fn = _nothing  # Lightning's would add the global rank to the seed

    def undo() -> None:
        loader.generator, loader.worker_init_fn = generator, worker_init_fn

    return undo


def _nothing(worker: int) -> None:
    """DataLoader has seeded torch, NumPy and Python with a number from its generator, and the worker's."""
