"""Loading checkpoints, files or directories, on any mesh."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.fabric.utilities.optimizer import _optimizer_to_device
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_d9d.checkpoint import (
    AVERAGES,
    MODEL,
    OPTIMIZER,
    Checkpoint,
    check_saved_tied_parameters,
    fit_scheduler_state,
    give_state,
    group_records,
    is_directory,
    load_optimizer_state,
    open_directory,
    part_of_whole,
    whole_groups,
)
from lightning_d9d.errors import StateError
from lightning_d9d.mesh.agreement import Ranks
from lightning_d9d.mesh.collectives import all_gather_object
from lightning_d9d.paths import check_named
from lightning_d9d.strategy.checkpoint_files import load_weights, never_runs_code, read_checkpoint
from lightning_d9d.strategy.module import D9DModule
from lightning_d9d.strategy.ranks import JobRanks
from lightning_d9d.strategy.run_state import RunState
from lightning_d9d.strategy.trained_only import BASE, frozen_parameters
from lightning_d9d.strategy.weights import report, sharded_state, sharded_weights


class Loads:
    """The checkpoint that is being loaded: its weights first, then its optimizers.

    Args:
        ranks: The ranks of the job.
    """

    def __init__(self, ranks: JobRanks) -> None:
        self._ranks = ranks
        self._path: str | Path = ""
        self._directory: Checkpoint | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Loads:
        """Return this object: open files belong to one run, and copies of its Trainer share them."""
        return self

    def open(self, path: str | Path, weights_only: bool | None, io: CheckpointIO) -> dict[str, Any]:
        """Read a file, or the values of a directory. Collective.

        Args:
            path: Path of the checkpoint; equal on all ranks.
            weights_only: For files: False lets them run code. Directories never do.
            io: Function that reads a file.

        Returns:
            The checkpoint; a directory's weights are read later, by `weights`.

        Raises:
            StateError: The checkpoint is damaged, incomplete or foreign; raised on every rank.
        """
        self._path, self._directory = path, None
        if self._ranks.broadcast(is_directory(path)):
            self._directory = open_directory(path)
            return {**self._directory.values}
        weights_only = never_runs_code(path, weights_only)
        torch.cuda.empty_cache()  # as Lightning does
        read = functools.partial(io.load_checkpoint, path, weights_only=weights_only)
        with Ranks().agreed("ckpt_path cannot be loaded"):  # the error names it
            return read_checkpoint(read, path, weights_only)

    def names_in(self, checkpoint: Mapping[str, Any]) -> set[str]:
        """Return the names of the weights of the opened checkpoint."""
        if self._directory is None:
            return {*checkpoint.get("state_dict", {})}
        return {name.removeprefix(MODEL) for name in self._directory.tensors if name.startswith(MODEL)}

    def weights(self, module: L.LightningModule | None, *, with_optimizers: bool) -> dict[str, Any] | None:
        """Read a directory's weights into their tensors; None for a file. Collective.

        Args:
            module: The module, whose tensors are overwritten, so that no tensor exists twice.
            with_optimizers: Whether to check the data for the optimizers before a weight changes.

        Returns:
            The state dict.
        """
        opened = self._directory
        if opened is None:
            return None
        if module is None:
            raise StateError(f"checkpoint {str(self._path)!r} is a directory, which can be read only into a module")
        state = module.state_dict()
        if BASE in opened.values:
            lacks = frozen_parameters(module)
            state = {name: value for name, value in state.items() if name not in lacks}
        check_saved_tied_parameters(module, state, opened)
        tensors = {f"{MODEL}{name}": value for name, value in state.items() if isinstance(value, Tensor)}
        later = OPTIMIZER.format("") if with_optimizers else None
        report(opened.load(tensors, strict=module.strict_loading, prefix=MODEL, later=later), opened.path)
        return {name: opened.values.get(f"{MODEL}{name}", value) for name, value in module.state_dict().items()}

    def averages(self, module: L.LightningModule) -> dict[str, Tensor]:
        """Read a directory's averages of this rank's weights, if it has some. Collective.

        Args:
            module: The module; averages have the sharding of its parameters, in the dtype in which they were saved.
        """
        opened = self._directory
        assert opened is not None
        named = {f"{AVERAGES}.{name}": value for name, value in module.state_dict().items()}
        rooms = {
            name: torch.empty_like(value, dtype=opened.tensors[name].dtype)
            for name, value in named.items()
            if name in opened.tensors
        }
        opened.load(rooms, strict=False)
        return {name.removeprefix(f"{AVERAGES}."): value for name, value in rooms.items()}

    def give_weights(
        self, module: L.LightningModule, weights: Mapping[str, Any], state: RunState, *, strict: bool
    ) -> None:
        """Load the weights into the module, after hooks may have changed them, for any sharding of its tensors.

        Collective in a pipeline.

        Args:
            module: Gets them.
            weights: The state dict of a file, of the whole model, or the one that `weights` returned.
            state: The module and its state in checkpoints.
            strict: Whether names must be equal.

        Raises:
            StateError: The weights belong to another model; the message lists the differences.
        """
        sharded = sharded_weights(module.state_dict(), weights)
        if self._directory is None and state.pipeline is not None:  # a file has all stages
            own = module.state_dict().keys()
            of_others = Ranks().merge(dict.fromkeys(own)).keys() - own
            sharded = {name: value for name, value in sharded.items() if name not in of_others}
        load_weights(module, sharded, strict, self._path)

    def give_optimizers(
        self, checkpoint: Mapping[str, Any], state: RunState, schedulers: Sequence[Any], *, refuses_other_number: bool
    ) -> None:
        """Load the states of optimizers, for any sharding of their parameters. Collective if ranks hold parts.

        Args:
            checkpoint: The opened checkpoint.
            state: The module and its optimizers.
            schedulers: The learning rate schedulers, which Lightning loads later.
            refuses_other_number: Whether to raise if a file of a whole model has another number of optimizers.
                Otherwise the first ones resume with a warning, as under Lightning's own strategies.

        Raises:
            StateError: Their kind or parameters differ from the saved ones; raised on every rank. For directories, and
                ranks that hold parts, their number is compared, too.
        """
        self._check_number(checkpoint, state, refuses_other_number)
        states, opened = checkpoint["optimizer_states"], self._directory
        by_name = opened is not None or state.is_spread
        known = state.optimizers if opened is not None else state.optimizers[: len(states)]
        for index, optimizer in enumerate(known):
            if opened is not None:
                load_optimizer_state(optimizer, state.names, OPTIMIZER.format(index), opened)
            else:
                saved = self._own_state(states[index], optimizer, state) if by_name else states[index]
                with Ranks().agreed(self._optimizer_failure):
                    give_state(optimizer, saved)
            _optimizer_to_device(optimizer, self._ranks.device)
        if by_name:
            for scheduler, saved in zip(schedulers, checkpoint.get("lr_schedulers", []), strict=False):
                fit_scheduler_state(saved, scheduler.optimizer.param_groups)

    def _check_number(self, checkpoint: Mapping[str, Any], state: RunState, refuses: bool) -> None:
        """Check that there are as many optimizers as were saved. Local."""
        states: Any = checkpoint["optimizer_states"]
        num_saved = len(states) if self._directory is None else states
        num_here = len(state.optimizers)
        if num_saved == num_here:
            return
        what = f"checkpoint {str(self._path)!r} has {num_saved} optimizers and the module {num_here}"
        if self._directory is not None or state.is_spread or refuses:
            raise StateError(f"{what}; make configure_optimizers return as many")
        rank_zero_warn(f"{what}: of these the first {min(num_saved, num_here)} go on, others begin without a state")

    def _own_state(self, saved: Mapping[str, Any], optimizer: Optimizer, state: RunState) -> dict[str, Any]:
        """Return the part of a file's state for the parameters of this rank's optimizer. Collective."""
        records, part = list[dict[str, Any]](), dict[str, Any]()
        with Ranks().agreed(self._optimizer_failure):
            records = group_records(optimizer, state.names)
        of_pipeline = [records] if state.pipeline is None else all_gather_object(records, state.pipeline)
        with Ranks().agreed(self._optimizer_failure):
            whole = whole_groups(of_pipeline, state.parameter_order)
            part = sharded_state(optimizer, part_of_whole(optimizer, state.names, saved, whole))
        return part

    @property
    def _optimizer_failure(self) -> str:
        return f"optimizer state of checkpoint {str(self._path)!r} cannot be loaded"

    def close(self) -> None:
        """Forget the checkpoint. Local."""
        self._directory = None


def load_pretrained(module: L.LightningModule, state: RunState, unless_in: Collection[str] = ()) -> None:
    """Make a D9DModule load its pretrained weights, once, unless a checkpoint has all parameters. Collective.

    Args:
        module: Any.
        state: The module and its state in checkpoints.
        unless_in: The names of the weights that will be loaded; equal on all ranks.
    """
    if isinstance(module, D9DModule) and module.awaits_pretrained:
        lacks = not set(state.names.values()) <= set(unless_in)
        if any(Ranks().all_gather(lacks)):
            with Ranks().agreed(f"{type(module).__name__} cannot begin"):
                check_named(module, resumes=False)
            module.load_pretrained_once()
        else:
            module.awaits_pretrained = False
