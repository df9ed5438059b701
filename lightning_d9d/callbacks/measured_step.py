"""Shows a measured step of a pipeline as a picture and in numbers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import lightning as L

from lightning_d9d.pipeline.executor import Executor
from lightning_d9d.pipeline.timeline import Timeline
from lightning_d9d.schedule import Forward, Simulation, Span, bubble_ratio, mean_costs, plot, simulate
from lightning_d9d.strategy.module import D9DModule
from lightning_d9d.strategy.strategy import D9DStrategy


@dataclass(frozen=True)
class MeasuredStep:
    """A step as it was measured, and as the simulator runs it with the step's mean costs."""

    spans: tuple[Span, ...]
    """The compute actions of all ranks of the pipeline, in seconds."""
    simulation: Simulation
    """The simulated step, with the mean time of each stage and kind of action, and of a message."""

    @classmethod
    def of(cls, timeline: Timeline, module: D9DModule) -> MeasuredStep:
        """Gather the measurements of all ranks of a pipeline for one batch. Collective over the pipeline."""
        spans, pipeline = timeline.spans(), module.pipeline
        num_microbatches = sum(isinstance(span.action, Forward) and span.action.stage == 0 for span in spans)
        program = pipeline.schedule.program(pipeline.num_ranks, num_microbatches)
        return cls(tuple(spans), simulate(program, mean_costs(spans, pipeline.placement)))

    @property
    def bubble_ratio(self) -> float:
        """The share of time in which ranks computed nothing, from the first action to the last, 0 to 1."""
        return bubble_ratio(self.spans)

    @property
    def seconds(self) -> float:
        """Seconds from the start of the first action to the end of the last."""
        return max(span.end for span in self.spans) - min(span.start for span in self.spans)

    @property
    def bubbles(self) -> str:
        """Return both bubbles as a text."""
        return f"bubble {self.bubble_ratio:.1%}, {self.simulation.bubble_ratio:.1%} simulated with its mean costs"

    def write(self, directory: Path, step: int) -> None:
        """Write `timeline.json`, and draw it as .png, .svg and .html. Local.

        Args:
            directory: Exists.
            step: The number of the step, for the title.

        Raises:
            ConfigError: The extra `viz` is not installed.
        """
        begin = min(span.start for span in self.spans)
        spans = [Span(rank, action, start - begin, end - begin) for rank, action, start, end in self.spans]
        values = {
            "step": step,
            "bubble_ratio": self.bubble_ratio,
            "simulated_bubble_ratio": self.simulation.bubble_ratio,
            "seconds": self.seconds,
            "simulated_seconds": self.simulation.step_time,
            "spans": [[rank, str(action), start, end] for rank, action, start, end in spans],
        }
        (directory / "timeline.json").write_text(json.dumps(values) + "\n", encoding="utf-8")
        in_ms = [Span(rank, action, 1e3 * start, 1e3 * end) for rank, action, start, end in spans]
        for ending in ("png", "svg", "html"):
            plot(in_ms, directory / f"timeline.{ending}", f"step {step} in ms: {self.bubbles}")


def executor_of(trainer: L.Trainer, module: L.LightningModule) -> tuple[D9DModule, Executor]:
    """Return the module of a fit under `D9DStrategy`, and the executor of its stages. Local."""
    assert isinstance(module, D9DModule)
    assert isinstance(trainer.strategy, D9DStrategy)
    executor = trainer.strategy.executor
    assert executor is not None
    return module, executor
