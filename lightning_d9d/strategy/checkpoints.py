"""What Lightning asks of a strategy about checkpoints: a file or a directory, and going on where one was saved."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
import torch.distributed as dist
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.data import _set_sampler_epoch, sized_len
from lightning.fabric.utilities.optimizer import _optimizer_to_device
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_d9d.checkpoint import (
    GROUPS,
    MODEL,
    ONE_PROCESS,
    OPTIMIZER,
    BackgroundSaver,
    Checkpoint,
    check_saved_tied_parameters,
    fit_scheduler_state,
    give_state,
    group_records,
    is_directory,
    load_optimizer_state,
    open_directory,
    optimizer_state,
    part_of_whole,
    remove_directory,
    save_directory,
    whole_checkpoint,
    whole_groups,
)
from lightning_d9d.data import (
    DataRank,
    can_replay,
    can_resume_by_sampler,
    is_place_of_sampler,
    is_replayed,
    make_replayed,
    make_resumable,
    resumes_at,
    seed_order,
    seed_workers,
)
from lightning_d9d.errors import ConfigError, StateError
from lightning_d9d.mesh.agreement import Ranks
from lightning_d9d.mesh.collectives import all_gather_object, gather_object
from lightning_d9d.mesh.seeds import random_state, seed_for, set_random_state
from lightning_d9d.strategy.checkpoint_files import AtomicFileIO, load_weights, never_runs_code, read_checkpoint
from lightning_d9d.strategy.configuration import check_saving_callbacks
from lightning_d9d.strategy.deferred_saves import DeferredSaves
from lightning_d9d.strategy.display import say
from lightning_d9d.strategy.interrupt import Interruption, Saved, how_to_go_on
from lightning_d9d.strategy.module import D9DModule
from lightning_d9d.strategy.ranks import RankedStrategy
from lightning_d9d.strategy.sharding import is_sharded
from lightning_d9d.strategy.uneven import TrainingLoader
from lightning_d9d.strategy.weights import gathered_on_first, laid_out_like, report, sharded_state

_RANKS = "lightning_d9d_ranks"
"""What each rank adds to a checkpoint, in the order of ranks."""
_REQUEUED = "hpc_ckpt_"
"""How the names begin of what Lightning saves when SLURM puts a job back into the queue."""
_WITHOUT_GRADIENTS = "inside of an accumulation window, whose gradients are not saved"

Mode = Literal["auto", "sharded", "consolidated"]


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """What a checkpoint is. Both kinds load on any mesh, whichever is configured."""

    mode: Mode = "auto"
    """"sharded": a directory, to which each rank writes what it holds. "consolidated": Lightning's own file, written by
    rank 0, to whose host all stages and shards are gathered, tensor by tensor. "auto": the file for a plain
    LightningModule without sharded tensors, else the directory."""

    asynchronous: bool = False
    """In `fit`, training goes on as soon as what is saved has been copied to the host's memory: on each rank as much as
    it holds of model and optimizer. Files are written in the background, and a checkpoint appears, and the one that it
    replaces is removed, when it is complete. What goes wrong is raised by the next save, or at the end of `fit`, which
    waits."""

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ConfigError(
                f"CheckpointConfig.mode={self.mode!r} must be one of {', '.join(map(repr, get_args(Mode)))}"
            )


class CheckpointedStrategy(RankedStrategy):
    """The part of `D9DStrategy` that saves and loads.

    Args:
        checkpoint: File or directory.
        options: For `RankedStrategy`.
    """

    shared_by_copies = (*RankedStrategy.shared_by_copies, "_opened", "_undo_loaders", "_saver", "_interruption")

    def __init__(self, checkpoint: CheckpointConfig, **options: Any) -> None:
        super().__init__(**options)
        self.checkpoint_config = checkpoint
        self._checkpoint_path: str | Path = ""
        self._opened: Checkpoint | None = None
        self._resumed: Mapping[str, Any] | None = None
        self._undo_loaders: list[Callable[[], None]] = []
        self._loader_states: list[dict[str, Any]] | None = None
        self._saver: BackgroundSaver | None = None
        self._deferred: DeferredSaves | None = None
        self.parameters_of_pipeline: list[str] = []
        """The names of all stages' parameters, in the order of one process that has them all; in a pipeline."""
        self.saves_at_once = False
        """The job may end as soon as a checkpoint is saved."""
        self._saved: Saved | None = None
        self._interruption: Interruption | None = None

    # Saving

    def open_saver(self, window_is_open: Callable[[], bool]) -> None:
        """Let this run save at the end of accumulation windows, on Ctrl-C and, if so configured, in the background.

        Collective.

        Args:
            window_is_open: Whether there are gradients for which no step was taken.
        """
        trainer = cast(Any, self.lightning_module).trainer
        callbacks = trainer.callbacks
        self._deferred = DeferredSaves(window_is_open, callbacks)
        if self.world_size == 1:
            self._interruption = Interruption(trainer, window_is_open)
        if self.checkpoint_config.asynchronous:
            check_saving_callbacks(callbacks)
            self._saver = BackgroundSaver(None if self.world_size == 1 else self._group_of_saves())

    def checkpoint_will_exist(self, path: str | Path) -> bool | None:
        """Whether a checkpoint is under a path when all saves are done; None if none is waiting for it. Collective."""
        found = None if self._deferred is None else self._deferred.will_exist(path)
        if found is None and self._saver is not None:
            found = self.broadcast(self._saver.will_exist(path))  # ranks have not finished at the same time
        return found

    def _group_of_saves(self) -> dist.ProcessGroup:
        return self.mesh.group("pp", "dp", "cp", "tp", lane="checkpoint", backend="gloo")

    def finish_saves(self) -> None:
        """Wait for what is saved in the background. Local.

        Raises:
            StateError: A save has failed; on every rank.
        """
        if self._saver is not None:
            self._saver.wait()

    def close_saver(self) -> None:
        """Finish, and save at once from now on. After another failure one of a save is a warning. Local."""
        saver, self._saver = self._saver, None
        interruption, self._interruption, self._saved = self._interruption, None, None
        if interruption is not None:
            interruption.close()
        if self._deferred is not None:
            self._deferred.close()
        self._deferred = None
        try:
            if saver is not None:
                saver.close()
        except StateError as error:
            assert self.lightning_module is not None
            if not self.lightning_module.trainer.interrupted:
                raise
            rank_zero_warn(str(error))

    def on_train_end(self) -> None:
        """Wait for what callbacks have saved last. In a window that stays open, save nevertheless."""
        super().on_train_end()
        if self._deferred is not None and self._deferred.are_waiting:
            rank_zero_warn(f"training ends {_WITHOUT_GRADIENTS}")
            self._deferred.is_open = lambda: False
            self._deferred.run()
        self.finish_saves()
        if self._interruption is not None:
            self._interruption.check()

    @property
    def is_inside_of_window(self) -> bool:
        """Whether gradients have been accumulated with which no step was taken; the same on all ranks."""
        return self._deferred is not None and self._deferred.is_open()

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """What writes and reads files: the Trainer's plugin, or Lightning's own made safe against torn files."""
        if self._checkpoint_io is None:
            self._checkpoint_io = AtomicFileIO()
        inner = super().checkpoint_io
        if type(getattr(inner, "checkpoint_io", None)) is TorchCheckpointIO:  # that of a plugin that wraps one
            cast(Any, inner).checkpoint_io = AtomicFileIO()
        return inner

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        self._checkpoint_io = io

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Save what Lightning has put together, a file or a directory; see `CheckpointConfig`. Collective.

        Inside of an accumulation window it is put together and saved once more at its end, and not now: gradients are
        not saved.

        Raises:
            StateError: The directory could not be written; on every rank.
        """
        assert self.lightning_module is not None
        checkpoint = {**checkpoint}  # hooks and callbacks have seen Lightning's own
        if self._deferred is not None and self.is_inside_of_window:
            trainer = self.lightning_module.trainer
            weights_only = "optimizer_states" not in checkpoint
            is_last = Path(filepath).name.startswith(_REQUEUED)  # by Lightning's signal handler, in one process
            if not (self.saves_at_once or trainer.interrupted or is_last):
                save = functools.partial(trainer.save_checkpoint, filepath, weights_only, storage_options)
                self._deferred.add(save, filepath, exists=True)
                return
            if not weights_only:
                rank_zero_warn(f"{str(filepath)!r} is saved {_WITHOUT_GRADIENTS}")
        filepath = self.broadcast(filepath)
        if "optimizer_states" in checkpoint and self._is_fitting:
            checkpoint[_RANKS] = self._gather_ranks(checkpoint)
        if not self._saves_directory:
            whole = self._gather(checkpoint, filepath) if self._is_spread else checkpoint
            self._save_file(whole, filepath, storage_options)
        elif storage_options is not None:
            raise ConfigError(f"storage_options={storage_options!r}: a checkpoint directory takes none")
        else:
            self._save_directory(checkpoint, filepath)
        if self.saves_at_once:
            self.finish_saves()
        if "optimizer_states" in checkpoint and self._is_fitting:
            self._saved = Saved(str(filepath), checkpoint["global_step"])

    def on_exception(self, exception: BaseException) -> None:
        """Say how a fit that was stopped goes on."""
        super().on_exception(exception)
        if isinstance(exception, KeyboardInterrupt | SIGTERMException) and self._is_fitting:
            trainer = cast(Any, self.lightning_module).trainer
            rank_zero_info(how_to_go_on(trainer.global_step, self._saved))

    def _save_file(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None) -> None:
        failure = f"checkpoint {str(path)!r} cannot be saved"
        if self._saver is None:
            with Ranks().agreed(failure):
                super().save_checkpoint(checkpoint, path, storage_options)
            return
        saver, copies = self._saver, list[dict[str, Any]]()
        Ranks().together(failure, lambda: copies.append(saver.copied(checkpoint if self.is_global_zero else {})))
        write = functools.partial(super().save_checkpoint, copies[0], path, storage_options)
        saver.submit(lambda: Ranks(saver.group).together(failure, write), path, exists=True)

    def has_place_to_take(self) -> bool:
        """Whether a place in the data was loaded that `on_train_start` has not taken yet."""
        return self._resumed is not None

    @property
    def _is_fitting(self) -> bool:
        """Whether the Trainer fits, or has fitted last. A module that is saved or loaded by itself has no Trainer."""
        module = self.lightning_module
        return module is not None and module._trainer is not None and module.trainer.state.fn == TrainerFn.FITTING

    @property
    def _saves_directory(self) -> bool:
        module = self.lightning_module
        assert module is not None
        if self.checkpoint_config.mode == "auto":
            return isinstance(module, D9DModule) or is_sharded(module)
        return self.checkpoint_config.mode == "sharded"

    @property
    def _is_spread(self) -> bool:
        """Whether ranks hold parts of the model."""
        assert self.lightning_module is not None
        return self.is_pipelined or is_sharded(self.lightning_module)

    def _gather(self, checkpoint: dict[str, Any], path: str | Path) -> dict[str, Any]:
        """The checkpoint of one process, on rank 0. Collective."""
        tensors, named_values = self._by_name(checkpoint)
        values = {**checkpoint, **Ranks().merge(named_values)}
        tensors = gathered_on_first(tensors, self.mesh.group("pp") if self.is_pipelined else None)
        whole = dict[str, Any]()
        with Ranks().agreed(f"checkpoint {str(path)!r} cannot be saved"):
            if self.is_global_zero:
                whole = whole_checkpoint(values, tensors)
        return whole

    def _by_name(self, checkpoint: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """This rank's tensors and named values of model and optimizers, which are taken out of the checkpoint."""
        state = {f"{MODEL}{name}": value for name, value in checkpoint.pop("state_dict").items()}
        tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        named_values = {name: value for name, value in state.items() if name not in tensors}
        if "optimizer_states" in checkpoint:
            checkpoint["optimizer_states"] = len(self.optimizers)
            names = self._parameter_names()
            place = self.mesh.coordinates["pp"] if self.is_pipelined else 0
            for index, optimizer in enumerate(self.optimizers):
                of_optimizer = optimizer_state(optimizer, names, OPTIMIZER.format(index))
                tensors.update(of_optimizer[0])
                named_values.update(of_optimizer[1])
                named_values[GROUPS.format(index, place)] = group_records(optimizer, names)
            checkpoint[ONE_PROCESS] = {"parameters": self._parameter_order(names), "scheduled": self._scheduled()}
        return tensors, named_values

    def _parameter_order(self, names: Mapping[nn.Parameter, str]) -> list[str]:
        """All parameters, as one process names them; `names` has those of this rank."""
        return [*(self.parameters_of_pipeline if self.is_pipelined else names.values())]

    def _scheduled(self) -> list[int | None]:
        """For each scheduler, the index of its optimizer."""
        indices = {id(optimizer): index for index, optimizer in enumerate(self.optimizers)}
        configs = cast(Any, self.lightning_module).trainer.lr_scheduler_configs
        return [indices.get(id(getattr(config.scheduler, "optimizer", None))) for config in configs]

    def _save_directory(self, checkpoint: dict[str, Any], path: str | Path) -> None:
        tensors, named_values = self._by_name(checkpoint)
        if self._saver is None:
            save_directory(path, tensors, checkpoint, named_values=named_values)
        else:
            step = cast(Any, self.lightning_module).trainer.global_step
            self._saver.save_directory(path, tensors, checkpoint, named_values=named_values, version=step)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Lightning's own; where it goes by parameter names first, `save_checkpoint` sees to it."""
        return {} if self._saves_directory or self._is_spread else super().optimizer_state(optimizer)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove a file or a directory, a directory so that no part of it is left under its name.

        Where saves go on in the background, after those: what takes its place must be there. If it cannot be removed,
        that is a warning, as nothing is lost and this rank alone knows of it: the others wait for it in the next save.
        """
        if self._deferred is not None and self._deferred.are_waiting:
            self._deferred.add(functools.partial(self.remove_checkpoint, filepath), filepath, exists=False)
        elif self._saver is None:
            self._remove(filepath)
        else:
            self._saver.submit(functools.partial(self._remove, filepath), filepath, exists=False)

    def _remove(self, filepath: str | Path) -> None:
        try:
            if self.is_global_zero and (is_directory(filepath) or Path(filepath).is_symlink()):
                remove_directory(filepath)
            else:
                super().remove_checkpoint(filepath)
        except Exception as error:  # whatever a Trainer's plugin raises
            rank_zero_warn(f"checkpoint {str(filepath)!r} is no longer needed, but cannot be removed: {error}")

    def _parameter_names(self) -> dict[nn.Parameter, str]:
        """As in checkpoints."""
        assert self.lightning_module is not None
        state = self.lightning_module.state_dict(keep_vars=True)
        names: dict[nn.Parameter, str] = {}
        for name, value in state.items():
            if isinstance(value, nn.Parameter):
                names.setdefault(value, name)
        return names

    # Loading

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a file, or open a directory and read the weights to their places. Collective.

        Args:
            checkpoint_path: Of either.
            weights_only: For files: False lets them run code. Directories never do.

        Raises:
            StateError: It is damaged, incomplete or foreign; on every rank.
            RankError: A rank has failed. A tuner restores what it had saved nevertheless.
        """
        self.check_ranks()
        self.finish_saves()
        self._checkpoint_path, self._opened = checkpoint_path, None
        self._saved = Saved(str(checkpoint_path), None)
        if self.broadcast(is_directory(checkpoint_path)):
            self._opened = open_directory(checkpoint_path)
            self.go_on_as(self._opened.values)
            self.load_pretrained(unless_in={name.removeprefix(MODEL) for name in self._opened.tensors})
            checkpoint = {**self._opened.values, "state_dict": self._load_weights(self._opened)}
        else:
            weights_only = never_runs_code(checkpoint_path, weights_only)
            read = functools.partial(super().load_checkpoint, checkpoint_path, weights_only=weights_only)
            with Ranks().agreed(f"checkpoint {str(checkpoint_path)!r} cannot be read"):
                checkpoint = read_checkpoint(read, checkpoint_path, weights_only)
            self.go_on_as(checkpoint)
            self.load_pretrained(unless_in=checkpoint.get("state_dict", {}).keys())
        ranks = checkpoint.pop(_RANKS, None)
        if ranks is not None and self._is_fitting:
            self._resumed = self._of_this_rank(ranks)
            checkpoint["loops"]["fit_loop"]["state_dict"].pop("combined_loader", None)  # each rank has its own
        return checkpoint

    def load_pretrained(self, unless_in: Collection[str] = ()) -> None:
        """Let a D9DModule load its pretrained weights, once, unless a checkpoint has all parameters. Collective.

        Args:
            unless_in: The names of what is going to be loaded; equal on all ranks.
        """
        module = self.lightning_module
        if isinstance(module, D9DModule) and module.awaits_pretrained:
            lacks = not set(self._parameter_names().values()) <= set(unless_in)
            if any(Ranks(alone=self.world_size == 1).all_gather(lacks)):
                module.load_pretrained_once()
            else:
                module.awaits_pretrained = False

    @abstractmethod
    def go_on_as(self, checkpoint: Mapping[str, Any]) -> None:
        """Called with a checkpoint's values before the weights are loaded. Collective."""

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Give the module the weights, as hooks left them, however its tensors are sharded. Collective in a pipeline.

        Raises:
            StateError: They are another model's, with what differs.
        """
        module = self.lightning_module
        assert module is not None
        state = laid_out_like(module.state_dict(), checkpoint["state_dict"])
        if self._opened is None and self.is_pipelined:  # a file has all stages
            own = module.state_dict().keys()
            of_others = Ranks().merge(dict.fromkeys(own)).keys() - own
            state = {name: value for name, value in state.items() if name not in of_others}
        load_weights(module, state, strict, self._checkpoint_path)

    def _load_weights(self, opened: Checkpoint) -> dict[str, Any]:
        """The module's state dict, whose tensors now have the saved values: nothing is held twice. Collective.

        Where optimizers go on, too, what they will get has been found undamaged before a weight is changed.
        """
        module = self.lightning_module
        assert module is not None
        state = module.state_dict()
        check_saved_tied_parameters(module, state, opened)
        tensors = {f"{MODEL}{name}": value for name, value in state.items() if isinstance(value, Tensor)}
        later = OPTIMIZER.format("") if self._is_fitting else None
        report(opened.load(tensors, strict=module.strict_loading, prefix=MODEL, later=later), opened.path)
        return {name: opened.values.get(f"{MODEL}{name}", value) for name, value in state.items()}

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Give optimizers their state, however their parameters are sharded. Collective where ranks hold parts.

        Raises:
            StateError: Their kind or parameters differ from what was saved, or, but for files of plain modules, which
                go on as under Lightning's own strategies with a warning, their number; on every rank.
        """
        states: Any = checkpoint["optimizer_states"]
        by_name = self._opened is not None or self._is_spread
        self._check_number_of_optimizers(len(states) if self._opened is None else states, by_name)
        failure = self._optimizer_failure
        names = self._parameter_names() if by_name else {}
        known = self.optimizers if self._opened is not None else self.optimizers[: len(states)]
        for index, optimizer in enumerate(known):
            if self._opened is not None:
                load_optimizer_state(optimizer, names, OPTIMIZER.format(index), self._opened)
            else:
                state = self._part_of(states[index], optimizer, names) if by_name else states[index]
                with Ranks().agreed(failure):
                    give_state(optimizer, state)
            _optimizer_to_device(optimizer, self.root_device)
        if by_name:  # Lightning loads schedulers behind this
            assert self.lightning_module is not None
            configs = self.lightning_module.trainer.lr_scheduler_configs
            for config, state in zip(configs, checkpoint.get("lr_schedulers", []), strict=False):
                fit_scheduler_state(state, config.scheduler.optimizer.param_groups)  # type: ignore[union-attr]

    def _check_number_of_optimizers(self, num_saved: int, by_name: bool) -> None:
        if num_saved == len(self.optimizers):
            return
        what = (
            f"checkpoint {str(self._checkpoint_path)!r} has {num_saved} optimizers and the module "
            f"{len(self.optimizers)}"
        )
        if by_name or isinstance(self.lightning_module, D9DModule):
            raise StateError(f"{what}; let configure_optimizers return as many")
        rank_zero_warn(f"{what}: of these the first {min(num_saved, len(self.optimizers))} go on, others begin anew")

    def _part_of(
        self, state: Mapping[str, Any], optimizer: Optimizer, names: Mapping[nn.Parameter, str]
    ) -> dict[str, Any]:
        """What a file has of the parameters that this rank's optimizer has. Collective."""
        failure = self._optimizer_failure
        records, part = list[dict[str, Any]](), dict[str, Any]()
        with Ranks().agreed(failure):
            records = group_records(optimizer, names)
        of_pipeline = all_gather_object(records, self.mesh.group("pp")) if self.is_pipelined else [records]
        with Ranks().agreed(failure):
            whole = whole_groups(of_pipeline, self._parameter_order(names))
            part = sharded_state(optimizer, part_of_whole(optimizer, names, state, whole))
        return part

    @property
    def _optimizer_failure(self) -> str:
        return f"optimizer state of checkpoint {str(self._checkpoint_path)!r} cannot be loaded"

    # Going on in the middle of an epoch

    def process_dataloader(self, dataloader: object) -> object:
        """Let a training loader go on in the middle of an epoch, if it has no way of its own.

        Ranks that read the same samples read them in the same order, and get the same random numbers in worker
        processes.
        """
        assert self.lightning_module is not None
        is_d9d = isinstance(self.lightning_module, D9DModule)
        if isinstance(dataloader, DataLoader) and self.world_size > 1 and (is_d9d or self.mesh.dp_size == 1):
            self._undo_loaders.append(seed_order(dataloader, self.seed))
        if self.world_size > 1 and self.mesh.dp_size < self.world_size and isinstance(dataloader, DataLoader):
            self._undo_loaders.append(seed_workers(dataloader, self.seed, self.mesh.coordinates))
        if self.lightning_module.trainer.training:
            self._loader_states = None
            rank = DataRank(self.mesh.dp_rank, self.mesh.dp_size) if self.world_size > 1 else DataRank()
            loader: Any = dataloader
            if can_resume_by_sampler(loader):
                self._undo_loaders.append(make_resumable(loader, lambda: self._num_batches_read_of(loader), rank))
            elif can_replay(loader):
                self._undo_loaders.append(make_replayed(loader, lambda: self._num_batches_read_of(loader), rank))
        return super().process_dataloader(dataloader)

    def on_train_start(self) -> None:
        """Go on with the random numbers and in the place in the epoch of a checkpoint that was loaded.

        Lightning gives loaders their state before the first epoch, but samplers their epoch only afterwards, when
        worker processes have read the first batches; and none at all where a module reads
        `estimated_stepping_batches` (its issue 20550). So loaders begin once more here.

        Without a checkpoint a D9DModule's ranks begin with numbers of their own, for dropout; copies of one activation
        with equal ones. Plain modules keep what `seed_everything` gave them, as under DDP.
        """
        super().on_train_start()
        assert self.lightning_module is not None
        resumed, self._resumed, self._opened = self._resumed, None, None
        has_random_state = resumed is not None and resumed["random"] is not None
        if self.world_size > 1 and isinstance(self.lightning_module, D9DModule) and not has_random_state:
            coordinates = {**self.mesh.coordinates, "step": self.lightning_module.trainer.global_step}
            torch.manual_seed(seed_for(self.seed, purpose="dropout", coordinates=coordinates))
        if resumed is None:
            return
        loop = self.lightning_module.trainer.fit_loop
        epochs: Any = loop.epoch_progress.current
        if loop.restarted_mid_epoch and epochs.processed >= epochs.ready:
            loop.reset_restart_stage()  # saved in an epoch's last batch; Lightning would not count the next as begun
        loader, fetcher = loop._combined_loader, loop._data_fetcher
        assert loader is not None
        assert fetcher is not None
        for each in loader.flattened:
            _set_sampler_epoch(each, epochs.processed)
        self._load_states(loader, resumed)
        loop._last_train_dl_reload_epoch = resumed["reload_epoch"]
        between_epochs = self._num_batches_read() == 0
        if between_epochs:  # the order of the epoch is still to be drawn, as it would have been
            self._set_random_state(resumed)
        if not (between_epochs and loop.epoch_loop.restarted_on_last):  # then Lightning begins the next epoch itself
            iter(fetcher)
        if not between_epochs:
            self._set_random_state(resumed)

    def _set_random_state(self, resumed: Mapping[str, Any]) -> None:
        if resumed["random"] is not None:
            set_random_state(resumed["random"], self.root_device)

    def _num_batches_read(self) -> int:
        """How many batches the current epoch has trained on; 0 between epochs."""
        progress = self._batch_progress
        return 0 if progress.is_last_batch else progress.current.processed

    def _num_batches_read_of(self, loader: Any) -> int:
        """Of one among several: in mode "max_size" a shorter one stays at its end, otherwise it begins again."""
        assert self.lightning_module is not None
        combined, num_read = self.lightning_module.trainer.fit_loop._combined_loader, self._num_batches_read()
        if isinstance(combined, TrainingLoader):
            num_read = combined.num_own(num_read)
        ends = combined is not None and combined._mode == "max_size"
        return min(num_read, len(loader)) if ends and sized_len(loader) is not None else num_read

    def _load_states(self, loader: CombinedLoader, resumed: Mapping[str, Any]) -> None:
        """Give loaders their states, and Lightning's loop the place where they are in the epoch.

        Raises:
            StateError: The checkpoint is of other loaders, or they cannot go on with so many data ranks.
        """
        states, path = resumed["loaders"], str(self._checkpoint_path)
        num_read, saved = self._num_batches_read(), resumed["num_data_ranks"]
        if num_read and resumed["is_other_job"]:
            text = f"{saved} data ranks saved {path!r}: the rest of the epoch is dealt out anew to the present"
            say(cast(Any, self.lightning_module).trainer, text)
            if not all(map(is_place_of_sampler, states)):
                raise StateError(
                    f"checkpoint {path!r} was saved in the middle of an epoch by {saved} data-parallel ranks, and a "
                    "dataloader has a state of its own, which only as many can take up; go on with as many, or save at "
                    "the end of an epoch"
                )
        try:
            loader._load_state_dicts(states)
        except StateError as error:
            raise StateError(f"checkpoint {path!r}: {error}") from error
        except RuntimeError as error:
            raise StateError(f"checkpoint {path!r} is of a run with other training dataloaders: {error}") from error
        if num_read and any(map(is_replayed, loader.flattened)):
            text = f"{num_read} batches are read again and left out: a dataloader has no state of its own"
            say(cast(Any, self.lightning_module).trainer, text)
        places = {place for each in loader.flattened if (place := resumes_at(each)) is not None}
        if len(places) > 1:
            raise StateError(
                f"checkpoint {path!r}: dataloaders of a run with other data ranks or batches would be at batches "
                f"{sorted(places)} of the epoch at a time; go on with as many as before, or save at the end of an epoch"
            )
        for place in places:
            progress: Any = self._batch_progress.current
            for name in ("ready", "started", "processed", "completed"):
                setattr(progress, name, getattr(progress, name) + place - num_read)

    @property
    def _batch_progress(self) -> Any:
        assert self.lightning_module is not None
        return self.lightning_module.trainer.fit_loop.epoch_loop.batch_progress

    def _gather_ranks(self, checkpoint: Mapping[str, Any]) -> list[dict[str, Any]] | None:
        assert self.lightning_module is not None
        loop, state = self.lightning_module.trainer.fit_loop, checkpoint["loops"]["fit_loop"]["state_dict"]
        loaders = self._loader_states or _loader_states(loop._combined_loader)
        state.pop("combined_loader", None)
        if stateful := [each for each in loaders if not is_place_of_sampler(each)]:
            state["combined_loader"] = stateful  # for other strategies, which know no place of a sampler
        ours = {
            "random": random_state(self.root_device),
            "loaders": loaders,
            "reload_epoch": loop._last_train_dl_reload_epoch,
            "dp_rank": self.mesh.dp_rank if self.world_size > 1 else 0,
            "mesh": self._sizes,
        }
        return gather_object(ours) if self.world_size > 1 else [ours]

    @property
    def _sizes(self) -> dict[str, int]:
        """Of the axes that say which rank is where: equal sizes give a rank of the same number the same place."""
        return {axis: self.mesh.sizes[axis] if self.world_size > 1 else 1 for axis in ("pp", "dp", "cp", "tp")}

    def _of_this_rank(self, ranks: list[dict[str, Any]]) -> dict[str, Any]:
        """What this rank goes on with; without random numbers on another mesh, where copies must draw equal ones.

        Checkpoints of older versions do not say their mesh: data ranks alone are known to be none else.
        """
        dp_rank, dp_size = (self.mesh.dp_rank, self.mesh.dp_size) if self.world_size > 1 else (0, 1)
        saved = 1 + max(each["dp_rank"] for each in ranks)
        own = next((each for each in ranks if each["dp_rank"] == dp_rank), ranks[0])
        loaders = own["loaders"]
        if dp_size != saved:  # of an order that is dealt out anew, all take the first rank's
            pairs = zip(loaders, ranks[0]["loaders"], strict=True)
            loaders = [first if is_place_of_sampler(first) and first["order"] else each for each, first in pairs]
        mesh = ranks[0].get("mesh", {"pp": 1, "dp": saved, "cp": 1, "tp": 1})
        is_same_mesh = len(ranks) == self.world_size and mesh == self._sizes
        random = ranks[self.global_rank]["random"] if is_same_mesh else None
        return {**own, "loaders": loaders, "random": random, "num_data_ranks": saved, "is_other_job": dp_size != saved}

    def release_loaders(self) -> None:
        """Give loaders back as they were; what is saved from now on has the place where they are. Local."""
        self._opened = self._resumed = None
        if self._undo_loaders and self.lightning_module is not None:
            self._loader_states = _loader_states(self.lightning_module.trainer.fit_loop._combined_loader)
        while self._undo_loaders:
            self._undo_loaders.pop()()


def _loader_states(loader: CombinedLoader | None) -> list[dict[str, Any]]:
    return [] if loader is None else loader._state_dicts()
