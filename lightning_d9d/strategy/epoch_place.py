"""Resuming in the middle of an epoch: each rank adds its place in the data to a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.fabric.utilities.data import _set_sampler_epoch, sized_len
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader

from lightning_d9d.data import (
    DataRank,
    can_replay,
    can_resume_by_sampler,
    end_resuming,
    is_place_of_sampler,
    is_replayed,
    make_replayed,
    make_resumable,
    resumes_at,
    seed_order,
    seed_workers,
)
from lightning_d9d.errors import StateError
from lightning_d9d.loop.uneven import TrainingLoader
from lightning_d9d.mesh import Axis
from lightning_d9d.mesh.axes import plain
from lightning_d9d.mesh.collectives import gather_object
from lightning_d9d.mesh.seeds import random_state, seed_for, set_random_state
from lightning_d9d.strategy.ranks import JobRanks

RANKS = "lightning_d9d_ranks"
"""The name under which a checkpoint stores the additions of each rank, in the order of ranks."""


class EpochPlace:
    """This rank's place in the training data, which is saved, loaded and restored.

    Args:
        ranks: The ranks of the job.
    """

    def __init__(self, ranks: JobRanks) -> None:
        self._ranks = ranks
        self._path = ""
        self._resumed: Mapping[str, Any] | None = None
        self._undo: list[Callable[[], None]] = []
        self._states: list[dict[str, Any]] | None = None
        """The states of the loaders of the last run."""

    def __deepcopy__(self, memo: dict[int, Any]) -> EpochPlace:
        """Return this object: there is one for a run, which copies of its Trainer share."""
        return self

    # Loaders

    def prepare(self, loader: object, fit_loop: Any, *, trains: bool, is_staged: bool) -> None:
        """Make a loader resumable in the middle of an epoch, if it has no way of its own.

        Ranks that read the same samples then read them in the same order, and have equal random numbers in worker
        processes.

        Args:
            loader: This rank's loader, which is changed until `release`.
            fit_loop: The loop that reads it.
            trains: Whether it is for training.
            is_staged: Whether the module is a D9DModule.
        """
        ranks = self._ranks
        if isinstance(loader, DataLoader) and ranks.world_size > 1:
            if is_staged or ranks.dp_size == 1:
                self._undo.append(seed_order(loader, ranks.seed))
            if ranks.dp_size < ranks.world_size:
                self._undo.append(seed_workers(loader, ranks.seed, ranks.coordinates))
        if not trains:
            return
        self._states = None
        rank = DataRank(ranks.dp_rank, ranks.dp_size)
        resumable: Any = loader
        if can_resume_by_sampler(resumable):
            self._undo.append(make_resumable(resumable, lambda: _num_read_of(fit_loop, resumable), rank))
        elif can_replay(resumable):
            self._undo.append(make_replayed(resumable, lambda: _num_read_of(fit_loop, resumable), rank))

    def release(self, fit_loop: Any) -> None:
        """Restore the loaders; later saves contain their present place. Local.

        Args:
            fit_loop: The loop that read them; None if there is none.
        """
        self._resumed = None
        if self._states is None and fit_loop is not None:
            self._states = _loader_states(fit_loop._combined_loader)
        while self._undo:
            self._undo.pop()()

    # Saving

    def gather(self, fit_loop: Any, checkpoint: Mapping[str, Any]) -> list[dict[str, Any]] | None:
        """Return the additions of all ranks to a checkpoint, on the first rank; None on others. Collective.

        Args:
            fit_loop: The loop that trains.
            checkpoint: Lightning's checkpoint; loaders with their own state stay in it for other strategies.
        """
        state = checkpoint["loops"]["fit_loop"]["state_dict"]
        loaders = self._states or _loader_states(fit_loop._combined_loader)
        state.pop("combined_loader", None)
        if stateful := [each for each in loaders if not is_place_of_sampler(each)]:
            state["combined_loader"] = stateful  # other strategies know no place of a sampler
        ours = {
            "random": random_state(self._ranks.device),
            "loaders": loaders,
            "reload_epoch": fit_loop._last_train_dl_reload_epoch,
            "dp_rank": self._ranks.dp_rank,
            "mesh": self._sizes,
        }
        return gather_object(ours) if self._ranks.world_size > 1 else [ours]

    # Loading

    def take(self, checkpoint: dict[str, Any], path: object) -> None:
        """Take this rank's part from a checkpoint from which a fit resumes. Local."""
        of_ranks = checkpoint.pop(RANKS, None)
        if of_ranks is not None:
            self._path = str(path)
            self._resumed = self._of_this_rank(of_ranks)
            checkpoint["loops"]["fit_loop"]["state_dict"].pop("combined_loader", None)  # each rank has its own

    def is_to_be_resumed(self) -> bool:
        """Return whether a place was loaded that `resume` has not restored yet."""
        return self._resumed is not None

    def resume(self, fit_loop: Any, *, is_staged: bool, global_step: int, say: Callable[[str], None]) -> None:
        """Restore the random numbers and the place in the epoch from a loaded checkpoint.

        Lightning gives loaders their state before the first epoch, but samplers their epoch only afterwards. By then
        worker processes have read the first batches. If a module reads `estimated_stepping_batches`, loaders get no
        state at all (Lightning's issue 20550). So the loaders are restarted here.

        Without a checkpoint, the ranks of a D9DModule begin with different random numbers, for dropout; ranks with
        copies of one activation begin with equal ones. Plain modules keep the numbers of `seed_everything`, as under
        DDP.

        Args:
            fit_loop: The loop that is about to train.
            is_staged: Whether the module is a D9DModule.
            global_step: Number of completed optimizer steps.
            say: Logs a message to the user.

        Raises:
            StateError: The checkpoint belongs to other loaders, or they cannot resume with this number of data ranks.
        """
        resumed, self._resumed = self._resumed, None
        has_random_state = resumed is not None and resumed["random"] is not None
        if self._ranks.world_size > 1 and is_staged and not has_random_state:
            coordinates = {**self._ranks.coordinates, "step": global_step}
            torch.manual_seed(seed_for(self._ranks.seed, purpose="dropout", coordinates=coordinates))
        if resumed is None:
            return
        epochs: Any = fit_loop.epoch_progress.current
        if fit_loop.restarted_mid_epoch and epochs.processed >= epochs.ready:
            fit_loop.reset_restart_stage()  # saved in an epoch's last batch; Lightning would not begin the next
        loader, fetcher = fit_loop._combined_loader, fit_loop._data_fetcher
        for each in loader.flattened:
            _set_sampler_epoch(each, epochs.processed)
        self._load_states(fit_loop, resumed, say)
        fit_loop._last_train_dl_reload_epoch = resumed["reload_epoch"]
        between_epochs = _num_read(fit_loop) == 0
        if between_epochs:  # the order of the epoch is still to be drawn, as it would have been
            self._set_random_state(resumed)
        if not (
            between_epochs and fit_loop.epoch_loop.restarted_on_last
        ):  # then Lightning begins the next epoch itself
            iter(fetcher)
        if not between_epochs:
            self._set_random_state(resumed)

    def _set_random_state(self, resumed: Mapping[str, Any]) -> None:
        if resumed["random"] is not None:
            set_random_state(resumed["random"], self._ranks.device)

    def _load_states(self, fit_loop: Any, resumed: Mapping[str, Any], say: Callable[[str], None]) -> None:
        """Load the states of loaders, and set the place in the epoch of Lightning's loop."""
        loader: CombinedLoader = fit_loop._combined_loader
        states, path = resumed["loaders"], self._path
        num_read, saved = _num_read(fit_loop), resumed["num_data_ranks"]
        if num_read and resumed["is_other_job"]:
            say(
                f"{saved} data-parallel ranks saved checkpoint {path!r}, and {self._ranks.dp_size} resume from it: the "
                f"samples that are left in the epoch are distributed over {self._ranks.dp_size} ranks"
            )
            if not all(map(is_place_of_sampler, states)):
                raise StateError(
                    f"checkpoint {path!r} was saved in the middle of an epoch by {saved} data-parallel ranks. A "
                    f"dataloader has its own state, which can be restored only on {saved} ranks, not on "
                    f"{self._ranks.dp_size}. Resume on {saved}, or save at the end of an epoch"
                )
        try:
            loader._load_state_dicts(states)
        except StateError as error:
            raise StateError(f"checkpoint {path!r}: {error}") from error
        except RuntimeError as error:
            raise StateError(
                f"checkpoint {path!r} belongs to a run with other training dataloaders: {error}"
            ) from error
        if num_read == 0:
            for each, state in zip(loader.flattened, states, strict=False):  # no states: saved before training began
                if not is_place_of_sampler(state) and (_stopped_early(fit_loop, each) or _is_at_end(fit_loop, state)):
                    end_resuming(each)
                    iter(each)  # what is left of an epoch that is over
        if num_read and any(map(is_replayed, loader.flattened)):
            say(f"{num_read} batches are read again and left out: a dataloader has no state of its own")
        places = {place for each in loader.flattened if (place := resumes_at(each)) is not None}
        if len(places) > 1:
            raise StateError(
                f"checkpoint {path!r}: the training dataloaders would resume at different batches of the epoch: "
                f"{sorted(places)}. Resume with the {saved} data-parallel ranks and the batch sizes that saved it, or "
                "save at the end of an epoch"
            )
        for place in places:
            progress: Any = fit_loop.epoch_loop.batch_progress.current
            for name in ("ready", "started", "processed", "completed"):
                setattr(progress, name, getattr(progress, name) + place - num_read)

    @property
    def _sizes(self) -> dict[str, int]:
        """The sizes of the axes that determine a rank's place: equal sizes give equal places."""
        sizes = {axis: self._ranks.size(axis) for axis in (Axis.PP, Axis.DP, Axis.CP, Axis.TP)}
        return plain({**sizes, Axis.DP: self._ranks.dp_size})

    def _of_this_rank(self, ranks: list[dict[str, Any]]) -> dict[str, Any]:
        """Return this rank's state; without random numbers on another mesh, where copies must draw equal ones.

        Checkpoints of older versions do not store their mesh: only data ranks alone are then certain.
        """
        dp_rank, dp_size = self._ranks.dp_rank, self._ranks.dp_size
        saved = 1 + max(each["dp_rank"] for each in ranks)
        own = next((each for each in ranks if each["dp_rank"] == dp_rank), ranks[0])
        loaders = own["loaders"]
        if dp_size != saved:  # of an order that is distributed again, all take the first rank's
            pairs = zip(loaders, ranks[0]["loaders"], strict=True)
            loaders = [first if is_place_of_sampler(first) and first["order"] else each for each, first in pairs]
        mesh = ranks[0].get("mesh", {Axis.PP: 1, Axis.DP: saved, Axis.CP: 1, Axis.TP: 1})
        is_same_mesh = len(ranks) == self._ranks.world_size and mesh == self._sizes
        random = ranks[self._ranks.rank]["random"] if is_same_mesh else None
        return {**own, "loaders": loaders, "random": random, "num_data_ranks": saved, "is_other_job": dp_size != saved}


def _num_read(fit_loop: Any) -> int:
    """Return the number of batches that the current epoch has trained on; 0 between epochs."""
    progress = fit_loop.epoch_loop.batch_progress
    return 0 if progress.is_last_batch else progress.current.processed


def _num_read_of(fit_loop: Any, loader: Any) -> int:
    """Return one loader's share among several: in mode "max_size" a shorter one stays at its end, else it restarts."""
    combined, num_read = fit_loop._combined_loader, _num_read(fit_loop)
    if isinstance(combined, TrainingLoader):
        num_read = combined.num_own(num_read)
    ends = combined is not None and combined._mode == "max_size"
    return min(num_read, len(loader)) if ends and sized_len(loader) is not None else num_read


def _stopped_early(fit_loop: Any, loader: Any) -> bool:
    """Return whether a finished epoch left batches of a loader unused, as limits and several loaders allow."""
    length, num_processed = sized_len(loader), fit_loop.epoch_loop.batch_progress.current.processed
    return num_processed % length != 0 if length else fit_loop.trainer.limit_train_batches != 1.0


def _is_at_end(fit_loop: Any, state: Any) -> bool:
    """Return whether torchdata's loader has yielded a whole epoch without having been asked for more.

    It would then yield an epoch without a batch.
    """
    return fit_loop.epoch_loop.batch_progress.is_last_batch and state.get("_iterator_finished") is False


def _loader_states(loader: CombinedLoader | None) -> list[dict[str, Any]]:
    return [] if loader is None else loader._state_dicts()
