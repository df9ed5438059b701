"""Everything that a run replaces on the objects of Lightning's Trainer: one table, and one undo.

Where Lightning offers no hook, methods and attributes are replaced on the objects of one Trainer, never on classes.
`PATCHES` names each of them, with the reason and the line of Lightning that makes it work. A strategy makes one
`Patches` in `setup_environment` and undoes it at the end of `teardown`; other files replace attributes through it.
`tests/strategy/test_lightning_privates.py` compares the table with Lightning's source.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import lightning as L

_FIT = "fit_loop"
_BATCHES = "fit_loop.epoch_loop"
_VALIDATION = "fit_loop.epoch_loop.val_loop"
_ALONE = ("validate_loop", "test_loop", "predict_loop")
"""The loops of `Trainer.validate`, `test` and `predict`."""
_SIGNALS = "_signal_connector"
_PRECISION = "strategy.precision_plugin"
_AGREE = "ranks agree on should_stop where Lightning is going to ask for it"
_IN_THREAD = "a logger that fails or hangs neither ends nor stalls a fit"
_ABSENT = object()


@dataclass(frozen=True)
class Patch:
    """One attribute that may be replaced, and the line of Lightning that makes the replacement work."""

    attribute: str
    paths: tuple[str, ...]
    """Paths to its owners, from the Trainer; "" is the Trainer itself. If a path leads to a list, each of its items is
    an owner."""
    why: str
    user: str
    """The function or class that uses the attribute, below `lightning.pytorch`."""
    text: str
    """The source line in which it does so."""

    def owners(self, trainer: L.Trainer) -> Iterator[Any]:
        """Yield the objects of a Trainer on which the attribute may be replaced. Local."""
        for path in self.paths:
            found = attrgetter(path)(trainer) if path else trainer
            yield from found if isinstance(found, list) else [found]


PATCHES = (
    # signals, failures and the end of a fit: shutdown.py
    Patch(
        "run",
        (_FIT,),
        "a failure is reported before a tuner restores what it had saved",
        "trainer.trainer.Trainer._run_stage",
        "self.fit_loop.run()",
    ),
    Patch(
        "setup_data",
        (_FIT,),
        "ranks compare how many training batches they have",
        "loops.fit_loop._FitLoop.run",
        "self.setup_data()",
    ),
    Patch("on_run_start", (_FIT,), _AGREE, "loops.fit_loop._FitLoop.run", "self.on_run_start()"),
    Patch("on_advance_start", (_FIT,), _AGREE, "loops.fit_loop._FitLoop.run", "self.on_advance_start()"),
    Patch("on_advance_end", (_FIT,), _AGREE, "loops.fit_loop._FitLoop.run", "self.on_advance_end()"),
    Patch(
        "on_advance_end",
        (_BATCHES,),
        "ranks meet when an epoch ends; " + _AGREE,
        "loops.training_epoch_loop._TrainingEpochLoop.run",
        "self.on_advance_end(data_fetcher)",
    ),
    Patch(
        "_should_check_val_fx",
        (_BATCHES,),
        "ranks agree after which batch a time between validations is over",
        "loops.training_epoch_loop._TrainingEpochLoop.on_advance_end",
        "should_check_val = self._should_check_val_fx(data_fetcher)",
    ),
    Patch(
        "_broadcast_sigterm_tensor",
        (_BATCHES,),
        "the watchdogs agree where to stop, without a broadcast a batch",
        "loops.training_epoch_loop._TrainingEpochLoop.advance",
        "self._broadcast_sigterm_tensor()",
    ),
    Patch(
        "_store_dataloader_outputs",
        (_VALIDATION, "validate_loop", "test_loop"),
        "ranks meet at the end of each dataloader and compare what they logged, before metrics are reduced",
        "loops.evaluation_loop._EvaluationLoop",
        "self._store_dataloader_outputs()\n        return self.on_run_end()",
    ),
    Patch(
        "_sigterm_notifier_fn",
        (_SIGNALS,),
        "Lightning's handler issues a collective; the watchdog reads a pipe",
        "trainer.connectors.signal_connector._SignalConnector.register_signal_handlers",
        "sigterm_handlers: list[_HANDLER] = [self._sigterm_notifier_fn]",
    ),
    Patch(
        "_slurm_sigusr_handler_fn",
        (_SIGNALS,),
        "ranks agree on the batch before which they save for SLURM",
        "trainer.connectors.signal_connector._SignalConnector.register_signal_handlers",
        "sigusr_handlers.append(self._slurm_sigusr_handler_fn)",
    ),
    Patch(
        "callbacks",
        ("",),
        "a callback in front of all others reports exceptions and counts batches",
        "trainer.call._call_callback_hooks",
        "callbacks = trainer.callbacks",
    ),
    # Ctrl-C: shutdown.py with several processes, interrupt.py with one
    Patch(
        "register_signal_handlers",
        (_SIGNALS,),
        "Ctrl-C stops before a batch, where a checkpoint can be saved",
        "trainer.trainer.Trainer._run",
        "self._signal_connector.register_signal_handlers()",
    ),
    Patch(
        "advance",
        (_BATCHES,),
        "the place before a batch, where Ctrl-C stops one process",
        "loops.training_epoch_loop._TrainingEpochLoop.run",
        "self.advance(data_fetcher)",
    ),
    Patch(
        "on_exception",
        ("checkpoint_callbacks",),
        "nobody saves where ranks or half a step went wrong",
        "trainer.call._interrupt",
        '_call_callback_hooks(trainer, "on_exception", exception)',
    ),
    # saves inside of accumulation windows: deferred_saves.py
    Patch(
        "file_exists",
        ("checkpoint_callbacks",),
        "names of checkpoints count saves that wait for the window's end",
        "callbacks.model_checkpoint.ModelCheckpoint",
        "while self.file_exists(filepath, trainer)",
    ),
    # loaders of unequal lengths: uneven.py
    Patch(
        "dataloader",
        tuple(f"{loop}._data_source" for loop in (_FIT, _VALIDATION, *_ALONE)),
        "data ranks get equally many batches",
        "trainer.connectors.data_connector._request_dataloader",
        "data_source.dataloader()",
    ),
    # rows of data ranks: samplers.py
    Patch(
        "use_distributed_sampler",
        ("_accelerator_connector",),
        "ranks that read the same samples get no sampler",
        "trainer.connectors.data_connector._DataConnector._requires_distributed_sampler",
        "self.trainer._accelerator_connector.use_distributed_sampler",
    ),
    Patch(
        "_resolve_sampler",
        ("_data_connector",),
        "validation and test take each row once",
        "trainer.connectors.data_connector._DataConnector._prepare_dataloader",
        "sampler = self._resolve_sampler(dataloader, shuffle=shuffle, mode=mode)",
    ),
    # strategy.py: sharded modules and gradients
    Patch(
        "inference_mode",
        _ALONE,
        "DTensors know no inference tensors",
        "loops.utilities._no_grad_context",
        "elif self.inference_mode:",
    ),
    Patch(
        "clip_grad_by_norm",
        (_PRECISION,),
        "the norm is of all ranks' gradients",
        "plugins.precision.precision.Precision.clip_gradients",
        "self.clip_grad_by_norm(optimizer, clip_val)",
    ),
    Patch(
        "clip_grad_by_value",
        (_PRECISION,),
        "sharded gradients are clipped as well",
        "plugins.precision.precision.Precision.clip_gradients",
        "self.clip_grad_by_value(optimizer, clip_val)",
    ),
    Patch(
        "clip_gradients",
        (_PRECISION,),
        "MixedPrecision refuses fused optimizers, for a loss scaler's sake alone",
        "core.module.LightningModule.clip_gradients",
        "self.trainer.precision_plugin.clip_gradients(optimizer,",
    ),
    # the terminal: display.py, progress.py
    Patch(
        "__class__",
        ("callbacks",),
        "bars and summaries are made before the strategy sees them",
        "trainer.call._call_callback_hooks",
        "fn = getattr(callback, hook_name)",
    ),
    Patch(
        "_progress_bar_metrics",
        ("_logger_connector",),
        "the loss is shown one step late, without a host sync",
        "trainer.connectors.logger_connector.logger_connector._LoggerConnector.progress_bar_metrics",
        "return self._progress_bar_metrics",
    ),
    # loggers: logger_threads.py, logger_runs.py
    Patch(
        "__class__",
        ("loggers",),
        "a logger begins no new run before it is known which one it goes on with",
        "trainer.call._call_setup_hook",
        'if hasattr(logger, "experiment"):',
    ),
    Patch(
        "log_metrics",
        ("loggers",),
        _IN_THREAD,
        "trainer.connectors.logger_connector.logger_connector._LoggerConnector.log_metrics",
        "logger.log_metrics(metrics=scalar_metrics, step=step)",
    ),
    Patch(
        "save",
        ("loggers",),
        _IN_THREAD,
        "trainer.connectors.logger_connector.logger_connector._LoggerConnector.log_metrics",
        "logger.save()",
    ),
    Patch(
        "log_hyperparams",
        ("loggers",),
        _IN_THREAD,
        "loggers.utilities._log_hyperparams",
        "logger.log_hyperparams(hparams_initial)",
    ),
    Patch(
        "finalize",
        ("loggers",),
        _IN_THREAD,
        "trainer.call._call_teardown_hook",
        'logger.finalize("success")',
    ),
)


class Patches:
    """Replaces attributes of one Trainer's objects for one run; `undo` restores all of them. All methods are local.

    Args:
        trainer: The Trainer of the run.
    """

    def __init__(self, trainer: L.Trainer) -> None:
        self._trainer = trainer
        self._undo = ExitStack()

    def __deepcopy__(self, memo: dict[int, Any]) -> Patches:
        """Return this object: there is one for a run, which copies of its Trainer share."""
        return self

    def replace(self, owner: Any, attribute: str, value: Any) -> None:
        """Set an attribute of one of the Trainer's objects until `undo`.

        Args:
            owner: The object.
            attribute: The name of an existing attribute.
            value: A method that replaces one of the class is called without the object.

        Raises:
            ValueError: The table does not have the attribute.
        """
        self._check(owner, attribute)
        before = owner.__class__ if attribute == "__class__" else vars(owner).get(attribute, _ABSENT)
        if before is _ABSENT:
            self._undo.callback(vars(owner).pop, attribute, None)
        else:
            self._undo.callback(setattr, owner, attribute, before)
        setattr(owner, attribute, value)

    def insert_callback(self, callback: L.Callback) -> None:
        """Insert a callback before the Trainer's others until `undo`."""
        self._check(self._trainer, "callbacks")
        callbacks: list[L.Callback] = self._trainer.callbacks  # type: ignore[attr-defined]  # a tuner has others
        callbacks.insert(0, callback)
        self._undo.callback(callbacks.remove, callback)

    def write(self, owner: Any, attribute: str, key: str, value: Any) -> None:
        """Set an entry of a dict of the table.

        The entry is not undone, like entries that Lightning itself writes there.

        Raises:
            ValueError: The table does not have the entry.
        """
        self._check(owner, attribute)
        getattr(owner, attribute)[key] = value

    def undo(self) -> None:
        """Undo all replacements and insertions since the last call, the latest first."""
        self._undo.close()

    def _check(self, owner: Any, attribute: str) -> None:
        rows = [row for row in PATCHES if row.attribute == attribute]
        if not any(each is owner for row in rows for each in row.owners(self._trainer)):
            raise ValueError(
                f"{type(owner).__name__}.{attribute} cannot be replaced: PATCHES in lightning_d9d/loop/patches.py has "
                "no row for it and this Trainer; add one"
            )
