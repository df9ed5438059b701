"""Saves that are asked for while gradients are being accumulated: they are done when the optimizer has stepped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L


class DeferredSaves(L.Callback):
    """Does what it was given at the end of the batch with the optimizer step, after the other callbacks.

    Args:
        is_open: Whether there are gradients of batches for which no step was taken.
        callbacks: The Trainer's. This one is among them while something waits.
    """

    def __init__(self, is_open: Callable[[], bool], callbacks: list[L.Callback]) -> None:
        self.is_open = is_open
        self._callbacks = callbacks
        self._waiting: list[Callable[[], object]] = []

    def add(self, action: Callable[[], object]) -> None:
        """Do it later, after what was added before."""
        if not self._waiting:
            self._callbacks.append(self)
        self._waiting.append(action)

    @property
    def are_waiting(self) -> bool:
        """Whether there is something to be done."""
        return len(self._waiting) > 0

    def run(self) -> None:
        """Do all of it now."""
        waiting = self.drop()
        for action in waiting:
            action()

    def drop(self) -> list[Callable[[], object]]:
        """Do none of it; returns what waited."""
        waiting, self._waiting = self._waiting, []
        if waiting:
            self._callbacks.remove(self)
        return waiting

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Do it, if this was the window's last batch."""
        if not self.is_open():
            self.run()
