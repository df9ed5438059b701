"""`ProgressLines` logs lines of progress, for log files and terminals without a progress bar."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta
from time import perf_counter
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from lightning_d9d.loop.display import readable, say
from lightning_d9d.loop.progress import is_watched

_LATE = ("train_loss", "speed/tokens_per_s")
"""Values that may be on a device."""


@dataclass(frozen=True)
class _Line:
    """A line that waits for values from a device."""

    begin: str
    late: dict[str, Tensor]
    """The late values on the host, once the device has computed them."""
    values: dict[str, float]
    end: str
    copied: torch.Event | None

    def __str__(self) -> str:
        values = {name: value.item() for name, value in self.late.items()}
        values |= {name: value for name, value in self.values.items() if name not in values}
        speed = values.pop(_LATE[1], values.pop("tokens_per_s", None))
        parts = [f"{name} {readable(value)}" for name, value in values.items()]
        parts += [] if speed is None else [f"{readable(speed)} tokens/s"]
        return f"{self.begin}: {', '.join([*parts, self.end])}"


class ProgressLines(L.Callback):
    """Logs a line every `log_every_n_steps` steps of a fit if no progress bar is visible.

    Examples are `step 200 of 1000: train_loss 2.413, 12046 tokens/s, 0.341 s a step, 31.2 GiB at most, 0:04:33 left`,
    and after a validation `step 200: val_loss 2.455`. The values are `train_loss`, those logged with `prog_bar=True`,
    and the speed of `RunMetrics` if it is used. Memory is the largest number of bytes that torch has allocated on the
    GPU of rank 0. The remaining time is extrapolated from the steps since the last line, without validation.

    A bar is visible if the Trainer has one and its output (stderr) is a terminal; this callback then logs nothing. In a
    file, where each update of a bar would be a line, it replaces the Trainer's bar. Only rank 0 logs. Under
    `D9DStrategy` the host does not wait for the device, so a line is about one step late.
    """

    def __init__(self) -> None:
        self._is_on = False
        self._hidden: ProgressBar | None = None
        self._of_validation: set[str] = set()
        """Names that a validation logs for the bar."""
        self._before_validation: dict[str, float] = {}
        self._total = math.inf
        self._is_due = False
        self._waiting: _Line | None = None
        self._begin(0)

    def _begin(self, step: int) -> None:
        self._step, self._seconds, self._since = step, 0.0, perf_counter()

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Hide a bar that is not visible. Local."""
        self._is_on = stage == "fit" and trainer.is_global_zero and not is_watched(trainer)
        bar = trainer.progress_bar_callback
        if self._is_on and bar is not None:
            bar.disable()
            self._hidden = bar

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin to count steps and time. Local."""
        total = trainer.estimated_stepping_batches
        self._total = total if total > 0 else math.inf
        self._is_due, self._waiting = False, None
        self._begin(trainer.global_step)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Take the values of the step before, when all have been logged. Local."""
        self._take(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the pending line if its values have arrived, and check whether this step gets a line. Local."""
        self._flush(trainer)
        step, every = trainer.global_step, trainer.log_every_n_steps  # type: ignore[attr-defined]
        self._is_due = self._is_on and step > self._step and every > 0 and step % every == 0

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop the clock. Local."""
        self._seconds += perf_counter() - self._since
        self._since = perf_counter()
        self._take(trainer, pl_module)
        self._before_validation = dict(_shown(trainer))

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the values that the validation has logged for the bar. Local."""
        self._since = perf_counter()
        if not self._is_on or trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking:
            return
        before, now = self._before_validation, _shown(trainer)
        self._of_validation |= {name for name in now if name not in before or now[name] != before[name]}
        if self._of_validation:
            self._flush(trainer, waits=True)
            values = [f"{name} {readable(now[name])}" for name in sorted(self._of_validation)]
            say(trainer, f"step {trainer.global_step}: {', '.join(values)}")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the last line. Local."""
        self._take(trainer, pl_module)
        self._flush(trainer, waits=True)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Restore the bar. Local."""
        self._show_bar()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Restore the bar. Local."""
        self._show_bar()

    def _show_bar(self) -> None:
        if self._hidden is not None:
            self._hidden.enable()
            self._hidden = None

    def _take(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Begin to copy the values of the last step to the host, if it has a line."""
        if not self._is_due:
            return
        self._is_due = False
        self._flush(trainer, waits=True)
        step = trainer.global_step
        seconds = (self._seconds + perf_counter() - self._since) / (step - self._step)
        self._begin(step)
        parts = [f"{seconds:.3g} s a step"]
        copied = None
        late = {name: value for name, value in _logged(trainer).items() if name in _LATE}
        if module.device.type == "cuda":
            parts.append(f"{torch.cuda.max_memory_allocated(module.device) / 2**30:.1f} GiB at most")
            late = {name: value.detach().to("cpu", non_blocking=True) for name, value in late.items()}
            copied = torch.Event(module.device)
            copied.record()
        if step < self._total < math.inf:
            parts.append(f"{timedelta(seconds=round((self._total - step) * seconds))} left")
        of_total = f" of {self._total:.0f}" if self._total < math.inf else ""
        values = {name: value for name, value in _shown(trainer).items() if name not in self._of_validation}
        self._waiting = _Line(f"step {step}{of_total}", late, values, ", ".join(parts), copied)
        self._flush(trainer)

    def _flush(self, trainer: L.Trainer, waits: bool = False) -> None:
        """Log the pending line, if its values have arrived."""
        line = self._waiting
        if line is None:
            return
        if line.copied is not None and waits:
            line.copied.synchronize()
        if line.copied is None or line.copied.query():
            self._waiting = None
            say(trainer, str(line))


def _shown(trainer: L.Trainer) -> dict[str, float]:
    """Values that were logged for the bar. The Trainer's own property computes those of an epoch, with all ranks."""
    return trainer._logger_connector._progress_bar_metrics  # type: ignore[return-value]


def _logged(trainer: L.Trainer) -> dict[str, Tensor]:
    """Return all logged values, in the same way."""
    return trainer._logger_connector._callback_metrics  # type: ignore[return-value]
