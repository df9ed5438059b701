"""The earlier run that a logger of a resumed fit continues."""

from __future__ import annotations

import csv
from typing import Any, Protocol, TextIO, cast, runtime_checkable

import lightning as L
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter

from lightning_d9d.loop.patches import Patches


@runtime_checkable
class BeforeLoggers(Protocol):
    """A callback that `D9DStrategy` calls before the Trainer's loggers begin their runs."""

    def before_loggers(self, trainer: L.Trainer) -> None:
        """Called before loggers begin. Collective over all ranks."""
        ...


def hold_back(patches: Patches, trainer: L.Trainer) -> None:
    """Keep loggers from beginning their runs when a fit is set up, until `patches` are undone. Local."""
    for logger in trainer.loggers:
        kind = type(logger)
        patches.replace(logger, "__class__", type(kind.__name__, (kind,), {"experiment": property(_not_yet)}))


def _not_yet(logger: Logger) -> Any:
    raise AttributeError(f"the run of {type(logger).__name__} begins only when a checkpoint has been read")


class _ContinuedWriter(ExperimentWriter):
    """Appends to the metrics of an earlier job, which Lightning's own writer would delete."""

    def _check_log_dir_exists(self) -> None:
        if self._fs.isfile(self.metrics_file_path):
            with self._fs.open(self.metrics_file_path, "r", newline="") as file:
                self.metrics_keys = next(csv.reader(cast(TextIO, file)), [])


def continue_run(logger: Logger, run: Any) -> bool:
    """Make a logger continue an earlier run, before its own begins. Local.

    Args:
        logger: Any. A logger that is not Lightning's may have a method `continue_run`.
        run: Identifier of the run: a version, an id or a hash.

    Returns:
        Whether the logger can continue it.
    """
    own: Any = logger
    if hasattr(own, "continue_run"):
        own.continue_run(run)
    elif isinstance(logger, CSVLogger):
        own._version = run
        own._experiment = _ContinuedWriter(logger.log_dir)
    elif isinstance(logger, TensorBoardLogger):
        own._version, own._experiment = run, None
    elif isinstance(logger, WandbLogger):
        own._wandb_init.update(id=run, resume="allow")
        own._id = run
    elif isinstance(logger, MLFlowLogger):
        own._run_id = run
    else:
        return False
    return True
