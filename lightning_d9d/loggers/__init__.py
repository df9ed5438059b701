"""Loggers besides Lightning's own. `aim.py` writes runs of Aim."""

from lightning_d9d.loggers.aim import AimLogger

__all__ = ["AimLogger"]
