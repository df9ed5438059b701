"""Loaders that yield None in place of batches: Lightning skips None, so a run until `max_steps` would not end."""

from __future__ import annotations

from typing import Any

import lightning as L

from lightning_d9d.errors import ConfigError

MAX_IN_A_ROW = 1000


class RefuseNoneBatches(L.Callback):
    """Ends a fit whose loader yields None `MAX_IN_A_ROW` times in a row, or for all batches of an epoch.

    This is for one process. With several ranks each needs data for every batch: see `RankWatch.end_train_step`.
    """

    def __init__(self) -> None:
        self._in_a_row = 0

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Counts."""
        self._in_a_row = self._in_a_row + 1 if batch is None else 0
        if self._in_a_row == MAX_IN_A_ROW:
            raise ConfigError(f"{MAX_IN_A_ROW:,} training batches in a row were None; {_remedy(trainer)}")

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Compare with the number of batches of the epoch, of which an earlier run may have had some."""
        if self._in_a_row and self._in_a_row >= trainer.fit_loop.epoch_loop.batch_progress.current.ready:
            raise ConfigError(
                f"all training batches of epoch {trainer.current_epoch} were None ({self._in_a_row} in a row); "
                f"{_remedy(trainer)}"
            )


def _remedy(trainer: L.Trainer) -> str:
    loaders: Any = trainer.fit_loop._combined_loader
    functions = [each.collate_fn for each in loaders.flattened if getattr(each, "collate_fn", None) is not None]
    names = [
        f"{each.__module__}.{each.__qualname__}" if hasattr(each, "__qualname__") else repr(each) for each in functions
    ]
    where = f"collate_fn ({', '.join(names)})" if names else "the loader"
    return f"let {where} return a batch, or leave out the rows that it cannot use"
