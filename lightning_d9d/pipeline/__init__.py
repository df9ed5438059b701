"""Runs a program of forward and backward actions over microbatches.

`types.py`: types that a module returns. `partition.py`: splitting a model into stages. `microbatch.py`, `rows.py`:
splitting a batch. `executor.py`: the loop over actions.
"""

from lightning_d9d.pipeline.partition import BlockSequence, distribute_layers
from lightning_d9d.pipeline.types import StageInfo, StageInputs, WeightedLoss
from lightning_d9d.schedule.partition import split_evenly

__all__ = ["BlockSequence", "StageInfo", "StageInputs", "WeightedLoss", "distribute_layers", "split_evenly"]
