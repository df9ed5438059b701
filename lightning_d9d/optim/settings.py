"""An optimizer and its learning-rate schedule as named in a configuration: classes with settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_d9d.errors import ConfigError
from lightning_d9d.optim.groups import ParameterGroup, check_patterns, groups_by_pattern
from lightning_d9d.optim.muon import MuonAdamW
from lightning_d9d.optim.rates import PiecewiseLR

OptimizerFactory = Callable[[Iterable], Optimizer]
"""Makes an optimizer from parameter groups: a class with settings in YAML, `partial(AdamW, lr=1e-3)` in Python."""
LRSchedulerFactory = Callable[[Optimizer], LRScheduler]
"""Makes a learning-rate schedule for an optimizer: a class with settings in YAML, a `partial` in Python."""

_LENGTHS = ("total_steps", "T_max", "total_iters")
"""Attributes of torch's schedules with the number of steps after which they end."""


class NamedParameters(NamedTuple):
    """Parameters by their names in the whole model, which several ranks may hold."""

    own: Mapping[str, nn.Parameter]
    """The parameters of this rank."""
    names: Sequence[str]
    """The names of all ranks' parameters."""
    embeddings: Sequence[str]
    """The names of embeddings, which have no weight decay unless a group sets it."""
    heads: Sequence[str] = ()
    """The names of matrices that have the shape of an embedding."""

    def kind_of_matrix(self, name: str) -> dict[str, Any]:
        """Return the facts about a parameter that `MuonAdamW` needs, as settings of its group."""
        is_of_words = name in self.embeddings or name in self.heads
        return {"matrices": False if is_of_words else None, "num_parts": 2 if "gate_up_proj" in name.split(".") else 1}


@dataclass(frozen=True)
class OptimizerSettings:
    """Settings that train a module: an optimizer, a schedule that is stepped with it, and groups of parameters.

    Raises:
        ConfigError: A value does not make an optimizer, a schedule or a group.
    """

    optimizer: OptimizerFactory
    lr_scheduler: LRSchedulerFactory | None = None
    parameter_groups: Sequence[ParameterGroup] = ()

    def __post_init__(self) -> None:
        examples = {"optimizer": "partial(AdamW, lr=1e-3)", "lr_scheduler": "partial(WarmupStableDecayLR, ...)"}
        for name, example in examples.items():
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise ConfigError(
                    f"{name}={value!r} does not make one; give a class with settings: class_path and init_args in a "
                    f"file, {example} in Python"
                )
        for group in self.parameter_groups:
            if not isinstance(group, ParameterGroup):
                raise ConfigError(f"parameter_groups has {group!r}; give ParameterGroup(pattern, lr=...)")

    def make_optimizer(self, parameters: NamedParameters) -> Optimizer:
        """Build the optimizer. Local.

        Raises:
            ConfigError: Groups match nothing or overlap, or have a weight decay that the optimizer does not support. Or
                the optimizer refuses its arguments or the parameters.
        """
        check_patterns(self.parameter_groups, parameters.names)
        with _refusals("optimizer"):
            optimizer = self.optimizer(self._groups(parameters))
        if isinstance(optimizer, MuonAdamW):
            optimizer = self.optimizer(self._groups(parameters, parameters.kind_of_matrix))
        for group in self.parameter_groups:
            if group.weight_decay is not None and "weight_decay" not in optimizer.defaults:
                raise ConfigError(
                    f"weight_decay={group.weight_decay} of the parameter group {group.pattern!r} has no effect, "
                    f"because {type(optimizer).__name__} does not support it; leave it out, or choose another optimizer"
                )
        return optimizer

    def _groups(
        self, parameters: NamedParameters, *of_name: Callable[[str], Mapping[str, Any]]
    ) -> list[dict[str, Any]]:
        return groups_by_pattern(parameters.own.items(), self.parameter_groups, parameters.embeddings, *of_name)

    def make_lr_scheduler(self, optimizer: Optimizer, total_steps: int | None) -> LRScheduler | None:
        """Build the schedule. Local.

        Args:
            optimizer: The optimizer that was made.
            total_steps: The number of optimizer steps of the whole run; None if it has no end.

        Returns:
            The schedule, if there is one.

        Raises:
            ConfigError: The schedule is longer than the run, or its length is needed and unknown, or it refuses its
                arguments.
        """
        if self.lr_scheduler is None:
            return None
        with _refusals("lr_scheduler", "" if total_steps is None else f"; the run has {total_steps} optimizer steps"):
            scheduler = self.lr_scheduler(optimizer)
        if isinstance(scheduler, PiecewiseLR) and scheduler.total_steps is None:
            scheduler.set_total_steps(total_steps)
        elif total_steps is not None:
            _check_length(scheduler, total_steps)
        return scheduler


@contextmanager
def _refusals(setting: str, advice: str = "") -> Iterator[None]:
    """Name the setting in an error of the class that it makes."""
    try:
        yield
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        if str(error).startswith("Muon only supports 2D"):
            advice = "; MuonAdamW takes all parameters, those that are not matrices with AdamW"
        raise ConfigError(f"`{setting}` cannot be made: {error}{advice}") from error


def _check_length(scheduler: LRScheduler, total_steps: int) -> None:
    for name in _LENGTHS:
        if (length := getattr(scheduler, name, 0)) > total_steps:
            kind = type(scheduler).__name__
            raise ConfigError(
                f"{kind}({name}={length}) is longer than the run, which has {total_steps} optimizer steps; set "
                f"{name}={total_steps}, or let the run have {length} (Trainer.max_steps)"
            )
