"""`GarbageCollection` collects Python's garbage at selected steps, on all ranks together."""

from __future__ import annotations

import gc
from typing import Any

import lightning as L

from lightning_d9d.errors import ConfigError


class GarbageCollection(L.Callback):
    """Collects Python's garbage every n optimizer steps of a fit, instead of whenever Python would.

    Python collects after a certain number of new objects. That moment differs between ranks, and each time the other
    ranks wait. Objects that exist when training begins are not examined again (`gc.freeze`). All ranks must have the
    callback. Objects in cycles stay until the next collection: choose fewer steps if the host's memory grows.

    Args:
        every_n_steps: Optimizer steps between collections, at least 1.

    Raises:
        ConfigError: The number is less than 1.
    """

    def __init__(self, every_n_steps: int = 100) -> None:
        if not isinstance(every_n_steps, int) or every_n_steps < 1:
            raise ConfigError(
                f"GarbageCollection(every_n_steps={every_n_steps!r}) must be a whole number of at least 1"
            )
        self.every_n_steps = every_n_steps
        self._was_enabled: bool | None = None
        """True if Python collected by itself before the fit; None outside of one."""
        self._step = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Collect, and disable Python's own collections. Local."""
        self._was_enabled = gc.isenabled()
        self._step = trainer.global_step
        gc.disable()
        gc.collect()
        gc.freeze()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any, **kwargs: Any) -> None:
        """Collect after each n-th step. Local, at the same step on all ranks."""
        step, before = trainer.global_step, self._step
        self._step = step
        if step != before and step % self.every_n_steps == 0:
            gc.collect()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Enable Python's own collections again. Local."""
        self._restore()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Enable Python's own collections again. Local."""
        self._restore()

    def _restore(self) -> None:
        was_enabled, self._was_enabled = self._was_enabled, None
        if was_enabled is None:
            return
        gc.unfreeze()
        if was_enabled:
            gc.enable()
