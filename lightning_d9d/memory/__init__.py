"""The memory that a training step takes on a rank, by arithmetic, before it is tried.

`parameters.py` counts weights, gradients and optimizer states of parameters as this rank has them. `activations.py`
counts what a model's layers keep, from their `ModelCosts`. `step.py` puts both together for settings that a user can
change. `advice.py` compares them with the memory that there is, and finds the nearest settings that fit. Nothing here
communicates.
"""

from lightning_d9d.memory.activations import Activations
from lightning_d9d.memory.advice import advice, device_bytes, refuse_too_large
from lightning_d9d.memory.parameters import gathered_bytes, gradient_bytes, state_bytes, weight_bytes
from lightning_d9d.memory.step import RankMemory, StepMemory, StepSettings

__all__ = [
    "Activations",
    "RankMemory",
    "StepMemory",
    "StepSettings",
    "advice",
    "device_bytes",
    "gathered_bytes",
    "gradient_bytes",
    "refuse_too_large",
    "state_bytes",
    "weight_bytes",
]
