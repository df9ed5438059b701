"""Optimizers, their building blocks, and learning-rate schedules.

`groups.py`: parameters by weight decay and by compatibility in one fused call. `stochastic_adamw.py`: AdamW for
bfloat16. `accumulated_adam.py`: Adam whose moments advance once in several steps. `muon.py`: Muon for matrices, which
`whole_matrices.py` assembles. `settings.py`: an optimizer and its schedule as named in a configuration. `rates.py`:
schedules of phases, and `plot.py` their pictures.
"""

from lightning_d9d.optim.accumulated_adam import AccumAdam, AccumAdamW
from lightning_d9d.optim.groups import ParameterGroup, parameter_groups
from lightning_d9d.optim.muon import MuonAdamW
from lightning_d9d.optim.plot import learning_rates, plot_learning_rates
from lightning_d9d.optim.rates import Phase, PiecewiseLR, WarmupStableDecayLR
from lightning_d9d.optim.settings import OptimizerSettings
from lightning_d9d.optim.stochastic_adamw import StochasticAdamW

__all__ = [
    "AccumAdam",
    "AccumAdamW",
    "MuonAdamW",
    "OptimizerSettings",
    "ParameterGroup",
    "Phase",
    "PiecewiseLR",
    "StochasticAdamW",
    "WarmupStableDecayLR",
    "learning_rates",
    "parameter_groups",
    "plot_learning_rates",
]
