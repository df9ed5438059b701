"""Hooks of Lightning for writing checkpoints, and for existing ones."""

from __future__ import annotations

from pathlib import Path

from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO

from lightning_d9d.mixing import ReplicaMixing
from lightning_d9d.strategy.checkpoint_files import AtomicFileIO, with_atomic_files
from lightning_d9d.strategy.checkpoints import Checkpoints
from lightning_d9d.strategy.mixing_hooks import MixingHooks
from lightning_d9d.strategy.own_values import remove_beside
from lightning_d9d.strategy.ranks import JobRanks


class SaveHooks(MixingHooks):
    """The interface of `D9DStrategy` to Lightning for files of checkpoints.

    Args:
        ranks: The ranks of the job.
        mixing: How replicas mix their weights; None if they do not.
        checkpoints: Saves and loads.
    """

    def __init__(self, ranks: JobRanks, mixing: ReplicaMixing | None, checkpoints: Checkpoints) -> None:
        super().__init__(ranks, mixing)
        self._checkpoints = checkpoints

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """Writes and reads files: the Trainer's plugin, or Lightning's own with atomic writes."""
        if self._checkpoint_io is None:
            self._checkpoint_io = AtomicFileIO()
        return with_atomic_files(super().checkpoint_io)

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        self._checkpoint_io = io

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove a file or a directory, once its replacement exists. See `Saves.remove`."""
        self._checkpoints.saves.remove(filepath, self.checkpoint_io)
        if self.mixed is not None and self.global_rank == 0:
            remove_beside(filepath)

    def checkpoint_will_exist(self, path: str) -> bool | None:
        """Return whether a checkpoint will exist when all saves are done; see `Saves.will_exist`. Collective."""
        return self._checkpoints.saves.will_exist(path)

    def finish_saves(self) -> None:
        """Wait for background saves; see `Saves.wait`. Local."""
        self._checkpoints.saves.wait()
