"""Saves that are requested while gradients are accumulated: they are deferred until the optimizer has stepped."""

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
    """A deferred action, and whether a checkpoint is under the path when it is done."""

    action: Callable[[], object]
    path: str
    exists: bool


class DeferredSaves(L.Callback):
    """Runs deferred actions at the end of the batch with the optimizer step, after the other callbacks.

    In this run, callbacks choose names of checkpoints as if all saves and removals had been done.

    Args:
        patches: The patches of the run.
        trainer: A Trainer that is going to fit. While an action is deferred, this callback is among the Trainer's
            callbacks.
        is_open: Returns whether there are gradients of batches without an optimizer step.
    """

    def __init__(self, patches: Patches, trainer: L.Trainer, is_open: Callable[[], bool]) -> None:
        self.is_open = is_open
        self._callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        self._waiting: list[_Waiting] = []
        for saver in self._callbacks:
            if isinstance(saver, ModelCheckpoint):
                patches.replace(saver, "file_exists", partial(_file_exists, saver))  # it can be copied, pickled

    def add(self, action: Callable[[], object], path: str | Path, *, exists: bool) -> None:
        """Defer an action, after those that were added before.

        Args:
            action: Saves or removes a checkpoint.
            path: The path of that checkpoint.
            exists: Whether a checkpoint is there afterwards.
        """
        if not self._waiting:
            self._callbacks.append(self)
        self._waiting.append(_Waiting(action, os.path.abspath(path), exists))

    def will_exist(self, path: str | Path) -> bool | None:
        """Return whether a checkpoint will be under a path after all actions; None if no action is for that path."""
        of_path = [each.exists for each in self._waiting if each.path == os.path.abspath(path)]
        return of_path[-1] if of_path else None

    @property
    def are_waiting(self) -> bool:
        """True if an action is deferred."""
        return len(self._waiting) > 0

    def run(self) -> None:
        """Run all actions now."""
        for each in self.drop():
            each.action()

    def drop(self) -> list[_Waiting]:
        """Forget all actions, and return them."""
        waiting, self._waiting = self._waiting, []
        if waiting:
            self._callbacks.remove(self)
        return waiting

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Run the actions, if this was the window's last batch."""
        if not self.is_open():
            self.run()


def _file_exists(saver: ModelCheckpoint, filepath: str, trainer: L.Trainer) -> bool:
    will_exist = cast(Any, trainer.strategy).checkpoint_will_exist(filepath)
    return type(saver).file_exists(saver, filepath, trainer) if will_exist is None else will_exist
