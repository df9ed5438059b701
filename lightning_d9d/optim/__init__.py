"""Optimizers, what they are built from, and learning-rate schedules.

`groups.py`: parameters by weight decay and by what one fused call can take. `stochastic_adamw.py`: AdamW for bfloat16.
`accumulated_adam.py`: Adam whose moments advance once in several steps.
`muon.py`: Muon for matrices, computed where `whole_matrices.py` brings them together.
`settings.py`: an optimizer and its schedule as a configuration names them. `rates.py`: schedules of phases, and
`plot.py` their pictures.
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
