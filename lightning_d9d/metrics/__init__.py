"""Measurements of a run, independent of Lightning.

`flops.py` counts the operations of a step in the usual conventions, and knows the peak of GPUs. `step_clock.py` splits
the time of a step. `wait_clock.py` adds up waits for other ranks. `profiled.py` sums up a profile by parts of a step.
"""

from lightning_d9d.metrics.flops import Convention, StepFlops, peak_flops
from lightning_d9d.metrics.profiled import DeviceUse, Operator, ProfiledSteps, profiled_steps
from lightning_d9d.metrics.step_clock import StepClock, StepParts
from lightning_d9d.metrics.wait_clock import WaitClock

__all__ = [
    "Convention",
    "DeviceUse",
    "Operator",
    "ProfiledSteps",
    "StepClock",
    "StepFlops",
    "StepParts",
    "WaitClock",
    "peak_flops",
    "profiled_steps",
]
