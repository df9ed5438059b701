"""`Stragglers`: names a rank for which the others wait, and draws what each rank did over time.

[Note: times by the store] Numbers of ranks could travel with the report of a batch, as those of `RunMetrics` do. But
only batches of a `D9DModule` have one, and ranks of plain modules are compared, too. Such a row is in the memory of the
device, and would make it as large as the job: 192 numbers of each rank. The job's store is there for both kinds, takes
nothing of the device, and rank 0 alone reads it.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from time import thread_time
from typing import Any

import lightning as L

from lightning_d9d.callbacks.export import make_folder
from lightning_d9d.coordination.messages import value_of
from lightning_d9d.coordination.stragglers import ALL_PARTS, NUM_BLOCKS, Comparison, Straggler, Times, of_block
from lightning_d9d.errors import ConfigError
from lightning_d9d.log import logger
from lightning_d9d.loop.uneven import data_processor_seconds, data_wait_seconds
from lightning_d9d.mesh import Axis
from lightning_d9d.metrics.wait_clock import WaitClock, moment
from lightning_d9d.pictures import write_picture
from lightning_d9d.waits import observed_by


class Stragglers(L.Callback):
    """Names a rank of a fit under `D9DStrategy` that is slower than those that do the same work.

    Every `every_n_steps` batches each rank leaves its times in the job's store: what it computed, how long it waited
    for data, and for other ranks. Rank 0 reads them a batch or so later, compares the ranks of equal pipeline stages,
    and logs a line. It needs neither a collective nor a wait for the device. A rank is named by two reports in a row:
    see `lightning_d9d.coordination.stragglers.Comparison`. Single steps that are far too long do not count. All ranks
    must have the callback.

    Where the CPU computes, computing is the processor time of the thread that trains. On Linux, time in which other
    programs have the processor counts for no rank. Measured waits for others are those for gradients, norms, messages
    of a pipeline, experts, and values that are summed. The waits of a fully sharded model inside torch count as a
    rank's own: its ranks look alike.

    Args:
        every_n_steps: Batches of a report, a multiple of 48. A report must last longer than what disturbs a rank.
        threshold: A rank must be slower by this share of what the others do by themselves in a step.
        path: A picture of all reports, written by rank 0 when the fit ends: .png, .svg (matplotlib) or .html (plotly).

    Attributes:
        found: Of each report, on rank 0, the ranks that it names.
        reports: Of each report, on rank 0, the times of all ranks.

    Raises:
        ConfigError: A bad value, one process, or no two ranks that do the same work.
    """

    def __init__(self, every_n_steps: int = 96, threshold: float = 0.1, path: str | Path | None = None) -> None:
        if every_n_steps < NUM_BLOCKS or every_n_steps % NUM_BLOCKS:
            raise ConfigError(f"Stragglers(every_n_steps={every_n_steps}) must be a multiple of {NUM_BLOCKS}")
        if not threshold > 0:
            raise ConfigError(f"Stragglers(threshold={threshold}) must be greater than 0")
        if path is not None and Path(path).suffix not in (".png", ".svg", ".html"):
            raise ConfigError(f"Stragglers(path={str(path)!r}) must end in .png, .svg or .html")
        self.every_n_steps = every_n_steps
        self.path = None if path is None else Path(path)
        self.found: list[list[Straggler]] = []
        self.reports: list[list[Times]] = []
        self._comparison = Comparison(threshold)
        self._steps: list[tuple[float, ...]] = []
        self._since: tuple[float, ...] | None = None
        self._number = 0
        self._waits: WaitClock | None = None
        self._observed = ExitStack()

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse a run in which there is nothing to compare, and a picture that cannot be written."""
        if stage != "fit":
            return
        ranks = getattr(trainer.strategy, "ranks", None)
        if ranks is None or ranks.world_size == ranks.size(Axis.PP):
            raise ConfigError(
                "Stragglers compares ranks of D9DStrategy that hold the same stages, which this run has not: leave the "
                "callback out"
            )
        if self.path is not None:
            make_folder(trainer, self.path.parent, f"Stragglers(path={str(self.path)!r})")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin to measure."""
        self._steps, self._since, self._number = [], None, 0
        self._waits = WaitClock(trainer.strategy.root_device)
        self._observed.enter_context(observed_by(self._waits))

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Leave out the step that a validation interrupts."""
        self._since = None

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Take the times of a batch; every `every_n_steps` leave them to rank 0. Local. [Note: times by the store]."""
        assert self._waits is not None
        now = self._now(trainer, self._waits)
        if self._since is not None:
            step = [after - before for after, before in zip(now, self._since, strict=True)]
            self._steps.append(_parts(*step, on_cuda=trainer.strategy.root_device.type == "cuda"))
        self._since = now
        store = trainer.strategy.shutdown.store  # type: ignore[attr-defined]  # of `D9DStrategy` on several ranks
        with suppress(RuntimeError):  # the store has gone: the ranks hear of it otherwise
            if len(self._steps) == self.every_n_steps:
                store.set(f"times/{self._number}/{trainer.global_rank}", json.dumps(asdict(self._times(trainer))))
                self._steps.clear()
                self._number += 1
            if trainer.is_global_zero:
                self._read(store, trainer.world_size)

    def _now(self, trainer: L.Trainer, waits: WaitClock) -> tuple[float, ...]:
        """Return the sums until now of what `_parts` takes of a step."""
        (time, queued), used = moment(), thread_time()
        queue, used = queued - waits.queued, used - waits.used - data_processor_seconds(trainer)
        return time, data_wait_seconds(trainer), waits.seconds, queue, used

    def _times(self, trainer: L.Trainer) -> Times:
        size = self.every_n_steps // NUM_BLOCKS
        blocks = [self._steps[begin : begin + size] for begin in range(0, self.every_n_steps, size)]
        parts = [[of_block([step[part] for step in block]) for block in blocks] for part in range(len(ALL_PARTS))]
        ranks: Any = trainer.strategy.ranks  # type: ignore[attr-defined]
        stage = ranks.mesh.coordinates[Axis.PP] if ranks.size(Axis.PP) > 1 else 0
        return Times(socket.gethostname(), stage, *parts)

    def _read(self, store: Any, num_ranks: int) -> None:
        """Read the next report if all ranks have left their times."""
        number = len(self.reports)
        keys = [f"times/{number}/{rank}" for rank in range(num_ranks)]
        if number == self._number or not store.check(keys):
            return
        found = zip(keys, store.multi_get(keys), strict=True)
        report = [Times(**value_of(key, content, Times.is_valid)) for key, content in found]
        for key in keys:
            store.delete_key(key)
        self.reports.append(report)
        slow, before = self._comparison.add(report), self.found[-1] if self.found else []
        self.found.append(slow)
        for each in slow:
            if (each.rank, each.part) not in {(other.rank, other.part) for other in before}:
                logger.warning("batches up to %d: %s", (number + 1) * self.every_n_steps, each)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop measuring, and draw on rank 0."""
        self._observed.close()
        if trainer.is_global_zero and self.path is not None and self.reports:
            write_picture(self.path, self._draw_image, self._draw_page)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Stop measuring."""
        self._observed.close()

    def _rows(self) -> list[tuple[str, Sequence[Sequence[float]]]]:
        """Return of each part its name, and milliseconds of a step by rank and report."""
        ranks = range(len(self.reports[0]))
        return [
            (part, [[1000 * report[rank].mean(part) for report in self.reports] for rank in ranks])
            for part in ALL_PARTS
        ]

    def _draw_image(self, path: Path) -> None:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 11), layout="constrained")
        ends = [(number + 1) * self.every_n_steps for number in range(len(self.reports))]
        panels = figure.subplots(len(ALL_PARTS), sharex=True)
        for axes, (part, rows) in zip(panels, self._rows(), strict=True):
            for rank, row in enumerate(rows):
                axes.plot(ends, row, marker=".", label=f"rank {rank}")
            axes.set(ylabel=f"{part} (ms a step)", ylim=(0, None))
        panels[-1].set(xlabel="batch")
        figure.legend(*panels[-1].get_legend_handles_labels(), loc="outside right upper")
        figure.savefig(path, dpi=120)

    def _draw_page(self, path: Path) -> None:
        import plotly.graph_objects as go
        from plotly.subplots import make_subplots

        parts = self._rows()
        figure = make_subplots(len(parts), 1, shared_xaxes=True, y_title="ms a step", x_title="batch")
        ends = [(number + 1) * self.every_n_steps for number in range(len(self.reports))]
        for index, (part, rows) in enumerate(parts, start=1):
            for rank, row in enumerate(rows):
                figure.add_trace(go.Scatter(x=ends, y=row, name=f"{part}, rank {rank}"), row=index, col=1)
        figure.write_html(path)


def _parts(whole: float, data: float, link: float, queue: float, used: float, *, on_cuda: bool) -> tuple[float, ...]:
    """Return the seconds of a step in the order of `ALL_PARTS`.

    A step of the host has many waits that nobody asked for, such as for another thread of the process that holds the
    interpreter. On a busy host they are longer than the differences of ranks, and hide these. Processor time does not
    have them.

    Args:
        whole: The step.
        data: The wait for a batch.
        link: The wait for other ranks.
        queue: The wait for a processor, outside of that.
        used: Processor time outside of both waits.
        on_cuda: A device computes, and goes on while the host waits for a processor.
    """
    if on_cuda:
        own = max(0.0, whole - link)
        data = min(data, own)
        return own - data, data, 0.0, link, 0.0
    rest = max(0.0, whole - link - queue - used)
    data = min(data, rest)  # some of it may have been spent in the queue
    return used, data, rest - data, link, queue
