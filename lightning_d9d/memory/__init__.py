"""The memory that a training step takes on a rank, by arithmetic, before it is tried.

`peak.py` walks through the actions of a rank, over stages of `layers.py`, and finds the most that is allocated. Plans
make such stages for any rank of any mesh: `spread.py` says what it holds, and `rank.py` puts all together. A fit makes
them of its own tensors: `held.py`. `step.py` asks for other settings, and `advice.py` compares them with the memory
that there is. `parameters.py` counts what parameters of a rank take, `host.py` has the memory of its host, `traffic.py`
the bytes that it sends. Nothing here communicates. `snapshots.py` writes what lies in a GPU's memory, also when it runs
out.
"""

from lightning_d9d.memory.advice import advice, device_bytes, most_in_use, refuse_too_large
from lightning_d9d.memory.held import StagesHeld, stage_held
from lightning_d9d.memory.host import HostMemory, check_host, host_bytes, input_bytes
from lightning_d9d.memory.parameters import gathered_bytes, gradient_bytes, part_bytes, state_bytes, weight_bytes
from lightning_d9d.memory.step import GPU_OVERHEAD, HOST_OVERHEAD, Overhead, RankMemory, StepMemory, StepSettings

__all__ = [
    "GPU_OVERHEAD",
    "HOST_OVERHEAD",
    "HostMemory",
    "Overhead",
    "RankMemory",
    "StagesHeld",
    "StepMemory",
    "StepSettings",
    "advice",
    "check_host",
    "device_bytes",
    "gathered_bytes",
    "gradient_bytes",
    "host_bytes",
    "input_bytes",
    "most_in_use",
    "part_bytes",
    "refuse_too_large",
    "stage_held",
    "state_bytes",
    "weight_bytes",
]
