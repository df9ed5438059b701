"""The memory that a training step takes on a rank, by arithmetic, before it is tried.

`parameters.py` counts weights, gradients and optimizer states of parameters as this rank has them. `activations.py`
counts what a model's layers keep, from their `ModelCosts`. `step.py` puts both together for settings that a user can
change. `advice.py` compares them with the memory that there is, and finds the nearest settings that fit. `host.py` has
the memory that ranks take of their host. Nothing here communicates. `snapshots.py` writes what lies in a GPU's memory,
also when it runs out.
"""

from lightning_d9d.memory.activations import Activations
from lightning_d9d.memory.advice import advice, device_bytes, refuse_too_large
from lightning_d9d.memory.host import HostMemory, check_host, host_bytes
from lightning_d9d.memory.parameters import gathered_bytes, gradient_bytes, state_bytes, weight_bytes
from lightning_d9d.memory.step import RankMemory, StepMemory, StepSettings

__all__ = [
    "Activations",
    "HostMemory",
    "RankMemory",
    "StepMemory",
    "StepSettings",
    "advice",
    "check_host",
    "device_bytes",
    "gathered_bytes",
    "gradient_bytes",
    "host_bytes",
    "refuse_too_large",
    "state_bytes",
    "weight_bytes",
]
