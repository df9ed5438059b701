"""Checkpoints that any mesh can load: a directory on torch Distributed Checkpoint.

`directory.py`: save, open, remove; `tensors.py`: its files; `metadata.py`: what torch writes beside the tensors, read
without running code; `background.py`: saves that go on beside training; `optimizers.py`: optimizer state by parameter
name.
"""

from lightning_d9d.checkpoint.background import BackgroundSaver
from lightning_d9d.checkpoint.directory import (
    MODEL_PREFIX,
    OPTIMIZER_PREFIX,
    Checkpoint,
    Differences,
    compare,
    is_directory,
    open_directory,
    remove_directory,
    save_directory,
)
from lightning_d9d.checkpoint.metadata import StoredTensor
from lightning_d9d.checkpoint.optimizers import fit_scheduler_state, load_optimizer_state, optimizer_state

__all__ = [
    "MODEL_PREFIX",
    "OPTIMIZER_PREFIX",
    "BackgroundSaver",
    "Checkpoint",
    "Differences",
    "StoredTensor",
    "compare",
    "fit_scheduler_state",
    "is_directory",
    "load_optimizer_state",
    "open_directory",
    "optimizer_state",
    "remove_directory",
    "save_directory",
]
