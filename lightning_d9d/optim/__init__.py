"""What optimizers are built from. `groups.py`: parameters by weight decay and by what one fused call can take."""

from lightning_d9d.optim.groups import parameter_groups

__all__ = ["parameter_groups"]
