"""The loss in the progress bar, one step late."""

from __future__ import annotations

import lightning as L
import torch
from torch import Tensor


class LateProgress:
    """Shows a device value in the progress bar without making the host wait for the device.

    Lightning reads every value logged with `prog_bar=True` at once, which stops the host once a step. Here each value
    is copied to the host behind the device's work, and shown when the next one is ready.
    """

    def __init__(self, trainer: L.Trainer, device: torch.device) -> None:
        self._metrics = trainer._logger_connector
        self._host = torch.empty((), pin_memory=True)
        self._copied = torch.Event(device)
        self._is_copying = False

    def show(self, name: str, value: Tensor) -> None:
        """Show the value given before this one, if it has arrived, and send this one."""
        if self._is_copying:
            if not self._copied.query():
                return
            self._metrics._progress_bar_metrics[name] = self._host.item()
        self._host.copy_(value, non_blocking=True)
        self._copied.record()
        self._is_copying = True
