"""Progress bars: whether they are visible, and the loss in them, which is shown one step late."""

from __future__ import annotations

import math
import sys

import lightning as L
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_d9d.loop.patches import Patches
from lightning_d9d.pipeline.host_copy import HostCopy


def is_watched(trainer: L.Trainer | None) -> bool:
    """Return whether to show bars: the Trainer has one (`enable_progress_bar`), and stderr is a terminal."""
    return trainer is not None and trainer.progress_bar_callback is not None and sys.stderr.isatty()


class LateProgress:
    """Shows a device value in the progress bar without making the host wait for the device.

    Lightning reads every value logged with `prog_bar=True` at once, which stops the host once a step. Here each value
    is copied to the host after the device's work, and shown when the next one is ready.

    Args:
        patches: The patches of the run.
        trainer: A Trainer with a progress bar.
    """

    def __init__(self, patches: Patches, trainer: L.Trainer) -> None:
        self._patches = patches
        self._connector = trainer._logger_connector
        self._copy = HostCopy()

    def show(self, name: str, value: Tensor) -> float | None:
        """Show the previous value, which is returned, and begin to copy this one; do nothing if a copy is under way."""
        earlier = self._copy.exchange(value)
        if earlier is None:
            return None
        shown = earlier.item()
        self._patches.write(self._connector, "_progress_bar_metrics", name, shown)
        return shown


def warn_of_nonfinite(loss: float) -> None:
    """Warn, once, about a `train_loss` that is not finite; the value must already be on the host."""
    if not math.isfinite(loss):
        rank_zero_warn(
            "train_loss is NaN or infinite, in this step or in one before; so are weights by now, perhaps. Go on from "
            "a checkpoint; D9DStrategy(skip_nonfinite=True) leaves out steps whose gradients are not finite"
        )
