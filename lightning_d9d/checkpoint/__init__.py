"""Checkpoints that any mesh can load: a directory on torch Distributed Checkpoint.

`directory.py` saves, opens and removes them; `tensors.py` has their files. `metadata.py` reads torch's metadata without
running code. `background.py` has saves that run beside training, and `optimizers.py` has optimizer state by parameter
name. `whole.py` has the form that one process would save, as in Lightning's own files. `tied_parameters.py` has
parameters with several names.
"""

from lightning_d9d.checkpoint.background import BackgroundSaver
from lightning_d9d.checkpoint.directory import (
    OF_ADAPTER,
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
    "OF_ADAPTER",
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
