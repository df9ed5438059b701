"""Checkpoints that any mesh can load: a directory on torch Distributed Checkpoint.

`directory.py`: save, open, remove; `tensors.py`: its files; `metadata.py`: what torch writes beside the tensors, read
without running code; `background.py`: saves that go on beside training; `optimizers.py`: optimizer state by parameter
name; `whole.py`: what one process would have of all that, as Lightning's own files do; `tied_parameters.py`: parameters
with several names.
"""

from lightning_d9d.checkpoint.background import BackgroundSaver
from lightning_d9d.checkpoint.directory import (
    Checkpoint,
    Differences,
    compare,
    is_directory,
    open_directory,
    remove_directory,
    save_directory,
)
from lightning_d9d.checkpoint.metadata import StoredTensor
from lightning_d9d.checkpoint.optimizers import (
    fit_scheduler_state,
    give_state,
    lies_by_block,
    load_optimizer_state,
    optimizer_state,
)
from lightning_d9d.checkpoint.tied_parameters import check_saved_tied_parameters, check_tied_parameters, tied_names
from lightning_d9d.checkpoint.whole import (
    AVERAGES,
    GROUPS,
    MODEL,
    ONE_PROCESS,
    OPTIMIZER,
    group_records,
    part_of_whole,
    whole_checkpoint,
    whole_groups,
)

__all__ = [
    "AVERAGES",
    "GROUPS",
    "MODEL",
    "ONE_PROCESS",
    "OPTIMIZER",
    "BackgroundSaver",
    "Checkpoint",
    "Differences",
    "StoredTensor",
    "check_saved_tied_parameters",
    "check_tied_parameters",
    "compare",
    "fit_scheduler_state",
    "give_state",
    "group_records",
    "is_directory",
    "lies_by_block",
    "load_optimizer_state",
    "open_directory",
    "optimizer_state",
    "part_of_whole",
    "remove_directory",
    "save_directory",
    "tied_names",
    "whole_checkpoint",
    "whole_groups",
]
