"""Optimizers of a module from its settings: classes named by a configuration or a caller."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from lightning_d9d.errors import ConfigError
from lightning_d9d.optim import OptimizerSettings, ParameterGroup, learning_rates
from lightning_d9d.optim.settings import LRSchedulerFactory, NamedParameters, OptimizerFactory


class OptimizedModule(L.LightningModule):
    """A LightningModule whose optimizer is a setting, or its own.

    A subclass names its parameters (`named_for_optimizer`). It may give `default_optimizer` and `default_lr_scheduler`.
    """

    optimizer_settings: OptimizerSettings | None = None
    """Settings of the optimizer that replaces `default_optimizer`; see `use_optimizer`."""

    def use_optimizer(
        self,
        optimizer: OptimizerFactory | None,
        lr_scheduler: LRSchedulerFactory | None = None,
        parameter_groups: Sequence[ParameterGroup] | None = None,
    ) -> None:
        """Train the module with an optimizer from these settings. Local, before a run.

        Args:
            optimizer: Makes the optimizer from parameter groups; None keeps the module's own.
            lr_scheduler: Makes its schedule, which is stepped with it. A `PiecewiseLR` gets the steps of the run.
            parameter_groups: Parameters with separate settings, by patterns of their names.

        Raises:
            ConfigError: The optimizer is missing although others are given, or the module's class makes its own, or got
                arguments for it.
        """
        given = {"lr_scheduler": lr_scheduler, "parameter_groups": parameter_groups}
        name = type(self).__name__
        if optimizer is None:
            for setting, value in given.items():
                if value:
                    raise ConfigError(
                        f"`{setting}` of {name} has no effect without `optimizer`; set that, such as AdamW with lr"
                    )
            return
        if type(self).configure_optimizers is not OptimizedModule.configure_optimizers:
            raise ConfigError(
                f"`optimizer` has no effect: {name}.configure_optimizers makes another; leave one of them out"
            )
        if beside := self.arguments_of_default_optimizer():
            values = ", ".join(f"{argument}={value!r}" for argument, value in beside.items())
            raise ConfigError(
                f"{values} of {name} has no effect beside `optimizer`, which has its own settings; set them in "
                "`optimizer` or `lr_scheduler`, or leave `optimizer` out"
            )
        self.optimizer_settings = OptimizerSettings(optimizer, lr_scheduler, tuple(parameter_groups or ()))

    def arguments_of_default_optimizer(self) -> Mapping[str, object]:
        """Return the arguments that were given for `default_optimizer` and its schedule, and differ from defaults."""
        return {}

    def default_optimizer(self) -> Optimizer:
        """Build the optimizer that trains the module if no settings are given. Local.

        Raises:
            ConfigError: The module has no default optimizer.
        """
        raise ConfigError(
            f"{type(self).__name__} has no optimizer; give `optimizer` a class with settings, such as AdamW with lr "
            "(use_optimizer(partial(AdamW, lr=1e-3)) in Python), or implement configure_optimizers"
        )

    def default_lr_scheduler(self, optimizer: Optimizer, total_steps: int | None) -> LRScheduler | None:
        """Build the schedule of the default optimizer, which is stepped with it; None keeps the learning rate constant.

        Local.

        Args:
            optimizer: Result of `default_optimizer`.
            total_steps: Optimizer steps of the whole run; None if it has no end.
        """
        return None

    def make_lr_scheduler(self, optimizer: Optimizer, total_steps: int | None) -> LRScheduler | None:
        """Build the schedule of the settings, or the default one; None: there is none. Local.

        Args:
            optimizer: The scheduled optimizer.
            total_steps: Optimizer steps of the whole run; None if it has no end.

        Raises:
            ConfigError: The schedule does not fit into the run, or needs the number of its steps.
        """
        settings = self.optimizer_settings
        make = self.default_lr_scheduler if settings is None else settings.make_lr_scheduler
        return make(optimizer, total_steps)

    def learning_rates(self, total_steps: int) -> list[float]:
        """Return the learning rate of each optimizer step of a run, without running it. Local.

        Args:
            total_steps: Optimizer steps of the run.

        Raises:
            ConfigError: The schedule does not fit into the run, or is known only in a run.
        """
        if type(self).configure_optimizers is not OptimizedModule.configure_optimizers:
            raise ConfigError(
                f"{type(self).__name__}.configure_optimizers makes the schedule, which is known only in a run; give "
                "`lr_scheduler` a class with settings instead"
            )
        settings = self.optimizer_settings
        optimizer = self.default_optimizer() if settings is None else settings.optimizer([{"params": []}])
        scheduler = self.make_lr_scheduler(optimizer, total_steps) or LambdaLR(optimizer, lambda step: 1.0)
        return learning_rates(scheduler, total_steps)

    def named_for_optimizer(self) -> NamedParameters:
        """Return the parameters by name. Local."""
        raise NotImplementedError(f"{type(self).__name__} must implement named_for_optimizer()")

    def make_optimizer(self) -> Optimizer:
        """Build the optimizer of the settings, or the default one, for the current parameters. Local.

        Raises:
            ConfigError: Settings do not fit the module.
        """
        settings = self.optimizer_settings
        return self.default_optimizer() if settings is None else settings.make_optimizer(self.named_for_optimizer())

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Build optimizer and schedule of the settings, or the default ones. Lightning calls it on every rank.

        Raises:
            ConfigError: Settings do not fit the module or the run.
        """
        settings, optimizer = self.optimizer_settings, self.make_optimizer()
        is_scheduled = settings is None or settings.lr_scheduler is not None
        scheduler = self.make_lr_scheduler(optimizer, optimizer_steps(self.trainer) if is_scheduled else None)
        if scheduler is None:
            return optimizer
        if isinstance(scheduler, ReduceLROnPlateau):
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": _metric_of(scheduler)}}
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def first_names(state: Mapping[str, Any]) -> dict[nn.Parameter, str]:
    """Return the names of the parameters in a state dict with variables; the first name of those that have several."""
    names: dict[nn.Parameter, str] = {}
    for name, value in state.items():
        if isinstance(value, nn.Parameter):
            names.setdefault(value, name)
    return names


def ordered_names(module: nn.Module) -> list[str]:
    """Return all names of parameters in the order of a state dict. Local."""
    return [name for name, value in module.state_dict(keep_vars=True).items() if isinstance(value, nn.Parameter)]


def named_parameters(own: Mapping[str, nn.Parameter], whole: nn.Module, order: Sequence[str]) -> NamedParameters:
    """Return parameters by name, with the names of embeddings and heads of the whole model.

    Args:
        own: This rank's parameters.
        whole: The whole model, on the meta device.
        order: The names of the parameters of all stages.
    """
    tables = {f"{name}.weight": part for name, part in whole.named_modules() if isinstance(part, nn.Embedding)}
    shapes = {table.weight.shape for table in tables.values()}
    heads = [name for name, each in whole.named_parameters() if each.shape in shapes and name not in tables]
    return NamedParameters(own, order, list(tables), heads)


def _metric_of(scheduler: ReduceLROnPlateau) -> str:
    metric = getattr(scheduler, "monitor", None)
    if metric is None:
        raise ConfigError(
            "`lr_scheduler` ReduceLROnPlateau does not say which metric it follows; give "
            "lightning.pytorch.cli.ReduceLROnPlateau with monitor, such as val_loss"
        )
    return metric


def optimizer_steps(trainer: L.Trainer) -> int | None:
    """Count the optimizer steps of a whole fit, including those before a resume.

    Collective, because it may set up data.

    Accumulation may change with the epoch. Callbacks and time limits that end a fit earlier are not considered.

    Returns:
        The number, equal on all ranks, or None if the fit has no known end.
    """
    limit = None if trainer.max_steps == -1 else trainer.max_steps
    if trainer.max_epochs in (-1, None):
        return limit
    trainer.fit_loop.setup_data()
    batches = trainer.num_training_batches
    if math.isinf(batches):
        return limit
    schedulers: list[Any] = [
        callback
        for callback in trainer.callbacks  # type: ignore[attr-defined]
        if isinstance(callback, GradientAccumulationScheduler)
    ]
    accumulated = (
        schedulers[0].get_accumulate_grad_batches if schedulers else lambda epoch: trainer.accumulate_grad_batches
    )
    steps = sum(math.ceil(batches / accumulated(epoch)) for epoch in range(trainer.max_epochs))
    return steps if limit is None else min(steps, limit)
