"""Optimizers, and what they are built from.

`groups.py`: parameters by weight decay and by what one fused call can take. `stochastic_adamw.py`: AdamW for bfloat16.
"""

from lightning_d9d.optim.groups import parameter_groups
from lightning_d9d.optim.stochastic_adamw import StochasticAdamW

__all__ = ["StochasticAdamW", "parameter_groups"]
