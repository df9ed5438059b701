"""`Histograms`: how weights, gradients and routers' probabilities are spread, in TensorBoard or W&B."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from torch import Tensor
from torch.optim import Optimizer

from lightning_d9d.callbacks.router_counts import named_routers
from lightning_d9d.callbacks.router_probabilities import RouterProbabilities
from lightning_d9d.errors import ConfigError
from lightning_d9d.mesh.agreement import Ranks
from lightning_d9d.mesh.collectives import all_gather_object
from lightning_d9d.mesh.sharding import sharding_of
from lightning_d9d.strategy.module import D9DModule
from lightning_d9d.strategy.optimizers import first_names
from lightning_d9d.strategy.strategy import D9DStrategy
from lightning_d9d.sync.histograms import BORDERS, whole_counts


class Histograms(L.Callback):
    """Logs histograms of a fit under `D9DStrategy` to TensorBoard or W&B: weights, gradients, routers' probabilities.

    They are those of whole tensors, as in one process, however ranks share them. They are called `weights/NAME` and
    `gradients/NAME`, and are taken before the step, and before gradients are clipped. Bins are a fifth of a value wide:
    see `lightning_d9d.sync.histograms`. NaN and infinite values are in none.

    Probabilities are those that a `TopKRouter` gives to all experts, for all tokens of the step on all ranks. They are
    called `router_probabilities/NAME`, such as `router_probabilities/model.layers.0.mlp.gate`, and computed once more
    for it. A step with histograms takes longer, by a
    message of some kilobytes for each parameter. Loggers are called directly, also with `BackgroundLoggers`. All ranks
    must have the callback.

    Args:
        every_n_steps: The first ones are of the first step of a fit.
        weights: A pattern of parameter names, such as `"*.layers.0.*"`; None logs no weights.
        gradients: Likewise.
        router_probabilities: A pattern of names of routers, such as `"*"`; None logs none.

    Raises:
        ConfigError: A bad value. When a fit begins: the strategy is another one, no logger takes histograms, or a
            pattern names nothing. Gradients are freed before the step, or routers are in compiled or captured blocks.
    """

    def __init__(
        self,
        every_n_steps: int = 1000,
        weights: str | None = "*",
        gradients: str | None = "*",
        router_probabilities: str | None = None,
    ) -> None:
        if every_n_steps < 1:
            raise ConfigError(f"Histograms(every_n_steps={every_n_steps}) must be at least 1")
        if weights is None and gradients is None and router_probabilities is None:
            raise ConfigError("Histograms(weights=None, gradients=None) logs nothing; give a pattern, such as '*'")
        self.every_n_steps = every_n_steps
        self.weights = weights
        self.gradients = gradients
        self.router_probabilities = router_probabilities
        self._routers: RouterProbabilities | None = None
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
        parallel = trainer.strategy.parallel
        for name in ("compile", "cuda_graphs"):
            if self.router_probabilities is not None and getattr(parallel, name):
                raise ConfigError(
                    f"Histograms(router_probabilities={self.router_probabilities!r}) beside "
                    f"ParallelConfig.{name}=True, where nothing looks into blocks; set one of them to its default"
                )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Look whether patterns name something. Collective over all ranks."""
        self._last_step = -1
        names = [*first_names(pl_module.state_dict(keep_vars=True)).values()]
        routers = {} if self.router_probabilities is None else named_routers(pl_module)
        _check_pattern("weights", self.weights, "parameter", names)
        _check_pattern("gradients", self.gradients, "parameter", names)
        if self.router_probabilities is not None:
            _check_pattern("router_probabilities", self.router_probabilities, "router", [*routers])
            strategy: Any = trainer.strategy
            group = (strategy.stage_group or dist.group.WORLD) if strategy.is_distributed else None
            chosen = {name: each for name, each in routers.items() if fnmatchcase(name, self.router_probabilities)}
            self._routers = RouterProbabilities(chosen, group)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Look at routers if the step is to be logged. Local."""
        if self._routers is not None and self._is_due(trainer.global_step):
            self._routers.begin()

    def _is_due(self, step: int) -> bool:
        return step % self.every_n_steps == 0 and step != self._last_step

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        """Log the histograms of a step. Collective over all ranks then."""
        step = trainer.global_step
        if not self._is_due(step):
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
        if self._routers is not None:
            counts |= {f"router_probabilities/{name}": each for name, each in self._routers.take().items()}
        group = pl_module.pipeline.group if isinstance(pl_module, D9DModule) else None
        for theirs in [] if group is None else all_gather_object(counts, group):
            counts |= theirs
        if trainer.is_global_zero:
            histograms = {name: _filled(each) for name, each in counts.items() if each.sum() > 0}
            for logger in trainer.loggers:
                _log(logger, histograms, step)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Let routers be as they were. Local."""
        if self._routers is not None:
            self._routers.close()
            self._routers = None

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Let routers be as they were. Local."""
        self.on_train_end(trainer, pl_module)


def _check_pattern(argument: str, pattern: str | None, kind: str, names: Sequence[str]) -> None:
    """Refuse a pattern that no name of any rank fits. Collective over all ranks."""
    has_one = pattern is None or any(fnmatchcase(name, pattern) for name in names)
    found = Ranks().all_gather((has_one, next(iter(names), "")))
    if not any(here for here, _ in found):
        example = next((name for _, name in found if name), None)
        called = "there is none" if example is None else f"they are called {example!r} and so on"
        raise ConfigError(
            f"Histograms({argument}={pattern!r}): no {kind} has such a name; {called}, and * stands for anything"
        )


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
