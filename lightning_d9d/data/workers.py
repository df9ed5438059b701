"""Random numbers of a DataLoader: the order in which it reads, and those of its worker processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_d9d.mesh.seeds import derived, seed_for


def seed_order(loader: DataLoader[Any], seed: int) -> Callable[[], None]:
    """Give a sampler that draws from torch's global generator a generator of its own, seeded, in place.

    The global numbers differ between ranks, for dropout. A sampler that has a generator keeps it.

    Args:
        loader: Loader whose sampler draws the order; Lightning may have wrapped it to distribute samples over ranks.
        seed: Seed of the job.

    Returns:
        A function that restores the loader.
    """
    sampler: Any = loader.sampler
    sampler = getattr(getattr(sampler, "dataset", None), "_sampler", sampler)
    if getattr(sampler, "generator", loader) is not None:
        return lambda: None
    sampler.generator = torch.Generator().manual_seed(derived(seed, "order of samples"))

    def undo() -> None:
        sampler.generator = None

    return undo


def seed_workers(loader: DataLoader[Any], seed: int, coordinates: Mapping[str, int]) -> Callable[[], None]:
    """Seed torch, NumPy and Python in worker processes from the seed and the data rank, in place.

    Ranks that read the same samples then augment them alike, and other ranks augment them differently. A loader that
    has a generator or a `worker_init_fn` of its own keeps it.

    Args:
        loader: Loader whose workers are not running yet.
        seed: Seed of the job.
        coordinates: `MeshDomains.coordinates`.

    Returns:
        A function that restores the loader.
    """
    generator, worker_init_fn = loader.generator, loader.worker_init_fn
    if generator is None:
        own = seed_for(seed, purpose="dataloader", coordinates=coordinates)
        set_unrecorded(loader, generator=torch.Generator().manual_seed(own))
    if worker_init_fn is None:
        # Lightning's would add the global rank to the seed
        set_unrecorded(loader, worker_init_fn=_nothing)

    def undo() -> None:
        set_unrecorded(loader, generator=generator, worker_init_fn=worker_init_fn)

    return undo


def set_unrecorded(loader: object, **values: Any) -> None:
    """Set attributes of a loader past its `__setattr__`, which may refuse or record them. Local.

    A DataLoader does not allow its sampler to be set. While a hook returns a loader, Lightning records attributes that
    are set, to make loaders again. If such a hook raises, it keeps recording for the rest of the process.
    """
    for name, value in values.items():
        object.__setattr__(loader, name, value)


def _nothing(worker: int) -> None:
    """Do nothing: DataLoader has seeded torch, NumPy and Python with a number from its generator, and the worker's."""
