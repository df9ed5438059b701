"""Stops of one process, and how a run that was stopped goes on. Several processes stop together, see `shutdown.py`."""

from __future__ import annotations

import os
import shlex
import signal
import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NamedTuple

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_d9d.errors import ConfigError
from lightning_d9d.loop.patches import Patches

_ASKED = b"\nCtrl-C: training stops before the next batch; once more stops it at once, without saving\n"


class Interruption:
    """Lets Ctrl-C stop the fit of one process before a batch, where a checkpoint can be saved.

    Inside of an accumulation window it waits for its end. A second Ctrl-C raises KeyboardInterrupt at once, and
    callbacks do not save what is half a step. A handler of the user's own stays.

    Args:
        patches: Those of the run.
        trainer: One that is going to fit, before Lightning registers its own handlers of signals.
        window_is_open: Whether there are gradients for which no step was taken.
    """

    def __init__(self, patches: Patches, trainer: L.Trainer, window_is_open: Callable[[], bool]) -> None:
        self._patches = patches
        self._trainer = trainer
        self._window_is_open = window_is_open
        self._asked = False
        self._process = os.getpid()
        patches.replace(trainer._signal_connector, "register_signal_handlers", self._register_signal_handlers)
        patches.replace(trainer.fit_loop.epoch_loop, "advance", self._advance)

    def __deepcopy__(self, memo: dict[int, Any]) -> Interruption:
        """Return this object: there is one for a run, which copies of its Trainer share."""
        return self

    def check(self) -> None:
        """Raise KeyboardInterrupt if it was asked for."""
        if self._asked:
            raise KeyboardInterrupt

    def _register_signal_handlers(self) -> None:
        connector = self._trainer._signal_connector
        type(connector).register_signal_handlers(connector)  # for SIGTERM; it puts back what it finds, SIGINT's as well
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a dataloader's worker goes on until it is asked to stop
            return
        if self._asked:
            refuse_saves(self._patches, self._trainer)
            signal.default_int_handler(number, frame)
        self._asked = True
        os.write(2, _ASKED)  # sys.stderr may be in the middle of another text

    def _advance(self, data_fetcher: Any) -> None:
        if not self._window_is_open():
            self.check()
        loop = self._trainer.fit_loop.epoch_loop
        type(loop).advance(loop, data_fetcher)


def set_exit_code(error: BaseException) -> None:
    """Give a stop by SIGTERM its exit code: Lightning's has none, so that the process would exit with 0. Local."""
    if isinstance(error, SIGTERMException) and error.code is None:
        error.code = 128 + signal.SIGTERM


def refuse_saves(patches: Patches, trainer: L.Trainer) -> None:
    """Let the Trainer's callbacks save nothing because of an exception: a run could not resume from there. Local."""
    for callback in trainer.checkpoint_callbacks:
        patches.replace(callback, "on_exception", _save_nothing)


def _save_nothing(*_: Any) -> None:
    pass


class Saved(NamedTuple):
    """A checkpoint from which a run can resume."""

    path: str
    step: int | None
    """The number of optimizer steps in it; None if it was loaded by this run."""


def exit_message(step: int, saved: Saved | None, failure: str = "", reports: Sequence[str] = ()) -> str:
    """Return what a user wants to know of a fit that did not end by itself: why, and how to resume.

    Args:
        step: Optimizer steps that were done.
        saved: The last checkpoint.
        failure: The error; empty where the fit was stopped.
        reports: Paths of reports about this run.
    """
    lines = [_resume_advice(step, saved, has_failed=failure != "")]
    lines += [f"Error: {failure}"] if failure else []
    lines += [f"Reports: {', '.join(reports)}"] if reports else []
    return "\n".join(lines)


def _resume_advice(step: int, saved: Saved | None, *, has_failed: bool) -> str:
    ended = f"{'Failed' if has_failed else 'Stopped'} after step {step}"
    advice = "to save where a run is stopped, give ModelCheckpoint save_on_exception: true"
    if has_failed:
        advice = "to lose less, give ModelCheckpoint every_n_train_steps"
    is_url = saved is not None and "://" in saved.path
    if saved is None or not (is_url or Path(saved.path).exists()):  # a tuner removes its own
        return f"{ended}; nothing was saved ({advice})."
    is_below = not is_url and Path(saved.path).absolute().is_relative_to(Path.cwd())
    path = shlex.quote(os.path.relpath(saved.path) if is_below else saved.path)
    if saved.step == step:
        place = f"{ended}, saved in {path}."
    else:
        when = "from which this run went on" if saved.step is None else f"of step {saved.step}"
        place = f"{ended}; the last checkpoint is {path}, {when} ({advice})."
    return f"{place} To go on: the same command with --ckpt_path {path}, or Trainer.fit(..., ckpt_path={path!r})"


def last_checkpoint(trainer: L.Trainer, wanted: Literal["last", "auto"], command: str) -> str | None:
    """Return the checkpoint that `--ckpt_path last` or `--ckpt_path auto` means; None if a fit begins without. Local.

    Args:
        trainer: With the callbacks that save.
        wanted: "auto" lets a fit begin where there is none.
        command: Such as "fit".

    Raises:
        ConfigError: There is none.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's, that there is none
        found: Any = trainer._checkpoint_connector._parse_ckpt_path(TrainerFn.FITTING, "last", True, True)
    if found is not None or (wanted == "auto" and command == "fit"):
        return found
    savers = [each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]
    folders = [str(each.dirpath) for each in savers if each.dirpath is not None]
    where = f"no last*.ckpt is in {', '.join(folders)}" if folders else "no ModelCheckpoint has a dirpath to look in"
    saves_last = any(each.save_last or (each.filename or "").startswith("last") for each in savers)
    remedies = [] if saves_last else ["let a ModelCheckpoint have save_last: true"]
    remedies += ["give the path of a checkpoint"]
    remedies += ["begin without one by --ckpt_path auto"] if command == "fit" else []
    raise ConfigError(f"--ckpt_path {wanted}: {where}; {', or '.join(remedies)}")
