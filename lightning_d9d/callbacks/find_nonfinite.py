"""`FindNonfinite` finds the module and the parameters at which a step became NaN or infinite.

[Note: a second forward] Gradients are checked before they are clipped, because clipping by a norm that is NaN spoils
all of them. If they are not finite, all ranks run the forward of the same batches once more, without gradients. A hook
of each module looks at its output. Modules inside of another one end before it, so the first hook that fires names the
innermost module. Weights are still those of the first forward. Buffers and generators of random numbers are restored.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_d9d.coordination.ahead import BatchPlan
from lightning_d9d.errors import ConfigError
from lightning_d9d.log import logger
from lightning_d9d.loop.uneven import plan_of
from lightning_d9d.mesh.agreement import Ranks, first_of
from lightning_d9d.mesh.sharding import local
from lightning_d9d.pipeline.trees import take_apart
from lightning_d9d.strategy.module import D9DModule
from lightning_d9d.strategy.optimizers import first_names
from lightning_d9d.strategy.strategy import D9DStrategy

_Batch = tuple[int, Any, BatchPlan]
"""Index in the epoch, rows on the device, and what ranks agreed on."""


@dataclass(frozen=True)
class Place:
    """The first module of a rank whose output was not finite."""

    module: str
    batch: int
    """Index of the batch in its epoch."""
    microbatch: int
    """Index in the batch; 0 for a plain module."""
    has_finite_inputs: bool
    bad_weights: tuple[str, ...]
    """The module's own parameters that were not finite."""

    def __str__(self) -> str:
        inputs = "finite" if self.has_finite_inputs else "not finite already"
        weights = f"; its parameters {', '.join(self.bad_weights)} are not" if self.bad_weights else ""
        return (
            f"the output of {self.module} is not finite in microbatch {self.microbatch} of batch {self.batch}, its "
            f"inputs are {inputs}{weights}"
        )


class FindNonfinite(L.Callback):
    """Names the first module with a NaN or infinite output, and parameters with such gradients, for a fit.

    Before each optimizer step it computes the norm of the gradients and reads it. The host then waits for the device,
    so remove the callback after the search. If the norm is not finite, the forward of the step's batches runs once
    more. One text names for each rank the batch, the microbatch, and the first module whose output is not finite. It
    also names parameters whose gradients are not finite. With `D9DStrategy(skip_nonfinite=True)` the text is logged,
    and the fit continues without the step. Otherwise all ranks raise it, because the weights would be lost. See [Find
    a NaN](../how-to/troubleshooting.md#find-where-a-nan-arose). A plain module logs once more what its `training_step`
    logs. All ranks must have the callback.

    Args:
        max_reports: After so many texts of a fit it stops searching.

    Raises:
        ConfigError: `max_reports` is below 1. At the start of a fit: blocks are compiled or captured, gradients are
            freed before the step, replicas mix weights, or optimization is manual.
        FloatingPointError: Gradients of a fit are not finite. All ranks raise it.
    """

    def __init__(self, max_reports: int = 3) -> None:
        if max_reports < 1:
            raise ConfigError(f"FindNonfinite(max_reports={max_reports}) must be at least 1")
        self.max_reports = max_reports
        self.reports: list[str] = []
        """The texts of the fit, the same on all ranks."""
        self._batches: list[_Batch] = []

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse a fit in which nothing can be found."""
        if stage != "fit":
            return
        strategy = trainer.strategy
        if not isinstance(strategy, D9DStrategy):
            raise ConfigError(
                f"FindNonfinite needs D9DStrategy, but the Trainer has {type(strategy).__name__}; leave the callback "
                "out, or use Trainer(detect_anomaly=True)"
            )
        reasons = {
            "ParallelConfig.compile=True, where nothing looks into blocks": strategy.parallel.compile,
            "ParallelConfig.cuda_graphs=True, where nothing looks into blocks": strategy.parallel.cuda_graphs,
            "step_in_backward=True, which frees gradients before the step": strategy.step_in_backward,
            "replicate_sync other than 'all_reduce', where replicas step apart": strategy.mixed is not None,
            "manual optimization": not pl_module.automatic_optimization,
        }
        for reason, is_so in reasons.items():
            if is_so:
                raise ConfigError(f"FindNonfinite cannot be used with {reason}; leave one of them out to search")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Forget an earlier fit. Local."""
        self.reports, self._batches = [], []

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Keep the batch until the step. Local."""
        if len(self.reports) < self.max_reports:
            self._batches.append((batch_idx, batch, plan_of(trainer.fit_loop)))

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        """Search if the norm of the gradients is not finite. Collective over all ranks.

        Raises:
            FloatingPointError: The norm is not finite, and the strategy would step.
        """
        batches, self._batches = self._batches, []
        strategy = trainer.strategy
        assert isinstance(strategy, D9DStrategy)
        if len(self.reports) >= self.max_reports or strategy.gradient_norm().isfinite():
            return
        gradients = [
            name
            for parameter, name in first_names(pl_module.state_dict(keep_vars=True)).items()
            if parameter.grad is not None and not _is_finite(parameter.grad)
        ]
        place = _first_place(trainer, pl_module, batches)
        report = _report(trainer.global_step, Ranks().all_gather((place, gradients)))
        self.reports.append(report)
        if not strategy.skip_nonfinite:
            raise FloatingPointError(report)
        if trainer.is_global_zero:
            logger.warning("%s", report)


def _report(step: int, found: list[tuple[Place | None, list[str]]]) -> str:
    """Return the text for what ranks found, those first at which a NaN can have arisen."""
    lines = [f"the gradients of step {step} (counted from 0) are not finite"]
    places = [(rank, place) for rank, (place, _) in enumerate(found) if place is not None]
    for rank, place in sorted(places, key=lambda each: (not each[1].has_finite_inputs, each[0])):
        lines.append(f"rank {rank}: {place}")
    if not places:
        lines.append("all modules have finite outputs: the loss, or its backward, is the first that is not finite")
    names = list(dict.fromkeys(name for _, each in found for name in each))
    lines.append(f"gradients that are not finite, {len(names)} in all: {first_of(names)}")
    if len(names) > 1:
        lines.append(f"the last of them in the model, where the backward comes first: {names[-1]}")
    return "\n".join(lines)


def _first_place(trainer: L.Trainer, module: L.LightningModule, batches: Iterable[_Batch]) -> Place | None:
    """Run the forward of each batch again. See [Note: a second forward]. Collective over all ranks."""
    found: list[Place] = []
    staged = isinstance(module, D9DModule)
    roots: list[nn.Module] = [*module.stages] if staged else [module]
    strategy = trainer.strategy
    assert isinstance(strategy, D9DStrategy)
    with _restored(module), torch.no_grad():
        for index, batch, plan in batches:
            with _watched(roots, index, found):
                if staged:
                    strategy.run_dummy(batch, plan)
                else:
                    with strategy.evaluating(), strategy.precision_plugin.forward_context():
                        module.training_step(batch, index)
    return found[0] if found else None


@contextmanager
def _watched(roots: list[nn.Module], batch: int, found: list[Place]) -> Generator[None]:
    """Note the first output that is not finite inside the block."""
    num_calls = dict.fromkeys(roots, -1)

    def begin(root: nn.Module, *_: Any) -> None:
        num_calls[root] += 1

    def look(root: nn.Module, name: str, each: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not found and not _is_finite(output):
            weights = tuple(name for name, weight in each.named_parameters(recurse=False) if not _is_finite(weight))
            microbatch = max(num_calls[root], 0)
            found.append(Place(name, batch, microbatch, _is_finite((args, kwargs)), weights))

    with ExitStack() as handles:
        for root in roots:
            handles.callback(root.register_forward_pre_hook(begin).remove)
            for name, each in root.named_modules():
                hook = partial(look, root, name or type(each).__name__)
                handles.callback(each.register_forward_hook(hook, with_kwargs=True).remove)
        yield


@contextmanager
def _restored(module: L.LightningModule) -> Generator[None]:
    """Leave buffers and random numbers as they are, whatever the block does."""
    buffers = [(each, each.clone()) for each in map(local, module.buffers())]
    devices = [module.device] if module.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        yield
    for buffer, before in buffers:
        buffer.copy_(before)


def _is_finite(tree: Any) -> bool:
    """Return whether all numbers of a tree are finite, on this rank. Local; waits for the device."""
    if isinstance(tree, Mapping | tuple | list) and not tree:
        return True
    tensors = (local(each) for each in take_apart(tree)[0])
    return all(bool(each.isfinite().all()) for each in tensors if isinstance(each, Tensor) and each.is_floating_point())
