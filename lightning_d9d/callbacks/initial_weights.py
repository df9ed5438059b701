"""`InitialWeights`: a fit that begins with the weights of a checkpoint, or a part of them."""

from __future__ import annotations

from pathlib import Path

import lightning as L

from lightning_d9d.checkpoint import Differences
from lightning_d9d.strategy.weights import overwrite_weights, report


class InitialWeights(L.Callback):
    """Loads weights, and neither optimizer nor place in the data, before `fit` trains; on any mesh from any other.

    A run that goes on from a checkpoint of its own (`ckpt_path`) takes its weights from there.

    Args:
        path: A checkpoint directory or a Lightning file.
        prefix: What the names begin with that are loaded, as in the module's `state_dict`: "model.layers." say. By
            default all.
        strict: All of these in the module must be in the checkpoint, and the other way round. Otherwise a warning says
            what was not, and `differences` has the names.
    """

    def __init__(self, path: str | Path, prefix: str = "", strict: bool = True) -> None:
        self.path = path
        self.prefix = prefix
        self.strict = strict
        self.differences = Differences([], [])
        """What was in one of them only."""

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Loads; on all ranks."""
        if trainer.ckpt_path is None:
            self.differences = overwrite_weights(pl_module, self.path, prefix=self.prefix, strict=self.strict)
            report(self.differences, self.path)
