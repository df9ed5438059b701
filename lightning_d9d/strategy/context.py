"""The contract between a strategy and a `D9DModule`: the module's facts about the run that builds its stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_d9d.parallel import ParallelConfig
from lightning_d9d.strategy.pipeline import Pipeline


class Evaluation(Protocol):
    """Runs batches forwards only on any mesh, like `eval_step.EvalStep`."""

    def evaluate(self, batch: Any, prefix: str) -> dict[str, Tensor]:
        """Run a batch and log its loss and metrics."""
        ...

    def predict(self, batch: Any, *, share: bool | None = None) -> Any:
        """Run a batch and return the module's `predict_output`."""
        ...


class StageMemory(Protocol):
    """Checks the memory that a fit needs, like `setup_memory.SetupMemory`."""

    def check(self, module: Any, stages: Sequence[nn.Module]) -> None:
        """Refuse the stages of a module, on the meta device, if a fit cannot hold them. Collective."""
        ...

    def note(self, error: BaseException) -> None:
        """Add advice to an error that memory ran out: settings that take less. Local."""
        ...


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """Describes where a module's stages are and how they are spread. `D9DStrategy` sets it before `configure_model`.

    Under Lightning's own strategies, and without a Trainer, a module uses `RunContext.stock`.
    """

    pipeline: Pipeline
    """This rank's place in the pipeline, its mesh and its part of the sequences."""
    device: torch.device
    """The device on which stages get their storage."""
    parallel: ParallelConfig = ParallelConfig()
    """The configuration in effect, with the dtypes that follow from precision and gradient sync."""
    seed: int | None = None
    """The seed of the job, equal on all ranks. None means torch's initial seed."""
    loads_pretrained: bool = False
    """True if the strategy calls `load_pretrained_once`. The strategy knows whether a checkpoint will be loaded."""
    is_stock: bool = False
    """True for one of Lightning's own strategies. They run whole, unchanged stages."""
    memory: StageMemory | None = None
    """Checks whether the stages fit into memory."""

    @classmethod
    def of(
        cls,
        pipeline: Pipeline,
        device: torch.device,
        parallel: ParallelConfig,
        seed: int,
        memory: StageMemory,
    ) -> RunContext:
        """Return the context that `D9DStrategy` gives a module.

        The strategy itself decides when to load pretrained weights.
        """
        return cls(
            pipeline=pipeline,
            device=device,
            parallel=parallel,
            seed=seed,
            loads_pretrained=True,
            memory=memory,
        )

    @property
    def seed_of_job(self) -> int:
        """The seed that determines initial weights."""
        return torch.initial_seed() if self.seed is None else self.seed

    def check_memory(self, module: Any, stages: Sequence[nn.Module]) -> None:
        """Refuse stages on the meta device if a fit cannot hold them. Collective if the strategy requires it."""
        if self.memory is not None:
            self.memory.check(module, stages)

    def note(self, error: BaseException) -> None:
        """Add advice to an error that memory ran out before training: settings that take less. Local."""
        if self.memory is not None:
            self.memory.note(error)

    @classmethod
    def stock(cls, device: torch.device) -> RunContext:
        """Return the context of one process with one stage, on a device."""
        return cls(pipeline=Pipeline.alone(device), device=device, is_stock=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> RunContext:
        """Return this object: copies of a module share it, because process groups cannot be copied."""
        return self
