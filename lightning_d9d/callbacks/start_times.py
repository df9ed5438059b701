"""`StartTimes` prints the times of a start by part, from the beginning of the process to the end of the first step."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info

from lightning_d9d.startup import seconds_of_parts

_IMPORTED = time.perf_counter()


class StartTimes(L.Callback):
    """Prints on the first rank, after the first batch of a fit, how many seconds each part of the start took.

    `before setup` is the time since the process began: imports, the Trainer, the default process group. A later fit of
    the process does not have this line. The parts that the package measures (`mesh`, `initial weights`,
    `weights from files`, `kernels`) are on lines of their own. `model and strategy`, `first batch` and `first step` are
    the remaining time, so that all lines add up to the total. On a GPU the first step ends when the device is done.
    `kernels` is the time in which Triton compiles or reads kernels; building their launchers counts in the first step.

    Attributes:
        seconds: The seconds of each part; empty before the end of the first step. Each rank has its own.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._parts: dict[str, float] = {}
        self._at = 0.0
        self._is_done = False

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """End the time before the fit."""
        self._is_done = stage != "fit"
        is_later = bool(self.seconds)
        self.seconds = {}
        if is_later:
            self._parts, self._at = seconds_of_parts(), time.perf_counter()
        elif not self._is_done:
            self._at = time.perf_counter() - seconds_of_process()
            self._end("before setup")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """End the time of the strategy's setup and of the sanity check."""
        self._end("model and strategy")

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """End the wait for the first batch."""
        self._end("first batch")

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End the first step, and print."""
        if self._is_done:
            return
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize(pl_module.device)
        self._end("first step")
        self._is_done = True
        rank_zero_info(self.table())

    def table(self) -> str:
        """Return the seconds as lines of text."""
        rows = {**self.seconds, "total": sum(self.seconds.values())}
        return "\n".join(
            ["start                    s", *(f"{name:<20}{seconds:6.1f}" for name, seconds in rows.items())]
        )

    def _end(self, name: str) -> None:
        """End an interval, and subtract the parts that were measured in it."""
        if self._is_done:
            return
        now, parts = time.perf_counter(), seconds_of_parts()
        new = {each: seconds - self._parts.get(each, 0.0) for each, seconds in parts.items()}
        self.seconds[name] = max(0.0, now - self._at - sum(new.values()))
        for each, seconds in new.items():
            if seconds:
                self.seconds[each] = self.seconds.get(each, 0.0) + seconds
        self._parts, self._at = parts, now


def seconds_of_process() -> float:
    """Return how long ago this process began, or this module was imported if the system does not tell."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return time.perf_counter() - _IMPORTED
