"""Random numbers of a DataLoader: in which order it reads, and in its worker processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_d9d.mesh.seeds import derived, seed_for


def seed_order(loader: DataLoader[Any], seed: int) -> Callable[[], None]:
    """Let a sampler that draws from torch's global numbers draw from its own, which follow from the seed, in place.

    The global ones differ between ranks, for dropout. A sampler that has a generator keeps it.

    Args:
        loader: Its sampler draws the order; or the one that Lightning has wrapped to deal samples out to ranks.
        seed: Of the job.

    Returns:
        What gives the loader back as it was.
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
        set_unrecorded(loader, generator=torch.Generator().manual_seed(own))
    if worker_init_fn is None:
        # Lightning's would add the global rank to the seed
        set_unrecorded(loader, worker_init_fn=_nothing)

    def undo() -> None:
        set_unrecorded(loader, generator=generator, worker_init_fn=worker_init_fn)

    return undo


def set_unrecorded(loader: object, **values: Any) -> None:
    """Set attributes of a loader past its `__setattr__`, which may refuse or record them. Local.

    A DataLoader does not let its sampler be set. Lightning records what is set, to make loaders again, while a hook
    returns one. It goes on recording for the rest of the process when such a hook has raised.
    """
    for name, value in values.items():
        object.__setattr__(loader, name, value)


def _nothing(worker: int) -> None:
    """DataLoader has seeded torch, NumPy and Python with a number from its generator, and the worker's."""
