"""Calls loggers in separate threads, so that one that fails or hangs neither ends nor stalls a fit."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Any

import lightning as L
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.loggers import Logger

from lightning_d9d.loop.patches import Patches

_RETRY_SECONDS = (0.1, 1.0)
"""Seconds before a failed call is repeated; after the last repetition it is lost."""
_MOST_CALLS = 10_000
"""Maximum number of calls that may wait for a logger. Further calls are lost."""
_CALLED = ("log_metrics", "log_hyperparams", "save")

_Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class LoggerThread:
    """Makes the calls of one logger, in order. All methods are local, and only `drain` waits.

    Args:
        name: Name of the logger, for messages.
        hang_seconds: Seconds after which a call is reported.
    """

    def __init__(self, name: str, hang_seconds: float) -> None:
        self.name = name
        self.hang_seconds = hang_seconds
        self.num_lost = 0
        self._calls: queue.Queue[_Call | None] = queue.Queue()
        self._since: float | None = None  # when the call that runs was begun
        self._ends = threading.Event()
        self._has_said = {"fails": False, "hangs": False}
        self._thread = threading.Thread(target=self._run, name=f"logger {name}", daemon=True)
        self._thread.start()

    def call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Make a call when earlier calls are done."""
        since = self._since
        if since is not None and monotonic() - since > self.hang_seconds:
            self._say("hangs", f"has hung for {monotonic() - since:.0f} s in a call")
        if self._calls.qsize() >= _MOST_CALLS:
            self.num_lost += 1
        else:
            self._calls.put((method, args, kwargs))

    def drain(self, seconds: float) -> bool:
        """Wait until all calls are made, and end the thread. Return False if it takes longer than `seconds`."""
        self._ends.set()
        self._calls.put(None)
        self._thread.join(seconds)
        left = self._calls.qsize() if self._thread.is_alive() else 0
        if left + self.num_lost > 0:
            rank_zero_warn(f"{self.name} has lost {left + self.num_lost} calls of this fit; other loggers have theirs")
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            self._since = monotonic()
            self._make(*call)
            self._since = None

    def _make(self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for wait in (*_RETRY_SECONDS, None):
            try:
                method(*args, **kwargs)
            except Exception as error:
                self._say("fails", f"failed with {type(error).__name__}: {error}")
                if wait is None:
                    self.num_lost += 1
                else:
                    self._ends.wait(wait)
            else:
                return

    def _say(self, what: str, text: str) -> None:
        if not self._has_said[what]:
            self._has_said[what] = True
            rank_zero_warn(
                f"{self.name} {text}. Training goes on, and the logger is tried again; further cases are not reported"
            )


def call_in_threads(patches: Patches, trainer: L.Trainer, hang_seconds: float) -> None:
    """Make the loggers of a Trainer work in threads until each is finalized. Local.

    Args:
        patches: Trainer of the fit.
        trainer: The Trainer, whose loggers may have been used before.
        hang_seconds: Seconds after which a call is reported; the end of the fit waits at most this long for each
            logger.
    """
    for logger in trainer.loggers:
        thread = LoggerThread(type(logger).__name__, hang_seconds)
        for name in _CALLED:
            patches.replace(logger, name, partial(thread.call, getattr(logger, name)))
        patches.replace(logger, "finalize", partial(_finalize, thread, logger, logger.finalize))


def _finalize(thread: LoggerThread, logger: Logger, finalize: Callable[[str], None], status: str) -> None:
    """Finalize a logger after its other calls, and call it directly again from then on."""
    thread.call(finalize, status)
    if thread.drain(thread.hang_seconds):
        for name in (*_CALLED, "finalize"):
            vars(logger).pop(name, None)
