"""`StepProfile` writes traces, tables and pictures of selected steps of a fit, and of its memory."""

from __future__ import annotations

import json
import math
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.profiler import ProfilerActivity, profile, record_function

from lightning_d9d.callbacks.export import make_local_folder
from lightning_d9d.callbacks.measured_step import MeasuredStep, executor_of
from lightning_d9d.callbacks.pipeline_timeline import PipelineTimeline
from lightning_d9d.errors import ConfigError
from lightning_d9d.log import logger
from lightning_d9d.loop.display import say
from lightning_d9d.memory.snapshots import at_out_of_memory, recorded_history, write_snapshot
from lightning_d9d.mesh.agreement import Ranks
from lightning_d9d.metrics.profiled import WAIT, ProfiledSteps, profiled_steps
from lightning_d9d.pipeline.timeline import Timeline
from lightning_d9d.strategy.module import D9DModule
from lightning_d9d.strategy.strategy import D9DStrategy
from lightning_d9d.waits import observed_by

Memory = Literal["steps", "always", "never"]


class StepProfile(L.Callback):
    """Profiles selected steps of a fit under `D9DStrategy` on selected ranks, and writes the results in readable form.

    For steps from step 10 on it makes a folder `step_10` with these files:

    - `rank_0.trace.json.gz`: a trace for Perfetto or Chrome. Actions of the schedule have their names in the trace,
      such as `0F1` for the forward of stage 0 on microbatch 1. Batches and waits for other ranks are named, too;
    - `rank_0.md` and `rank_0.json`: the parts of a step, the operators that take longest, gaps of the device;
    - `rank_0.memory.pickle`: on a GPU the contents of its memory after these steps, and the allocations in them;
    - `timeline.png`, `.svg`, `.html` and `.json`: with several pipeline ranks the measured step before these, on the
      ranks of the first pipeline. That step is not traced. The pictures need the extra `viz`.

    If memory runs out on a rank, that rank writes `out_of_memory_rank_0.pickle`, with its own number.

    Profiled steps take longer, and so does the fit while files are written. All ranks must have the callback. A failure
    to write is reported once, and training continues.

    Args:
        directory: Is made. Directory for the folders; by default `profile` beside the checkpoints, or in the log
            directory of the run.
        first_step: The first profiled step, counted from 1; at least 2, because the first step builds caches and
            kernels.
        last_step: The last profiled step; by default the first. A trace has some megabytes for each step.
        every_n_steps: Profile as many steps again after each such number of steps; None profiles once.
        ranks: Ranks that are profiled, or "all".
        memory: With "steps", allocations are recorded in profiled steps. With "always" they are recorded from the
            beginning of the fit: a snapshot of memory that runs out then names all lines. With "never" no snapshot is
            written.

    Attributes:
        profiled: The last result on a rank that is profiled; otherwise None.
        measured: The last drawn step, with several pipeline ranks; otherwise None.

    Raises:
        ConfigError: A value is out of range. At the start of a fit: the strategy is another one, the run has no such
            rank or step, or there is another profiler. The directory cannot be written.
    """

    def __init__(
        self,
        directory: str | Path | None = None,
        first_step: int = 10,
        last_step: int | None = None,
        every_n_steps: int | None = None,
        ranks: Sequence[int] | Literal["all"] = (0,),
        memory: Memory = "steps",
    ) -> None:
        last_step = first_step if last_step is None else last_step
        if first_step < 2:
            raise ConfigError(f"StepProfile(first_step={first_step}) must be at least 2: StartTimes measures the first")
        if last_step < first_step:
            raise ConfigError(f"StepProfile(last_step={last_step}) must not be before first_step={first_step}")
        num_steps = last_step + 1 - first_step
        if every_n_steps is not None and every_n_steps <= num_steps:
            raise ConfigError(
                f"StepProfile(every_n_steps={every_n_steps}) must be more than the {num_steps} profiled steps"
            )
        if ranks != "all" and (isinstance(ranks, str) or not ranks or min(ranks) < 0):
            raise ConfigError(f"StepProfile(ranks={ranks!r}) must be ranks, such as [0, 1], or 'all'")
        if memory not in ("steps", "always", "never"):
            raise ConfigError(f"StepProfile(memory={memory!r}) must be 'steps', 'always' or 'never'")
        self.directory = None if directory is None else _local(directory)
        self.first_step, self.last_step, self.every_n_steps = first_step, last_step, every_n_steps
        self.ranks: Sequence[int] | None = None if isinstance(ranks, str) else list(ranks)
        """The profiled ranks; None for all."""
        self.memory: Memory = memory
        self.profiled: ProfiledSteps | None = None
        self.measured: MeasuredStep | None = None
        self._folder = Path()
        self._trace: _Trace | None = None
        self._timeline: Timeline | None = None
        self._drawn_step = 0
        self._is_to_draw = False
        self._has_failed = False
        self._watching = ExitStack()
        self._snapshot: Path | None = None
        """The path of the snapshot of memory that ran out."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse a run that cannot be profiled or written; begin to watch memory. Collective over all ranks.

        Raises:
            ConfigError: The run does not have a requested rank or step, or nothing can be written; on every rank.
        """
        if stage != "fit":
            return
        if not isinstance(trainer.strategy, D9DStrategy):
            raise ConfigError(
                f"StepProfile needs D9DStrategy, but the Trainer has {type(trainer.strategy).__name__}; leave the "
                "callback out"
            )
        self._refuse_others(trainer)
        unknown = [rank for rank in self.ranks or () if rank >= trainer.world_size]
        if unknown:
            raise ConfigError(
                f"StepProfile(ranks={self.ranks}): the run has the ranks 0 to {trainer.world_size - 1}; leave out "
                f"{', '.join(map(str, unknown))}"
            )
        if trainer.max_steps != -1:
            self._refuse_steps_past(trainer.max_steps)
        on_cuda = trainer.strategy.root_device.type == "cuda"
        if self.memory == "always" and not on_cuda:
            raise ConfigError("StepProfile(memory='always') needs a GPU: leave memory out")
        self._folder = self._place(trainer)
        with Ranks().agreed("the fit cannot begin"):
            if trainer.is_global_zero or self._is_chosen(trainer):
                make_local_folder(self._folder, f"StepProfile(directory={str(self._folder)!r})")
        self.profiled = self.measured = self._snapshot = None
        self._has_failed, self._is_to_draw, self._drawn_step = False, False, 0
        if on_cuda and self.memory != "never":
            self._watch_memory(self._folder / f"out_of_memory_rank_{trainer.global_rank}.pickle")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Refuse steps past the end. Collective over all ranks.

        Raises:
            ConfigError: The run ends before the last profiled step; on every rank.
        """
        self._refuse_steps_past(max(Ranks().all_gather(_last_step(trainer))))
        if self.every_n_steps is None and trainer.global_step >= self.last_step:
            rank_zero_warn(
                f"StepProfile profiles nothing: this run goes on behind step {trainer.global_step}, and "
                f"last_step={self.last_step} is done"
            )

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin to measure. Collective over the pipeline before a step that is drawn, otherwise local."""
        step = trainer.global_step + 1
        if self._includes(step):
            if self._trace is None and self._is_chosen(trainer):
                self._start(trainer, step)
        elif self._includes(step + 1) and step != self._drawn_step and _has_pipeline(pl_module):
            self._drawn_step = step
            module, executor = executor_of(trainer, pl_module)
            self._timeline = executor.observer = Timeline(module.device, module.pipeline.group)
        if self._trace is not None:
            self._trace.begin_batch(f"step {step}, batch {batch_idx}")

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write the results, if the profiled steps are over.

        Collective over the pipeline after a step that is drawn.
        """
        is_over = not self._includes(trainer.global_step + 1)
        if self._trace is not None:
            self._trace.end_batch()
            if is_over:
                self._finish(trainer, pl_module)
        if is_over and trainer.global_step > self._drawn_step:
            self._draw()
        if self._timeline is not None:
            module, executor = executor_of(trainer, pl_module)
            executor.observer, timeline, self._timeline = None, self._timeline, None
            self.measured = MeasuredStep.of(timeline, module)
            self._is_to_draw = trainer.is_global_zero

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the results of a fit that ends early. Local."""
        if self._trace is not None:
            self._finish(trainer, pl_module)
        self._draw()
        self._watching.close()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Stop measuring; report where the snapshot is, if memory ran out. Local."""
        if self._trace is not None:
            trace, self._trace = self._trace, None
            with suppress(Exception):  # the other one is what matters
                trace.stop()
        self._timeline = None
        self._watching.close()
        if self._snapshot is not None and isinstance(exception, torch.OutOfMemoryError):
            exception.add_note(f"what lay in the memory is in {self._snapshot}: see https://pytorch.org/memory_viz")

    # What is looked at

    def _watch_memory(self, path: Path) -> None:
        try:
            self._watching.enter_context(at_out_of_memory(lambda: self._write_out_of_memory(path)))
            if self.memory == "always":
                self._watching.enter_context(recorded_history())
        except RuntimeError as error:
            raise ConfigError(
                f"StepProfile(memory={self.memory!r}): {error}; choose another allocator, or memory='never'"
            ) from error

    def _includes(self, step: int) -> bool:
        """Return whether a step is profiled."""
        behind = step - self.first_step
        if self.every_n_steps is not None and behind >= 0:
            behind %= self.every_n_steps
        return 0 <= behind <= self.last_step - self.first_step

    def _is_chosen(self, trainer: L.Trainer) -> bool:
        return self.ranks is None or trainer.global_rank in self.ranks

    def _refuse_others(self, trainer: L.Trainer) -> None:
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        others = [each for each in callbacks if isinstance(each, StepProfile | PipelineTimeline) and each is not self]
        if isinstance(trainer.profiler, PyTorchProfiler):  # type: ignore[attr-defined]
            others.append(trainer.profiler)  # type: ignore[attr-defined]
        if others:
            raise ConfigError(
                f"StepProfile cannot be used with {type(others[0]).__name__}: only one of them can profile a run; "
                "leave one out"
            )

    def _refuse_steps_past(self, end: float) -> None:
        if self.last_step > end:
            raise ConfigError(
                f"StepProfile(first_step={self.first_step}, last_step={self.last_step}): the run ends with step "
                f"{end:.0f}; choose steps before its end"
            )

    # What is written

    def _place(self, trainer: L.Trainer) -> Path:
        """Return the directory. Collective over all ranks."""
        if self.directory is not None:
            return self.directory
        beside = getattr(trainer.checkpoint_callback, "dirpath", None)
        folder = _local(trainer.log_dir or trainer.default_root_dir) if beside is None else _local(beside).parent
        return folder / "profile"

    def _folder_of(self, step: int) -> Path:
        folder = self._folder / f"step_{step}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _start(self, trainer: L.Trainer, step: int) -> None:
        device = trainer.strategy.root_device
        with self._training_goes_on():
            if torch.autograd._profiler_enabled():
                raise RuntimeError("another profiler runs in this process; leave one out")
            self._trace = _Trace(device, step, records_memory=self.memory == "steps" and device.type == "cuda")

    def _finish(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        trace, self._trace = self._trace, None
        assert trace is not None
        device, rank = trainer.strategy.root_device, trainer.global_rank
        launched, seconds = trace.measure()
        with self._training_goes_on(), trace.stopping():
            path = self._folder_of(trace.step) / f"rank_{rank}"
            if device.type == "cuda" and self.memory != "never":
                write_snapshot(path.with_suffix(".memory.pickle"))
        with self._training_goes_on():
            num_steps = max(1, trainer.global_step + 1 - trace.step)
            vocab_size = getattr(getattr(module, "config", None), "vocab_size", None)
            found = profiled_steps(trace.profiler, seconds, num_steps=num_steps, vocab_size=vocab_size)
            self.profiled = found
            path = self._folder_of(trace.step) / f"rank_{rank}"
            trace.profiler.export_chrome_trace(str(path.with_suffix(".trace.json.gz")))
            text = found.table(launched / num_steps)
            title = f"# Rank {rank}: {num_steps} step(s) from step {trace.step} on\n\n"
            path.with_suffix(".md").write_text(f"{title}{text}\n", encoding="utf-8")
            path.with_suffix(".json").write_text(json.dumps(asdict(found)) + "\n", encoding="utf-8")
            say(trainer, f"Profiled step {trace.step}: see {path.parent}")

    def _draw(self) -> None:
        """Draw the measured step.

        Drawing is deferred until the profiled steps are over, because its ranks would wait for it.
        """
        if self._is_to_draw and self.measured is not None:
            self._is_to_draw = False
            with self._training_goes_on():
                self.measured.write(self._folder_of(self._drawn_step + 1), self._drawn_step)

    def _write_out_of_memory(self, path: Path) -> None:
        with self._training_goes_on():
            write_snapshot(path)
            self._snapshot = path

    @contextmanager
    def _training_goes_on(self) -> Generator[None]:
        """Report the first failure inside the block, and continue after it."""
        try:
            yield
        except Exception as error:
            if not self._has_failed:
                self._has_failed = True
                logger.warning(
                    "StepProfile failed: %s: %s. Training goes on, and further failures are not said",
                    *(type(error).__name__, error),
                )


class _Trace:
    """Profiles this rank from now on. Local.

    Args:
        device: The device that computes.
        step: The first step.
        records_memory: Whether to record allocations until it stops.
    """

    def __init__(self, device: torch.device, step: int, *, records_memory: bool) -> None:
        self.step = step
        self._device = device
        self._batch: record_function | None = None
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        self.profiler = profile(activities=activities, record_shapes=True, acc_events=True)
        self._synchronize()
        with ExitStack() as opened:
            if records_memory:
                opened.enter_context(recorded_history())
            self.profiler.start()
            opened.enter_context(observed_by(_WaitRanges()))
            self._open = opened.pop_all()
        self._began = perf_counter()

    def begin_batch(self, name: str) -> None:
        """Begin the range of a batch."""
        self._batch = record_function(name)
        self._batch.__enter__()

    def end_batch(self) -> None:
        """End it."""
        if self._batch is not None:
            self._batch.__exit__(None, None, None)
            self._batch = None

    def measure(self) -> tuple[float, float]:
        """Return the seconds until the host had launched everything, and until the device was done."""
        launched = perf_counter() - self._began
        self._synchronize()
        return launched, perf_counter() - self._began

    @contextmanager
    def stopping(self) -> Generator[None]:
        """Stop the profiler, and stop recording allocations at the end of the block."""
        self.end_batch()
        with self._open:
            self.profiler.stop()
            yield

    def stop(self) -> None:
        """Stop all."""
        with self.stopping():
            pass

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class _WaitRanges:
    """Adds waits for other ranks to the trace."""

    def __init__(self) -> None:
        self._range: record_function | None = None

    def begin_wait(self) -> None:
        self._range = record_function(WAIT)
        self._range.__enter__()

    def end_wait(self) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None


def _local(directory: str | Path) -> Path:
    if "://" in str(directory):
        raise ConfigError(f"StepProfile cannot write to {directory}: set its directory to one of this machine")
    return Path(directory)


def _has_pipeline(module: L.LightningModule) -> bool:
    return isinstance(module, D9DModule) and module.pipeline.num_ranks > 1


def _last_step(trainer: L.Trainer) -> float:
    """Return the latest possible last step of a fit on this rank; infinity if it is unknown."""
    end = math.inf if trainer.max_steps == -1 else trainer.max_steps
    module, num_batches = trainer.lightning_module, trainer.num_training_batches
    if trainer.max_epochs in (None, -1) or not module.automatic_optimization or num_batches == math.inf:
        return end
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    is_fixed = not any(isinstance(each, GradientAccumulationScheduler) for each in callbacks)
    window = trainer.accumulate_grad_batches if is_fixed else 1
    return min(end, trainer.max_epochs * math.ceil(num_batches / window))
