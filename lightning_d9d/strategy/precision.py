"""Precision: which plugins the strategy takes."""

from __future__ import annotations

from lightning.pytorch.plugins.precision import MixedPrecision, Precision

from lightning_d9d.errors import ConfigError


def check_precision(plugin: Precision) -> None:
    """Raise `ConfigError` for float16 mixed precision, whose loss scaling cannot follow microbatches and stages."""
    if isinstance(plugin, MixedPrecision) and plugin.precision == "16-mixed":
        raise ConfigError(
            "precision='16-mixed' scales the loss, which D9DStrategy does not support; use 'bf16-mixed', 'bf16-true' "
            "or '32-true'"
        )
