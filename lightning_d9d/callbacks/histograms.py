"""`Histograms`: how the values of weights and gradients are spread, in TensorBoard or W&B."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from torch import Tensor
from torch.optim import Optimizer

from lightning_d9d.errors import ConfigError
from lightning_d9d.mesh.agreement import Ranks
from lightning_d9d.mesh.collectives import all_gather_object
from lightning_d9d.mesh.sharding import sharding_of
from lightning_d9d.strategy.module import D9DModule
from lightning_d9d.strategy.optimizers import first_names
from lightning_d9d.strategy.strategy import D9DStrategy
from lightning_d9d.sync.histograms import BORDERS, whole_counts


class Histograms(L.Callback):
    """Logs histograms of weights and gradients of a fit under `D9DStrategy` to TensorBoard or W&B.

    They are those of whole tensors, as in one process, however ranks share them. They are called `weights/NAME` and
    `gradients/NAME`, and are taken before the step, and before gradients are clipped. Bins are a fifth of a value wide:
    see `lightning_d9d.sync.histograms`. NaN and infinite values are in none. A step with histograms takes longer, by a
    message of some kilobytes for each parameter. Loggers are called directly, also with `BackgroundLoggers`. All ranks
    must have the callback.

    Args:
        every_n_steps: The first ones are of the first step of a fit.
        weights: A pattern of parameter names, such as `"*.layers.0.*"`; None logs no weights.
        gradients: Likewise.

    Raises:
        ConfigError: A bad value. When a fit begins: the strategy is another one, no logger takes histograms, a pattern
            names no parameter, or gradients are freed before the step.
    """

    def __init__(self, every_n_steps: int = 1000, weights: str | None = "*", gradients: str | None = "*") -> None:
        if every_n_steps < 1:
            raise ConfigError(f"Histograms(every_n_steps={every_n_steps}) must be at least 1")
        if weights is None and gradients is None:
            raise ConfigError("Histograms(weights=None, gradients=None) logs nothing; give a pattern, such as '*'")
        self.every_n_steps = every_n_steps
        self.weights = weights
        self.gradients = gradients
        self._last_step = -1

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse a fit without somebody who takes histograms."""
        if stage != "fit":
            return
        if not isinstance(trainer.strategy, D9DStrategy):
            raise ConfigError(
                f"Histograms needs D9DStrategy, but the Trainer has {type(trainer.strategy).__name__}; leave the "
                "callback out"
            )
        if not any(isinstance(each, TensorBoardLogger | WandbLogger) for each in trainer.loggers):
            raise ConfigError(
                "Histograms needs a TensorBoardLogger or a WandbLogger, as others take numbers only; give the Trainer "
                "one, or leave the callback out"
            )
        if self.gradients is not None and trainer.strategy.step_in_backward:
            raise ConfigError(
                f"Histograms(gradients={self.gradients!r}) beside step_in_backward=True, which frees gradients before "
                "the step; set gradients to None"
            )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Look whether patterns name something. Collective over all ranks."""
        self._last_step = -1
        names = [*first_names(pl_module.state_dict(keep_vars=True)).values()]
        for argument, pattern in (("weights", self.weights), ("gradients", self.gradients)):
            has_one = pattern is None or any(fnmatchcase(name, pattern) for name in names)
            if not any(Ranks().all_gather(has_one)):
                raise ConfigError(
                    f"Histograms({argument}={pattern!r}): no parameter has such a name; they are called "
                    f"{next(iter(names), '')!r} and so on, and * stands for anything"
                )

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        """Log the histograms of a step. Collective over all ranks then."""
        step = trainer.global_step
        if step % self.every_n_steps or step == self._last_step:
            return
        self._last_step = step
        names = first_names(pl_module.state_dict(keep_vars=True))
        parts: dict[str, Any] = {}
        for parameter, name in names.items():
            if self.weights is not None and fnmatchcase(name, self.weights):
                parts[f"weights/{name}"] = sharding_of(parameter), parameter.detach()
            if self.gradients is not None and parameter.requires_grad and fnmatchcase(name, self.gradients):
                parts[f"gradients/{name}"] = sharding_of(parameter), parameter.grad
        counts = whole_counts(parts)
        group = pl_module.pipeline.group if isinstance(pl_module, D9DModule) else None
        for theirs in [] if group is None else all_gather_object(counts, group):
            counts |= theirs
        if trainer.is_global_zero:
            histograms = {name: _filled(each) for name, each in counts.items() if each.sum() > 0}
            for logger in trainer.loggers:
                _log(logger, histograms, step)


def _filled(counts: Tensor) -> tuple[list[float], Tensor]:
    """Return the bins from the first to the last that has something: their borders and counts."""
    filled = counts.nonzero().flatten()
    first, last = int(filled[0]), int(filled[-1])
    borders = [2 * BORDERS[0], *BORDERS, 2 * BORDERS[-1]]
    return borders[first : last + 2], counts[first : last + 1]


def _log(logger: Logger, histograms: dict[str, tuple[list[float], Tensor]], step: int) -> None:
    if isinstance(logger, TensorBoardLogger):
        for name, (borders, counts) in histograms.items():
            limits = torch.tensor(borders, dtype=torch.float64)
            middles = (limits[1:] + limits[:-1]) / 2
            logger.experiment.add_histogram_raw(
                name,
                min=borders[0],
                max=borders[-1],
                num=int(counts.sum()),
                sum=float((counts * middles).sum()),
                sum_squares=float((counts * middles**2).sum()),
                bucket_limits=borders[1:],
                bucket_counts=counts.tolist(),
                global_step=step,
            )
    elif isinstance(logger, WandbLogger):
        import wandb  # type: ignore[import-not-found]

        values = {
            name: wandb.Histogram(np_histogram=(counts.numpy(), borders))
            for name, (borders, counts) in histograms.items()
        }
        logger.experiment.log(values | {"trainer/global_step": step})  # in one call, which is a step of W&B's
