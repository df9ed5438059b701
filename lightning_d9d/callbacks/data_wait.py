"""`DataWait` logs which part of a fit's time is spent waiting for batches."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import lightning as L
import torch

from lightning_d9d.loop.uneven import data_wait_seconds


class DataWait(L.Callback):
    """Logs `data_wait`: the share of time in which the slowest rank waited for training batches, under `D9DStrategy`.

    The value covers the last `log_every_n_steps` batches. It is from 0 to 1, and is the largest of all ranks. Waiting
    is the time until a dataloader returns a batch: 0 if its worker processes are ahead of the training loop. The copy
    to the device does not count. All ranks must have the callback.
    """

    def __init__(self) -> None:
        self._since: tuple[float, float] | None = None  # when, and how long ranks had waited, at the last log

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Forget the times of an earlier fit."""
        self._since = None

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Continue to measure after an interruption, such as a validation."""
        if self._since is None:
            self._since = (perf_counter(), data_wait_seconds(trainer))

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log every `log_every_n_steps` batches. Collective over all ranks."""
        if self._since is None or (batch_idx + 1) % trainer.log_every_n_steps:  # type: ignore[attr-defined]
            return
        (start, waited_before), now, waited = self._since, perf_counter(), data_wait_seconds(trainer)
        share = torch.tensor((waited - waited_before) / (now - start) if now > start else 0.0)
        pl_module.log("data_wait", share, on_step=True, on_epoch=False, sync_dist=True, reduce_fx="max", batch_size=1)
        self._since = (now, waited)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop measuring."""
        self._since = None
