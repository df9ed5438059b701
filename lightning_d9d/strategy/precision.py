"""Precision: which plugins the strategy takes, and gradient clipping by a norm that is kept for logging."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch import Tensor, nn

from lightning_d9d.errors import ConfigError


def check_precision(plugin: Precision) -> None:
    """Raise `ConfigError` for float16 mixed precision, whose loss scaling cannot follow microbatches and stages."""
    if isinstance(plugin, MixedPrecision) and plugin.precision == "16-mixed":
        raise ConfigError(
            "precision='16-mixed' scales the loss, which D9DStrategy does not support; use 'bf16-mixed', 'bf16-true' "
            "or '32-true'"
        )


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The 2-norm of all gradients as one number on their device; 0 where there are none."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    return torch.nn.utils.get_total_norm(gradients)


def clip_gradients_by_norm(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale gradients in place so that their norm is at most `max_norm`; returns the norm before. No host sync."""
    parameters = [p for p in parameters if p.grad is not None]
    norm = gradient_norm(parameters)
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm
