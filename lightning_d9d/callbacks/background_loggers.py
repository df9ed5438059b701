"""`BackgroundLoggers` runs loggers in separate threads, and continues their runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.trainer.states import TrainerFn

from lightning_d9d.callbacks.export import make_folder
from lightning_d9d.env import versions
from lightning_d9d.errors import ConfigError
from lightning_d9d.loop.logger_runs import continue_run, hold_back
from lightning_d9d.loop.logger_threads import call_in_threads
from lightning_d9d.loop.patches import Patches
from lightning_d9d.mesh.agreement import Ranks


class BackgroundLoggers(L.Callback):
    """Runs each of the Trainer's loggers in a thread of its own during a fit, and continues their runs.

    - A call that fails is repeated twice, and a logger that hangs is abandoned. Either failure is reported once, and
      neither ends nor stalls the fit. At its end the fit waits at most `hang_seconds` for each logger.
    - A resumed fit continues the runs of its loggers: TensorBoard, CSV, W&B, MLflow and Aim.
    - The mesh, the settings of the strategy and versions are recorded with the hyperparameters of the run.

    Only rank 0 writes. All ranks must have the callback, and `D9DStrategy`.

    Args:
        hang_seconds: A call that takes longer is reported.
        continue_runs: Whether a resumed fit continues the runs of its loggers.

    Raises:
        ConfigError: `hang_seconds` is not above 0. At the start of a fit: the Trainer has no logger, or a logger's
            directory cannot be written.
    """

    def __init__(self, hang_seconds: float = 60.0, continue_runs: bool = True) -> None:
        if not hang_seconds > 0:
            raise ConfigError(f"BackgroundLoggers(hang_seconds={hang_seconds}) must be above 0")
        self.hang_seconds = hang_seconds
        self.continue_runs = continue_runs
        self._trainer: L.Trainer | None = None
        self._held_back: Patches | None = None
        self._runs: list[list[Any]] = []

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Keep a reference to the Trainer. Local.

        Raises:
            ConfigError: The strategy is not a `D9DStrategy`.
        """
        if stage == "fit" and self._trainer is None:
            raise ConfigError(
                f"BackgroundLoggers needs D9DStrategy, but the Trainer has {type(trainer.strategy).__name__}; leave "
                "the callback out"
            )

    def before_loggers(self, trainer: L.Trainer) -> None:
        """Check that loggers can write, and hold their calls back until a checkpoint is read.

        Collective over all ranks.

        Raises:
            ConfigError: The Trainer has no logger, or a directory cannot be written; on every rank.
        """
        self._trainer = trainer
        if trainer.state.fn != TrainerFn.FITTING:
            return
        if not trainer.loggers:
            raise ConfigError(
                "BackgroundLoggers has no logger to call: give the Trainer one, or leave the callback out"
            )
        with Ranks().agreed("loggers cannot begin"):
            for logger in trainer.loggers:
                if logger.save_dir is not None and "://" not in str(logger.save_dir):
                    name = f"{type(logger).__name__}(save_dir={str(logger.save_dir)!r})"
                    make_folder(trainer, Path(logger.save_dir), name)
        self._runs = []
        self._held_back = Patches(trainer)
        hold_back(self._held_back, trainer)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the runs that `state_dict` returned."""
        self._runs = state_dict["runs"]

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin the runs of loggers, or continue those of a checkpoint. Local."""
        self._let_go()
        if self.continue_runs and trainer.is_global_zero:
            self._continue(trainer, self._runs)
        for logger in trainer.loggers:
            getattr(logger, "experiment", None)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Restore the Trainer's loggers. Local."""
        self._let_go()

    def _let_go(self) -> None:
        if self._held_back is not None:
            self._held_back.undo()
            self._held_back = None

    def state_dict(self) -> dict[str, Any]:
        """Return the runs of the loggers, by class."""
        loggers = [] if self._trainer is None else self._trainer.loggers
        return {"runs": [[type(logger).__name__, logger.version] for logger in loggers]}

    def _continue(self, trainer: L.Trainer, runs: list[list[Any]]) -> None:
        left = list(runs)
        for logger in trainer.loggers:
            name = type(logger).__name__
            run = next((run for run in left if run[0] == name), None)
            if run is None:
                continue
            left.remove(run)
            if run[1] is not None and not continue_run(logger, run[1]):
                rank_zero_warn(f"{name} begins a new run: nobody knows how it goes on with {run[1]!r}")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Record the settings of the run, and begin to call loggers in threads. Local."""
        if not trainer.is_global_zero:
            return
        call_in_threads(Patches(trainer), trainer, self.hang_seconds)
        record = run_record(trainer)
        for logger in trainer.loggers:
            logger.log_hyperparams(record)


def run_record(trainer: L.Trainer) -> dict[str, Any]:
    """Return versions, devices, the mesh and the strategy's settings as plain values. Local.

    Args:
        trainer: Trainer of the run.
    """
    strategy: Any = trainer.strategy
    record: dict[str, Any] = {f"versions/{name}": version for name, version in versions().items() if version}
    record["devices"] = trainer.world_size
    device = strategy.root_device
    record["device"] = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    mesh = getattr(strategy, "mesh", None)
    if mesh is not None:
        record |= {f"mesh/{axis}": size for axis, size in mesh.sizes.items()}
    if hasattr(strategy, "settings"):
        record |= {f"strategy/{name}": str(value) for name, value in strategy.settings().items()}
    return record
