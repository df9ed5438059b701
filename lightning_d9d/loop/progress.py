"""Progress bars: whether anybody sees them, and the loss in them, one step late."""

from __future__ import annotations

import math
import sys

import lightning as L
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_d9d.pipeline.host_copy import HostCopy


def is_watched(trainer: L.Trainer | None) -> bool:
    """Whether to show bars: there is a Trainer that has one (`enable_progress_bar`), and stderr is a terminal."""
    return trainer is not None and trainer.progress_bar_callback is not None and sys.stderr.isatty()


class LateProgress:
    """Shows a device value in the progress bar without making the host wait for the device.

    Lightning reads every value logged with `prog_bar=True` at once, which stops the host once a step. Here each value
    is copied to the host behind the device's work, and shown when the next one is ready.
    """

    def __init__(self, trainer: L.Trainer) -> None:
        self._metrics = trainer._logger_connector
        self._copy = HostCopy()

    def show(self, name: str, value: Tensor) -> float | None:
        """Show the value given before this one, which is returned, and send this one; nothing if it is on its way."""
        earlier = self._copy.exchange(value)
        if earlier is None:
            return None
        shown = self._metrics._progress_bar_metrics[name] = earlier.item()
        return shown


def warn_of_nonfinite(loss: float) -> None:
    """Warn, once, of a `train_loss` that is on the host anyway."""
    if not math.isfinite(loss):
        rank_zero_warn(
            "train_loss is NaN or infinite, in this step or in one before; so are weights by now, perhaps. Go on from "
            "a checkpoint; D9DStrategy(skip_nonfinite=True) leaves out steps whose gradients are not finite"
        )
