"""Optimizer steps, which are skipped if gradients are unusable, with as few host syncs as the optimizer allows."""

from __future__ import annotations

import inspect
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_d9d.errors import ConfigError
from lightning_d9d.strategy.empty import EmptyBatches

_HOOKS_ON_GRADIENTS = (
    "on_after_backward",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
    "clip_gradients",
    "optimizer_step",
)
_SCALAR_DTYPES = {torch.float32, torch.bfloat16}
"""Dtypes of sums that must be wider: sums over many tokens overflow in float16, and a float32 factor would round
float64 gradients."""


class OptimizerStep:
    """Steps optimizers, or skips steps and counts them.

    Optimizers that take `found_inf` (torch's fused ones) skip on the device. For others the host reads one flag a step.
    It does so for a first step, too, because fused SGD would leave its momentum uninitialized if the device skipped
    that step.

    Args:
        device: Device of the flags.
    """

    def __init__(self, device: torch.device) -> None:
        self._skipped = torch.zeros((), dtype=torch.int64, device=device)
        self._has_stepped = False
        self.empty = EmptyBatches(device)
        """A flag for steps that are skipped because nothing counted."""

    def __call__(self, optimizer: Optimizer, skip: Tensor | None, factor: Tensor | None = None, **kwargs: Any) -> None:
        """Call `optimizer.step(**kwargs)` unless `skip`.

        Args:
            optimizer: Any optimizer; with a factor one that `takes_scalars`.
            skip: A bool on the device, equal on every rank. None: never.
            factor: Factor by which gradients are multiplied as they are read, a float32 on the device.
            kwargs: For `step`.
        """
        on_device = skip is not None and self.skips_on_device(optimizer)
        if skip is not None and not on_device and skip.item():
            self._skipped += 1
            return
        found_inf = None
        if on_device:
            assert skip is not None
            self._skipped += skip
            found_inf = skip.float()
        with scalars(optimizer, found_inf, factor):
            optimizer.step(**kwargs)
        self._has_stepped = True

    def skips_on_device(self, optimizer: Optimizer) -> bool:
        """Return whether the next step of the optimizer decides on the device whether it is skipped."""
        return takes_scalars(optimizer) and self._has_stepped

    @property
    def skipped(self) -> Tensor:
        """The number of skipped steps, int64 on the device."""
        return self._skipped


@contextmanager
def scalars(optimizer: Optimizer, found_inf: Tensor | None, factor: Tensor | None = None) -> Generator[None]:
    """Make a step read from the device whether it is skipped, and the factor of gradients, inside the block.

    Args:
        optimizer: Any optimizer; one that `takes_scalars` unless both others are None.
        found_inf: The step is skipped unless this is 0.
        factor: A float32.
    """
    if found_inf is not None or factor is not None:
        optimizer.grad_scale = None if factor is None else 1 / factor  # type: ignore[attr-defined]
        optimizer.found_inf = found_inf  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for name in ("grad_scale", "found_inf"):
            vars(optimizer).pop(name, None)


def check_steps_once(optimizer: Optimizer) -> None:
    """Raise `ConfigError` for an optimizer that needs a closure to call several times."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"{type(optimizer).__name__} runs its closure several times a step. A D9DModule's schedule runs once, and "
            "skip_nonfinite looks at gradients once. Choose an optimizer whose step() works without a closure, or a "
            "plain LightningModule without skip_nonfinite"
        )


def leaves_gradients_alone(module: L.LightningModule) -> bool:
    """Return whether no module, Trainer or callback reads gradients between backward and step, or clips values."""
    trainer: Any = module.trainer
    return trainer.gradient_clip_algorithm != "value" and not hooks_on_gradients(module)


def hooks_on_gradients(module: L.LightningModule) -> list[str]:
    """Return the names of hooks, of the module and of callbacks, that may read gradients before a step."""
    trainer: Any = module.trainer
    watchers = [(module, L.LightningModule), *((callback, L.Callback) for callback in trainer.callbacks)]
    return [
        f"{type(watcher).__name__}.{hook}"
        for watcher, parent in watchers
        for hook in _HOOKS_ON_GRADIENTS
        if hasattr(parent, hook) and is_overridden(hook, watcher, parent)
    ]


def check_parameter_groups(optimizer: Optimizer) -> None:
    """Raise `ConfigError` for a group of parameters that torch cannot step together."""
    for group in optimizer.param_groups:
        parameters = group["params"]
        if len({isinstance(parameter, DTensor) for parameter in parameters}) < 2:
            continue
        on_cpu = all(parameter.device.type == "cpu" for parameter in parameters)
        batched = group.get("fused") or group.get("foreach") or (group.get("foreach", False) is None and not on_cpu)
        if batched:
            raise ConfigError(
                f"a group of {type(optimizer).__name__} has plain parameters and DTensors, such as experts on several "
                "ranks. Fused and foreach steps cannot mix them: use lightning_d9d.optim.parameter_groups(module, "
                "weight_decay), or foreach=False"
            )


def takes_scalars(optimizer: Optimizer) -> bool:
    """Return whether its `step` divides gradients by `grad_scale`, and skips the update if `found_inf` says so."""
    supports = getattr(optimizer, "_step_supports_amp_scaling", False)
    return supports and all(group.get("fused", True) for group in optimizer.param_groups)  # a loaded group may not be


def may_defer_scaling(
    module: L.LightningModule,
    optimizers: Iterable[Optimizer],
    parameters: Iterable[nn.Parameter],
    plugin: Precision,
) -> bool:
    """Return whether optimizers can take division and clipping as a factor, without visible effect. Local.

    Args:
        module: Module attached to a Trainer, whose callbacks are checked, too.
        optimizers: The module's.
        parameters: Parameters that they train.
        plugin: Clips gradients.
    """
    return (
        all(takes_scalars(each) and not each._optimizer_step_pre_hooks for each in optimizers)
        and {parameter.dtype for parameter in parameters} <= _SCALAR_DTYPES
        and type(plugin).clip_grad_by_norm is Precision.clip_grad_by_norm
        and leaves_gradients_alone(module)
    )
