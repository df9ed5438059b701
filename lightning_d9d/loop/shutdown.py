"""Stopping, failing and ending epochs together: hooks of one Trainer, for one run, that inform `RankWatch`.

They are used only with more than one process. In one process, Lightning's and Python's own behaviour stays.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import json
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from subprocess import Popen
from types import FrameType
from typing import Any, Protocol

import lightning as L
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.fetchers import _DataFetcher
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_d9d.coordination.common_point import EARLY_STOP, VALIDATION
from lightning_d9d.coordination.hang_report import ranks_in_words
from lightning_d9d.coordination.hangs import HangWatch, Place
from lightning_d9d.coordination.messages import Failure, LateError, say, value_of
from lightning_d9d.coordination.processes import end_processes
from lightning_d9d.coordination.watchdog import SAME_NUMBER, RankWatch
from lightning_d9d.errors import ConfigError, RankError
from lightning_d9d.log import logger
from lightning_d9d.loop.interrupt import Saved, exit_message, refuse_saves
from lightning_d9d.loop.patches import Patches
from lightning_d9d.loop.uneven import catch_up
from lightning_d9d.mesh.collectives import all_gather_object

_run_numbers = itertools.count()  # ranks run the same sequence of fits, so the number names the run on all of them
_with_signals: Shutdown | None = None
_children: list[tuple[int, Popen]] = []  # ranks that this process launched; they outlive the Trainer that launched them


class SavesOfRun(Protocol):
    """Facts about the saves of a run that a shutdown needs."""

    are_urgent: bool
    """True if the job may end as soon as a checkpoint is saved."""
    last: Saved | None
    """The checkpoint from which the run can go on."""

    @property
    def is_inside_of_window(self) -> bool:
        """True if gradients have been accumulated without an optimizer step."""
        ...


class Limits(Protocol):
    """Limits and settings of reports, as in `TimeoutConfig`."""

    @property
    def init_seconds(self) -> float: ...  # noqa: D102
    @property
    def shutdown_seconds(self) -> float: ...  # noqa: D102
    @property
    def groups_seconds(self) -> float: ...  # noqa: D102
    @property
    def report_signal(self) -> str | None: ...  # noqa: D102
    @property
    def report_directory(self) -> str | None: ...  # noqa: D102


class Shutdown:
    """Attaches a `RankWatch` to a Trainer.

    - Lightning's handler of SIGTERM issues a collective inside of the handler, and each training batch begins with a
      broadcast and a host sync. Both are replaced, on this Trainer's objects, by the watch's pipe and
      `RankWatch.begin_train_batch`.
    - Ctrl-C asks all ranks to stop; a second one raises KeyboardInterrupt at once. If Ctrl-C is ignored, it stays
      ignored.
    - When the training data are set up, ranks compare their numbers of batches. A rank with more would wait for the
      others in its next gradient reduction. If a loader does not know its length, `RankWatch.end_epoch` detects the
      difference.
    - At the end of each evaluation dataloader, before metrics are reduced, ranks meet and compare the names that they
      logged. If forwards are collective, a rank with less data first runs dummy batches: see `uneven.py`.
    - Where Lightning reads `should_stop`, or validates because a time is over, ranks agree: see `common_point.py`.
    - A callback before all others reports an exception. The fit loop reports it before a tuner restores its saved
      state. Unless ranks stopped together, callbacks then save nothing: some would wait for others, or mix two steps.

    Args:
        patches: The patches of the run.
        trainer: Trainer inside fit, validate, test or predict, with the process group joined.
        saves: Strategy that knows accumulation windows, and saves for a requeue by SLURM.
        limits: The `TimeoutConfig`.
    """

    def __init__(self, patches: Patches, trainer: L.Trainer, saves: SavesOfRun, limits: Limits) -> None:
        assert dist.group.WORLD is not None
        self._patches = patches
        self._trainer = trainer
        self._saves = saves
        self._limits = limits
        self._interrupted = False
        self._wakeup_before = -1
        self._put_back: tuple[int, Any] | None = None
        self._with_signals_before: Shutdown | None = None
        hangs = hang_watch(trainer, limits)
        store = dist.group.WORLD.get_group_store().clone()  # type: ignore[attr-defined]  # a connection of its own
        self.store = dist.PrefixStore(f"lightning_d9d/run_{next(_run_numbers)}", store)
        """The store of this run alone."""
        by_time = getattr(trainer, "val_check_interval", None) is None  # Lightning leaves it out if it is a time
        self.watch = RankWatch(
            self.store,
            trainer.global_rank,
            trainer.world_size,
            limits.shutdown_seconds,
            limits.init_seconds,
            _children,
            self._stop_exception,
            hangs,
            (EARLY_STOP, VALIDATION) if by_time else (EARLY_STOP,),
        )
        hangs.meets_at = lambda: self.watch.meets_at
        self.watch.last_words = self.exit_message
        patches.insert_callback(_Reporter(self.watch, patches))
        fit_loop, epoch_loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
        patches.replace(fit_loop, "run", self._run_fit_loop)
        patches.replace(fit_loop, "setup_data", self._setup_train_data)
        for name in ("on_run_start", "on_advance_start", "on_advance_end"):
            patches.replace(fit_loop, name, functools.partial(self._call_and_agree, name))
        patches.replace(epoch_loop, "on_advance_end", self._end_train_step)
        patches.replace(epoch_loop, "_broadcast_sigterm_tensor", self._begin_train_batch)
        if by_time:  # else all ranks want the same
            patches.replace(epoch_loop, "_should_check_val_fx", self._should_validate)
        for loop in (epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop):
            patches.replace(loop, "_store_dataloader_outputs", functools.partial(self._end_evaluation, loop))
        connector = trainer._signal_connector
        patches.replace(connector, "_sigterm_notifier_fn", _do_nothing)  # the watch reads signals from its pipe
        patches.replace(connector, "register_signal_handlers", self._register_signal_handlers)
        _adopt_children(trainer.strategy.launcher, trainer.global_rank)
        self._read_signals(hangs)
        hangs.start()
        self.watch.start()

    @contextmanager
    def making_groups(self) -> Iterator[None]:
        """Guard the creation of process groups, for which ranks that have joined need seconds. Collective.

        A rank that has not arrived, or not finished, after `TimeoutConfig.groups_seconds` fails the job. At the end
        ranks exchange facts about their processes, so that one can report where all are.
        """
        hangs = self.watch.hangs
        assert hangs is not None
        limit = threading.Timer(self._limits.groups_seconds, self._miss_groups, [hangs])
        limit.daemon = True
        self.store.set(f"place/{self.watch.rank}", json.dumps(asdict(hangs.place)))
        limit.start()
        try:
            yield
            hangs.places = all_gather_object(hangs.place)
        finally:
            limit.cancel()

    def _miss_groups(self, hangs: HangWatch) -> None:
        """End the job from another thread; the report names the rank that hangs, once all have answered."""
        keys = [f"place/{rank}" for rank in range(self._trainer.world_size)]
        missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
        if not missing:
            found = zip(keys, self.store.multi_get(keys), strict=True)
            hangs.places = [Place(**value_of(key, content, Place.is_valid)) for key, content in found]
        what = f"{ranks_in_words(missing)} did not come to make" if missing else "ranks did not make their"
        self.watch.report(
            LateError(
                f"{what} process groups within TimeoutConfig.groups_seconds={self._limits.groups_seconds:g} s after "
                "all had met: a process hangs, or the network between their hosts is down"
            )
        )

    def exit_message(self) -> str:
        """Return why a fit ended, how it goes on, and where reports are. Local.

        It is empty where a fit fails before its first step, and where another rank says it. The lowest rank that is
        left does, and the one that wrote a report.
        """
        failure, hangs = self.watch.failure, self.watch.hangs
        assert hangs is not None
        rank, reports, step = self.watch.rank, hangs.reports, self._trainer.global_step
        is_told_here = rank == 0 or (failure is not None and failure.is_told_by(rank)) or hangs.has_written
        has_begun = failure is None or step > 0 or len(reports) > 0
        if not (self._trainer.state.fn == TrainerFn.FITTING and is_told_here and has_begun):
            return ""
        return exit_message(step, self._saves.last, "" if failure is None else str(failure), reports)

    def __deepcopy__(self, memo: dict[int, Any]) -> Shutdown:
        """Return this object: there is one for a run, which copies of its Trainer share."""
        return self

    def close(self) -> None:
        """End the watch when the run's patches are undone. It raises the errors of `RankWatch.close`."""
        try:
            self.watch.close()
        finally:
            if self.watch.hangs is not None:
                self.watch.hangs.close()
            self._stop_reading_signals()
            if not self.watch.ended_normally:
                end_children_at_exit(None, self.watch.rank, self._limits.shutdown_seconds)

    def _run_fit_loop(self) -> None:
        loop = self._trainer.fit_loop
        try:
            self._agree_on_early_stop()
            type(loop).run(loop)
        except BaseException as error:
            self.watch.report(error)
            raise

    def _call_and_agree(self, name: str) -> None:
        loop = self._trainer.fit_loop
        getattr(type(loop), name)(loop)
        self._agree_on_early_stop()

    def _agree_on_early_stop(self) -> None:
        self._trainer.should_stop = self.watch.acts_here(EARLY_STOP, self._trainer.should_stop)

    def _should_validate(self, data_fetcher: _DataFetcher) -> bool:
        """Return whether all ranks validate after this batch, for which Lightning asks each rank's clock."""
        loop = self._trainer.fit_loop.epoch_loop
        return self.watch.acts_here(VALIDATION, type(loop)._should_check_val_fx(loop, data_fetcher))

    def _setup_train_data(self) -> None:
        trainer, loop = self._trainer, self._trainer.fit_loop
        before = loop._data_fetcher
        type(loop).setup_data(loop)
        if loop._data_fetcher is before:  # the loaders of the epoch before go on
            return
        counts = all_gather_object(-1 if loop.max_batches == float("inf") else int(loop.max_batches))
        least, most = min(counts), max(counts)
        if least != most:
            raise ConfigError(
                f"rank {counts.index(least)} has {least} training batches and rank {counts.index(most)} has {most} "
                f"(use_distributed_sampler={trainer._accelerator_connector.use_distributed_sampler}); {SAME_NUMBER}"
            )

    def _end_train_step(self, data_fetcher: _DataFetcher) -> None:
        loop = self._trainer.fit_loop.epoch_loop
        with self._saving_for_requeue():
            self.watch.end_train_step(is_last=self._trainer.is_last_batch)
        self._agree_on_early_stop()
        type(loop).on_advance_end(loop, data_fetcher)  # validates
        self._agree_on_early_stop()

    def _end_evaluation(self, loop: _EvaluationLoop) -> None:
        catch_up(loop)
        with self._saving_for_requeue():
            self.watch.end_evaluation()
        _check_reduced_names(loop._results)
        type(loop)._store_dataloader_outputs(loop)

    def _begin_train_batch(self) -> None:
        with self._saving_for_requeue():
            self.watch.begin_train_batch()

    def begin_evaluation_batch(self) -> None:
        """Call `RankWatch.begin_evaluation_batch`."""
        with self._saving_for_requeue():
            self.watch.begin_evaluation_batch()

    @contextmanager
    def _saving_for_requeue(self) -> Iterator[None]:
        """Save for a requeue outside of the signal's handler: Lightning's would save in the middle of collectives."""
        try:
            yield
        except SIGTERMException as stop:
            signum, connector = self.watch.requeue_signal, self._trainer._signal_connector
            if signum is not None and stop.code == 128 + signum and self._trainer.state.fn == TrainerFn.FITTING:
                self._saves.are_urgent = True
                type(connector)._slurm_sigusr_handler_fn(connector, signum, None)  # type: ignore[arg-type]
            raise

    def _register_signal_handlers(self) -> None:
        connector = self._trainer._signal_connector
        environment = self._trainer._accelerator_connector.cluster_environment
        if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
            self.watch.requeue_signal = environment.requeue_signal or signal.SIGUSR1
            check_report_signal(self._limits.report_signal, self.watch.requeue_signal)
            self.watch.is_inside_of_window = lambda: self._saves.is_inside_of_window
            self._patches.replace(connector, "_slurm_sigusr_handler_fn", _do_nothing)  # the watch reads that, too
        type(connector).register_signal_handlers(connector)  # for SIGTERM
        if self._put_back is not None:  # Lightning would put back ours, which it has found
            number, before = self._put_back
            connector._original_handlers[signal.Signals(number)] = before
        is_main = threading.current_thread() is threading.main_thread()
        # Ignored: so shells start what a script runs beside itself.
        if is_main and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._on_interrupt)  # Lightning puts back the one before, as for SIGTERM
        self.watch.reads_stops = True

    def _read_signals(self, hangs: HangWatch) -> None:
        """Make the watch read signals; those that stop ranks are added when Lightning has registered its handlers."""
        global _with_signals
        self.watch.reads_stops = False
        if threading.current_thread() is not threading.main_thread():
            return
        if hangs.signal_number and signal.getsignal(hangs.signal_number) in (
            signal.SIG_DFL,
            signal.SIG_IGN,
            _do_nothing,
        ):
            self._put_back = hangs.signal_number, signal.signal(hangs.signal_number, _do_nothing)
            hangs.register_signal()
        elif hangs.signal_number:
            logger.warning(
                "%s has a handler of another's, and asks for no report: set TimeoutConfig.report_signal to another one",
                signal.Signals(hangs.signal_number).name,
            )
        self._wakeup_before = signal.set_wakeup_fd(self.watch.signal_pipe, warn_on_full_buffer=False)
        self._with_signals_before, _with_signals = _with_signals, self  # of a Trainer that this one runs inside of

    def _stop_reading_signals(self) -> None:
        global _with_signals
        if _with_signals is self:
            signal.set_wakeup_fd(self._wakeup_before)
            if self._put_back is not None:
                signal.signal(*self._put_back)
            _with_signals = self._with_signals_before

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._interrupted:
            signal.default_int_handler(number, frame)
        self._interrupted = True

    def _stop_exception(self, number: int) -> BaseException:
        if number == signal.SIGINT:
            return KeyboardInterrupt()
        self._trainer._signal_connector.received_sigterm = True
        return SIGTERMException(128 + number)  # as an exit code: a SystemExit without one would exit with 0


class _Reporter(L.Callback):
    def __init__(self, watch: RankWatch, patches: Patches) -> None:
        self._watch = watch
        self._patches = patches

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._watch.begin_epoch()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._watch.end_epoch()  # if it ended otherwise than after the last batch

    def on_predict_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        catch_up(trainer.predict_loop)
        self._watch.end_evaluation()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._watch.report(exception)
        if self._watch.failure is not None:
            refuse_saves(self._patches, trainer)  # ranks are at different places, and some will not come


def check_report_signal(report_signal: str | None, requeue_signal: int) -> None:
    """Refuse a report signal that also requeues a job of SLURM. Local.

    Args:
        report_signal: `TimeoutConfig.report_signal`.
        requeue_signal: The requeue signal.

    Raises:
        ConfigError: One signal has both uses.
    """
    if report_signal == signal.Signals(requeue_signal).name:
        raise ConfigError(
            f"TimeoutConfig.report_signal={report_signal!r} also requeues the job in SLURM: choose another signal, or "
            "another requeue_signal of SLURMEnvironment"
        )


def hang_watch(trainer: L.Trainer, limits: Limits) -> HangWatch:
    """Make the object that reports where ranks are, in a directory that this rank can write. Local.

    Args:
        trainer: Trainer of the run.
        limits: Whether to log the directory and the signal.
    """
    root = str(limits.report_directory or trainer.default_root_dir)
    directory = Path(root)
    there = next(each for each in (directory.absolute(), *directory.absolute().parents) if each.exists())
    if "://" in root or not (there.is_dir() and os.access(there, os.W_OK)):
        logger.warning(
            "reports of hangs cannot be written to %s, but to %s: set TimeoutConfig.report_directory",
            root,
            tempfile.gettempdir(),
        )
        directory = Path(tempfile.gettempdir())
    number = 0 if limits.report_signal is None else signal.Signals[limits.report_signal]
    several = trainer.num_nodes > 1
    return HangWatch(trainer.global_rank, limits.init_seconds, directory, several_nodes=several, signal_number=number)


def _do_nothing(signum: int, frame: FrameType | None) -> None:
    pass


def _check_reduced_names(results: _ResultCollection) -> None:
    """Check names before Lightning reduces logged values one by one: different names would make ranks hang."""
    names = sorted(k for k, m in results.items() if m.meta.on_epoch and (m.meta.sync.should or not m.is_tensor))
    gathered = all_gather_object(names)
    for rank, others in enumerate(gathered):
        if others != gathered[0]:
            raise RankError(
                f"rank 0 logged {gathered[0]} in evaluation, but rank {rank} logged {others}. Log the same names on "
                "every rank and give every rank at least one batch"
            )


def tell_end(error: BaseException, step: int, saved: Saved | None, shutdown: Shutdown | None) -> None:
    """Say how a fit ended that did not end by itself, and how it goes on. Local.

    Args:
        error: What ends it.
        step: Optimizer steps that were done.
        saved: The last checkpoint.
        shutdown: The shutdown of several processes.
    """
    if isinstance(error, KeyboardInterrupt | SIGTERMException):
        rank_zero_info(exit_message(step, saved) if shutdown is None else shutdown.exit_message())
    elif shutdown is None and step > 0:
        say(exit_message(step, saved, Failure.of(0, error).summary))
    elif shutdown is not None and (text := shutdown.exit_message()):
        say(f"[rank {shutdown.watch.rank}] {text}")


def end_children_at_exit(launcher: _Launcher | None, rank: int, shutdown_seconds: float) -> None:
    """Wait at exit, after a failure, for the ranks that this process launched, and kill those that do not end."""
    _adopt_children(launcher, rank)
    if _children:
        atexit.register(end_processes, [process for _, process in _children], shutdown_seconds)


def _adopt_children(launcher: _Launcher | None, rank: int) -> None:
    """Take over the ranks that this one launched from Lightning's launcher.

    Its observer would kill this process without a message, up to 5 seconds after the first of them ends. An empty list
    ends the observer.
    """
    processes = getattr(launcher, "procs", None)
    if isinstance(launcher, _SubprocessScriptLauncher) and processes is not None:
        _children.extend(enumerate(processes, start=rank + 1))
        processes.clear()


def _forget_signals() -> None:
    """Reset signals in a forked process, such as a dataloader's worker, where they must not affect the ranks."""
    global _with_signals
    if _with_signals is not None:
        _with_signals = None
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; a worker goes on until it is asked to stop


os.register_at_fork(after_in_child=_forget_signals)
