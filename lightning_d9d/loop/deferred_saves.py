"""Saves that are asked for while gradients are being accumulated: they are done when the optimizer has stepped."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_d9d.loop.patches import Patches


class _Waiting(NamedTuple):
    """An action that waits, and whether a checkpoint is under the path when it is done."""

    action: Callable[[], object]
    path: str
    exists: bool


class DeferredSaves(L.Callback):
    """Does what it was given at the end of the batch with the optimizer step, after the other callbacks.

    In this run, callbacks choose names of checkpoints as if all saves and removals had been done.

    Args:
        patches: Those of the run.
        trainer: One that is going to fit. This callback is among its callbacks while something waits.
        is_open: Whether there are gradients of batches for which no step was taken.
    """

    def __init__(self, patches: Patches, trainer: L.Trainer, is_open: Callable[[], bool]) -> None:
        self.is_open = is_open
        self._callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        self._waiting: list[_Waiting] = []
        for saver in self._callbacks:
            if isinstance(saver, ModelCheckpoint):
                patches.replace(saver, "file_exists", partial(_file_exists, saver))  # it can be copied, pickled

    def add(self, action: Callable[[], object], path: str | Path, *, exists: bool) -> None:
        """Do it later, after what was added before.

        Args:
            action: Saves or removes a checkpoint.
            path: Of that.
            exists: Whether one is there afterwards.
        """
        if not self._waiting:
            self._callbacks.append(self)
        self._waiting.append(_Waiting(action, os.path.abspath(path), exists))

    def will_exist(self, path: str | Path) -> bool | None:
        """Return whether a checkpoint is under a path when all is done; None if nothing is to be done there."""
        of_path = [each.exists for each in self._waiting if each.path == os.path.abspath(path)]
        return of_path[-1] if of_path else None

    @property
    def are_waiting(self) -> bool:
        """True if there is something to be done."""
        return len(self._waiting) > 0

    def run(self) -> None:
        """Do all of it now."""
        for each in self.drop():
            each.action()

    def drop(self) -> list[_Waiting]:
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


def _file_exists(saver: ModelCheckpoint, filepath: str, trainer: L.Trainer) -> bool:
    will_exist = cast(Any, trainer.strategy).checkpoint_will_exist(filepath)
    return type(saver).file_exists(saver, filepath, trainer) if will_exist is None else will_exist
