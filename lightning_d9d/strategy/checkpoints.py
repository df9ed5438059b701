"""The checkpoints of a run: their saving and loading, with the place in the data."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import lightning as L
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO

from lightning_d9d.checkpoint import AVERAGES
from lightning_d9d.loop.interrupt import Saved
from lightning_d9d.mesh.agreement import Ranks
from lightning_d9d.peft.inject import SCALES, adapter_scales
from lightning_d9d.strategy.epoch_place import RANKS, EpochPlace
from lightning_d9d.strategy.loading import Loads
from lightning_d9d.strategy.module import D9DModule
from lightning_d9d.strategy.ranks import JobRanks
from lightning_d9d.strategy.run_state import RunState
from lightning_d9d.strategy.saving import CheckpointConfig, Saves
from lightning_d9d.strategy.torn import TornWeights
from lightning_d9d.strategy.trained_only import add_frozen, check_model, leave_out_frozen


class Checkpoints:
    """Saves and loads whole checkpoints.

    Args:
        config: Saves, which may run in the background.
        ranks: The ranks of the job.
        may_tear: Records whether weights may be torn, when a step inside the backward fails.
    """

    def __init__(self, config: CheckpointConfig, ranks: JobRanks, *, may_tear: bool = False) -> None:
        self._config = config
        self._ranks = ranks
        self.saves = Saves(config, ranks)
        self.loads = Loads(ranks)
        self.place = EpochPlace(ranks)
        self.torn = TornWeights(self.saves) if may_tear else None

    def save(
        self,
        checkpoint: dict[str, Any],
        path: str | Path,
        storage_options: Any | None,
        state: RunState,
        io: CheckpointIO,
        trainer: Any,
    ) -> None:
        """Save the checkpoint that Lightning has assembled, as a file or a directory. Collective.

        Inside of an accumulation window it is not saved now, but assembled again and saved at the window's end:
        gradients are not saved.

        Args:
            checkpoint: Lightning's checkpoint; it is changed.
            path: Path, on the first rank.
            storage_options: Options for the plugin that writes a file.
            state: The module and its optimizers.
            io: Function that writes a file.
            trainer: The Trainer of a fit; None for other runs, whose checkpoints cannot be resumed.

        Raises:
            StateError: The checkpoint could not be written, or the weights are torn; on every rank.
        """
        if self.torn is not None:
            with Ranks().agreed(f"checkpoint {str(path)!r} cannot be saved"):
                self.torn.check_save()
        weights_only = "optimizer_states" not in checkpoint
        if self.saves.is_inside_of_window:
            again = functools.partial(trainer.save_checkpoint, path, weights_only, storage_options)
            if self.saves.defer(again, path, weights_only=weights_only, must_save=trainer.interrupted):
                return
        path = self._ranks.broadcast(path)
        if trainer is not None and not weights_only:
            checkpoint[RANKS] = self.place.gather(trainer.fit_loop, checkpoint)
        if scales := Ranks().merge(adapter_scales(state.module)):
            checkpoint[SCALES] = scales
        if self._config.trainable_only:
            leave_out_frozen(checkpoint, state.module, seed_of(state.module))
        self.saves.save(checkpoint, path, storage_options, state, io)
        if trainer is not None and not weights_only:
            self.saves.last = Saved(str(path), checkpoint["global_step"])

    def load(
        self,
        path: str | Path,
        weights_only: bool | None,
        io: CheckpointIO,
        module: L.LightningModule | None,
        prepare: Callable[[Mapping[str, Any], Collection[str]], None],
        *,
        fits: bool,
    ) -> dict[str, Any]:
        """Read a file, or open a directory and read the weights into their tensors. Collective.

        Args:
            path: Path of a checkpoint of either kind.
            weights_only: For files: False lets them run code. Directories never do.
            io: Function that reads a file.
            module: Module that receives a directory's weights; None only reads a file.
            prepare: Called with the checkpoint and the names of its weights, before the weights are read.
            fits: Whether a fit resumes from it.

        Returns:
            The checkpoint for Lightning.

        Raises:
            StateError: The checkpoint is damaged, incomplete or foreign; raised on every rank.
        """
        self.saves.wait()
        self.saves.last = Saved(str(path), None)
        checkpoint = self.loads.open(path, weights_only, io)
        if module is not None:
            with Ranks().agreed("ckpt_path cannot be loaded"):
                check_model(checkpoint, module, seed_of(module), f"checkpoint {str(path)!r}")
        prepare(checkpoint, self.loads.names_in(checkpoint))
        weights = self.loads.weights(module, with_optimizers=fits)
        if weights is not None:
            checkpoint["state_dict"] = weights
            if fits and module is not None:
                checkpoint[AVERAGES] = self.loads.averages(module)
        elif module is not None:
            add_frozen(checkpoint, module)
        if fits:
            self.place.take(checkpoint, path)
            if self.torn is not None:
                self.torn.loaded()
        checkpoint.pop(RANKS, None)
        return checkpoint


def seed_of(module: L.LightningModule) -> int | None:
    """Return the seed that determines a module's initial weights; None if they may come from elsewhere. Local."""
    return module.seed_of_weights if isinstance(module, D9DModule) else None
