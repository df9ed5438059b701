"""`PipelineTimeline` shows one measured step of a pipeline as a picture and as costs."""

from __future__ import annotations

import importlib.util
import platform
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from lightning_d9d.callbacks.export import make_folder
from lightning_d9d.callbacks.measured_step import MeasuredStep, executor_of
from lightning_d9d.errors import ConfigError, ScheduleError
from lightning_d9d.loop.display import say
from lightning_d9d.mesh.collectives import all_gather_object
from lightning_d9d.pipeline.microbatch import num_tokens
from lightning_d9d.pipeline.timeline import ActivationBytes, Timeline
from lightning_d9d.schedule import Backward, BackwardInput, BackwardWeight, Forward, MeasuredCosts, MeasuredStage
from lightning_d9d.schedule.spans import mean_times, message_time
from lightning_d9d.strategy.batches import BatchSplitter
from lightning_d9d.strategy.module import D9DModule
from lightning_d9d.strategy.strategy import D9DStrategy


class _Stage(NamedTuple):
    """Facts that only the rank with a stage knows."""

    layers: tuple[int, int] | None
    activation_bytes: float


class PipelineTimeline(L.Callback):
    """Records when each forward and backward of one step of a `D9DModule` ran on each rank of the pipeline.

    It writes these files to the directory, for the pipeline of global rank 0:

    - `timeline.png`, `timeline.svg` and `timeline.html`: a Gantt picture;
    - `timeline.json`: the same in numbers, with the measured and the simulated bubble. The simulator uses the mean time
      of each stage, each kind of action and each message in this step;
    - `costs.json`: the mean times, and for each stage the memory of a microbatch, which is measured in the step before.
      `lightning_d9d.schedule.Auto(costs=...)` reads this file. The numbers in parameters' names give the layers of a
      stage; without such numbers the file is not written.

    In the measured step each action costs two more events on CUDA. Before this step the ranks of a pipeline wait for
    each other and for their devices, to start their clocks together. The clocks of ranks of one host then agree within
    about ten microseconds; over a network they agree within the time of a small message. Nothing is measured in other
    steps.

    If batches are accumulated, the first batch of the step is measured. Needs `D9DStrategy`, and matplotlib and plotly
    (extra `viz`).

    Args:
        directory: Is made.
        step: Number of optimizer steps before the measured one, so that caches and clocks settle; at least 1.
    """

    def __init__(self, directory: str | Path, step: int = 10) -> None:
        if not isinstance(step, int) or step < 1:
            raise ConfigError(f"PipelineTimeline(step={step!r}) must be a whole number of at least 1")
        self.directory = Path(directory)
        self.step = step
        self.measured: MeasuredStep | None = None
        """The measured step, on every rank."""
        self._first_step = 0
        self._activations: ActivationBytes | None = None
        self._timeline: Timeline | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Raise `ConfigError` before the training if nothing can be measured or drawn."""
        if stage != "fit":
            return
        if not (isinstance(trainer.strategy, D9DStrategy) and isinstance(pl_module, D9DModule)):
            raise ConfigError(
                f"PipelineTimeline needs a D9DModule under D9DStrategy, but {type(pl_module).__name__} trains under "
                f"{type(trainer.strategy).__name__}; leave the callback out"
            )
        for library in ("matplotlib", "plotly"):
            if importlib.util.find_spec(library) is None:
                raise ConfigError(
                    f"PipelineTimeline needs {library}, which is not installed: pip install 'lightning-d9d[viz]', or "
                    "leave the callback out"
                )
        make_folder(trainer, self.directory, f"PipelineTimeline(directory={str(self.directory)!r})")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Count steps from here: a resumed run needs its warm-up steps, too."""
        self._first_step = trainer.global_step
        self.measured = None

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin to measure. Collective over the pipeline before the measured step."""
        step = trainer.global_step - self._first_step
        if self.measured is not None or step not in (self.step - 1, self.step):
            return
        module, executor = executor_of(trainer, pl_module)
        if step < self.step:
            self._activations = executor.observer = ActivationBytes(module.stages, module.device)
        else:
            self._timeline = executor.observer = Timeline(module.device, module.pipeline.group)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop measuring; after the measured step write the files. Collective over the pipeline in that step."""
        module, executor = executor_of(trainer, pl_module)
        executor.observer = None
        if self._timeline is None:
            return
        timeline, self._timeline = self._timeline, None
        self.measured = MeasuredStep.of(timeline, module)
        stages = self._gather_stages(module)
        if trainer.is_global_zero:
            self.measured.write(self.directory, trainer.global_step)
            say(trainer, f"Pipeline in step {trainer.global_step}: {self.measured.bubbles}; see {self.directory}")
            self._write_costs(module, batch, stages)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Warn if the fit was too short."""
        if self.measured is None:
            rank_zero_warn(f"PipelineTimeline measured nothing: the fit ended before its step {self.step}")

    def _gather_stages(self, module: D9DModule) -> list[_Stage]:
        """Return the facts of all stages of the pipeline. Collective over it."""
        assert self._activations is not None
        held = self._activations.means()
        ours = {index: _Stage(_layers(stage), held[index]) for index, stage in module.indexed_stages.items()}
        group = module.pipeline.group
        known: dict[int, _Stage] = {}
        for theirs in [ours] if group is None else all_gather_object(ours, group):
            known |= theirs
        return [known[stage] for stage in sorted(known)]

    def _write_costs(self, module: D9DModule, batch: Any, stages: list[_Stage]) -> None:
        assert self.measured is not None
        times = mean_times(self.measured.spans)
        splitter: BatchSplitter = module.trainer.strategy.splitter  # type: ignore[attr-defined]
        rows = splitter.split(batch, trains=True).rows[0] or 1  # packed sequences, which have no rows, are one
        try:
            measured = MeasuredCosts(
                machine=_name(module.device),
                sequence_length=max(1, num_tokens(batch) // (module.rows_of(batch) or 1)),
                microbatch_size=rows,
                stages=tuple(
                    MeasuredStage(
                        layers=_known(stage.layers, index),
                        forward_seconds=times[Forward, index],
                        backward_seconds=times.get((Backward, index)),
                        backward_input_seconds=times.get((BackwardInput, index)),
                        backward_weight_seconds=times.get((BackwardWeight, index)),
                        activation_bytes=stage.activation_bytes,
                    )
                    for index, stage in enumerate(stages)
                ),
                link_seconds=message_time(self.measured.spans, module.pipeline.placement),
            )
        except ScheduleError as error:
            rank_zero_warn(f"PipelineTimeline writes no costs.json: {error}")
        else:
            measured.write(self.directory / "costs.json")


def _layers(stage: nn.Module) -> tuple[int, int] | None:
    """Return the first layer of a stage and the one after its last, by the numbers in parameters' names.

    If there are several numbered lists (decoder layers, and the parts of a head), the longest is taken.
    """
    numbers: dict[str, set[int]] = defaultdict(set)
    sizes: dict[str, int] = defaultdict(int)
    for name, parameter in stage.named_parameters():
        parts = name.split(".")
        position = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        if position is not None:
            of_list = ".".join(parts[:position])
            numbers[of_list].add(int(parts[position]))
            sizes[of_list] += parameter.numel()
    if not numbers:
        return None
    of_layers = numbers[max(sizes, key=sizes.__getitem__)]
    return min(of_layers), max(of_layers) + 1


def _known(layers: tuple[int, int] | None, stage: int) -> tuple[int, int]:
    if layers is None:
        raise ScheduleError(f"no parameter of stage {stage} has the number of a layer in its name")
    return layers


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()
