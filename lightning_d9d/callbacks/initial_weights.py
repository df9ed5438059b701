"""`InitialWeights` begins a fit with the weights of a checkpoint, or a part of them."""

from __future__ import annotations

from pathlib import Path

import lightning as L

from lightning_d9d.checkpoint import Differences
from lightning_d9d.paths import check_directory
from lightning_d9d.strategy.weights import overwrite_weights, report


class InitialWeights(L.Callback):
    """Loads weights before `fit` trains, on any mesh from any other.

    It loads neither optimizer state nor the place in the data.

    A run that resumes from its own checkpoint (`ckpt_path`) takes its weights from there.

    Args:
        path: A checkpoint directory or a Lightning file.
        prefix: Prefix of the names to load, as in the module's `state_dict`, such as "model.layers.". By default all
            names are loaded.
        strict: Whether the module and the checkpoint must have the same of these names. If False, a warning lists the
            differences, and `differences` has the names.
    """

    def __init__(self, path: str | Path, prefix: str = "", strict: bool = True) -> None:
        self.path = path
        self.prefix = prefix
        self.strict = strict
        self.differences = Differences([], [])
        """The names that only one of the two has: those that are missing, and those that are left over."""

    def check_paths(self, *, resumes: bool) -> None:
        """Raise `ConfigError` if the checkpoint does not exist, unless another is resumed. Local."""
        if not resumes:
            check_directory("path", str(self.path), "give a checkpoint directory or a Lightning file")

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Load the weights; on all ranks."""
        if trainer.ckpt_path is None:
            self.differences = overwrite_weights(pl_module, self.path, prefix=self.prefix, strict=self.strict)
            report(self.differences, self.path)
