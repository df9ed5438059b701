"""Saves checkpoints: a file or a directory, at once, in the background, or when an accumulation window ends."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import lightning as L
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_d9d.checkpoint import (
    BackgroundSaver,
    is_directory,
    remove_directory,
    save_directory,
    whole_checkpoint,
)
from lightning_d9d.errors import ConfigError, StateError
from lightning_d9d.loop.deferred_saves import DeferredSaves
from lightning_d9d.loop.interrupt import Saved
from lightning_d9d.loop.patches import Patches
from lightning_d9d.mesh import Axis
from lightning_d9d.mesh.agreement import Ranks
from lightning_d9d.strategy.configuration import check_saving_callbacks
from lightning_d9d.strategy.ranks import JobRanks
from lightning_d9d.strategy.run_state import RunState
from lightning_d9d.strategy.weights import gathered_on_first

_REQUEUED = "hpc_ckpt_"
"""Prefix of the names of Lightning's saves when SLURM requeues a job."""
_WITHOUT_GRADIENTS = "inside of an accumulation window, whose gradients are not saved"

Mode = Literal["auto", "sharded", "consolidated"]


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """The kind of checkpoint that is saved. Both kinds load on any mesh, whichever is configured."""

    mode: Mode = "auto"
    """The form of a checkpoint.

    - `"sharded"`: a directory, to which each rank writes its own part.
    - `"consolidated"`: Lightning's own file, written by rank 0. All stages and shards are gathered to its host, tensor
      by tensor.
    - `"auto"`: the file for a plain LightningModule without sharded tensors, else the directory.
    """

    asynchronous: bool = False
    """Continue training, in `fit`, as soon as the saved state has been copied to the host's memory.

    Each rank copies its part of model and optimizer. Files are written in the background. A checkpoint appears, and the
    one that it replaces is removed, when it is complete. A failure is raised by the next save, or at the end of `fit`,
    which waits.
    """

    trainable_only: bool = False
    """Leave frozen parameters out; buffers and trained parameters are saved.

    A resumed run needs their base: the same `pretrained`, or the seed of initial weights, which the checkpoint names.
    `strategy/trained_only.py` describes it."""

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ConfigError(
                f"CheckpointConfig.mode={self.mode!r} must be one of {', '.join(map(repr, get_args(Mode)))}"
            )


class Saves:
    """The saves of a run, and the removals of checkpoints that they replace.

    Between `open` and `close` saves wait for the end of an accumulation window and, if configured, run in the
    background. Otherwise they run at once.

    Args:
        config: Whether they run in the background.
        ranks: The ranks of the job.
    """

    def __init__(self, config: CheckpointConfig, ranks: JobRanks) -> None:
        self._config = config
        self._ranks = ranks
        self._background: BackgroundSaver | None = None
        self._deferred: DeferredSaves | None = None
        self.are_urgent = False
        """The job may end as soon as a checkpoint is saved."""
        self.last: Saved | None = None
        """The checkpoint from which the run can go on."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Saves:
        """Return this object: threads and files belong to one run, and copies of its Trainer share them."""
        return self

    def open(self, patches: Patches, trainer: L.Trainer, window_is_open: Callable[[], bool]) -> None:
        """Defer saves to the end of accumulation windows, and save in the background if configured. Collective.

        Args:
            patches: The patches of the run.
            trainer: A Trainer that is going to fit.
            window_is_open: Returns whether there are gradients without an optimizer step.
        """
        self._deferred = DeferredSaves(patches, trainer, window_is_open)
        if self._config.asynchronous:
            check_saving_callbacks(trainer.callbacks)  # type: ignore[attr-defined]
            axes, group = (Axis.PP, Axis.DP, Axis.CP, Axis.TP), None
            if self._ranks.world_size > 1:
                group = self._ranks.mesh.group_of_replicas(*axes, lane="checkpoint", backend="gloo")
            self._background = BackgroundSaver(group)

    def wait(self) -> None:
        """Wait for background saves. Local.

        Raises:
            StateError: A save has failed; raised on every rank.
        """
        if self._background is not None:
            self._background.wait()

    def end_training(self) -> None:
        """Make all deferred saves, also in a window that stays open, and wait for them."""
        if self._deferred is not None and self._deferred.are_waiting:
            rank_zero_warn(f"training ends {_WITHOUT_GRADIENTS}")
            self._deferred.is_open = lambda: False
            self._deferred.run()
        self.wait()

    def close(self, *, raises: bool) -> None:
        """Finish, and save at once from now on. Local.

        Args:
            raises: Whether to raise an error of a save; otherwise it is a warning.

        Raises:
            StateError: A save has failed.
        """
        background, self._background = self._background, None
        deferred, self._deferred = self._deferred, None
        self.last = None
        if deferred is not None:
            deferred.drop()
        try:
            if background is not None:
                background.close()
        except StateError as error:
            if raises:
                raise
            rank_zero_warn(str(error))

    def will_exist(self, path: str | Path) -> bool | None:
        """Return whether a checkpoint will exist when all saves are done; None if no save is waiting for its path.

        Collective.
        """
        found = None if self._deferred is None else self._deferred.will_exist(path)
        if found is None and self._background is not None:
            found = self._ranks.broadcast(self._background.will_exist(path))  # ranks have not finished at the same time
        return found

    @property
    def is_inside_of_window(self) -> bool:
        """True if gradients have been accumulated without an optimizer step; the same on all ranks."""
        return self._deferred is not None and self._deferred.is_open()

    def defer(self, again: Callable[[], object], path: str | Path, *, weights_only: bool, must_save: bool) -> bool:
        """Inside of an accumulation window, save at its end: gradients are not saved. Local.

        Args:
            again: Assembles the checkpoint again, and saves it.
            path: Where.
            weights_only: Whether a fit may resume from it.
            must_save: Whether the run is over, so that the window never ends.

        Returns:
            True if it was deferred.
        """
        if self._deferred is None or not self.is_inside_of_window:
            return False
        is_last = Path(path).name.startswith(_REQUEUED)  # by Lightning's signal handler, in one process
        if not (self.are_urgent or must_save or is_last):
            self._deferred.add(again, path, exists=True)
            return True
        if not weights_only:
            rank_zero_warn(f"{str(path)!r} is saved {_WITHOUT_GRADIENTS}")
        return False

    def save(
        self,
        checkpoint: dict[str, Any],
        path: str | Path,
        storage_options: Any | None,
        state: RunState,
        io: CheckpointIO,
    ) -> None:
        """Save a file or a directory. Collective.

        Args:
            checkpoint: Checkpoint that Lightning and the ranks have assembled; it is changed.
            path: Path; equal on all ranks.
            storage_options: Options for the plugin that writes a file.
            state: The module and its optimizers.
            io: Function that writes a file.

        Raises:
            StateError: The checkpoint could not be written; raised on every rank.
            ConfigError: Storage options are given for a directory, which does not support them.
        """
        if not state.is_directory:
            whole = self._gathered(checkpoint, path, state) if state.is_spread else checkpoint
            self._save_file(whole, path, storage_options, io)
        elif storage_options is not None:
            raise ConfigError(f"storage_options={storage_options!r}: a checkpoint directory does not support them")
        else:
            tensors, named_values = state.take_out(checkpoint)
            if self._background is None:
                save_directory(path, tensors, checkpoint, named_values=named_values)
            else:
                step = checkpoint["global_step"]
                self._background.save_directory(path, tensors, checkpoint, named_values=named_values, version=step)
        if self.are_urgent:
            self.wait()

    def _save_file(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any, io: CheckpointIO) -> None:
        failure = f"checkpoint {str(path)!r} cannot be saved"
        is_first, background = self._ranks.rank == 0, self._background

        def write(content: dict[str, Any]) -> None:
            if is_first:
                io.save_checkpoint(content, path, storage_options=storage_options)

        if background is None:
            with Ranks().agreed(failure):
                write(checkpoint)
            return
        copies = list[dict[str, Any]]()
        Ranks().together(failure, lambda: copies.append(background.copied(checkpoint if is_first else {})))
        ranks = Ranks(background.group)
        background.submit(lambda: ranks.together(failure, functools.partial(write, copies[0])), path, exists=True)

    def _gathered(self, checkpoint: dict[str, Any], path: str | Path, state: RunState) -> dict[str, Any]:
        """Return the checkpoint of one process, on rank 0. Collective."""
        tensors, named_values = state.take_out(checkpoint)
        values = {**checkpoint, **Ranks().merge(named_values)}
        tensors = gathered_on_first(tensors, state.pipeline)
        whole = dict[str, Any]()
        with Ranks().agreed(f"checkpoint {str(path)!r} cannot be saved"):
            if self._ranks.rank == 0:
                whole = whole_checkpoint(values, tensors)
        return whole

    def remove(self, path: str | Path, io: CheckpointIO) -> None:
        """Remove a file or a directory; no part of a directory is left under its name.

        If saves are deferred or run in the background, it is removed after them: its replacement must exist. If it
        cannot be removed, a warning is logged: nothing is lost, and only this rank knows. The other ranks would wait
        for it in the next save.

        Args:
            path: Path of the checkpoint.
            io: Function that removes a file.
        """
        if self._deferred is not None and self._deferred.are_waiting:
            self._deferred.add(functools.partial(self.remove, path, io), path, exists=False)
        elif self._background is None:
            self._remove(path, io)
        else:
            self._background.submit(functools.partial(self._remove, path, io), path, exists=False)

    def _remove(self, path: str | Path, io: CheckpointIO) -> None:
        if self._ranks.rank > 0:
            return
        try:
            if is_directory(path) or Path(path).is_symlink():
                remove_directory(path)
            else:
                io.remove_checkpoint(path)
        except Exception as error:  # whatever a Trainer's plugin raises
            rank_zero_warn(f"checkpoint {str(path)!r} is no longer needed, but cannot be removed: {error}")
