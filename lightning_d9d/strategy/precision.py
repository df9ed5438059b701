"""Precision: Precision plugins that the strategy supports, and how they clip."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from lightning.pytorch.plugins.precision import (
    BitsandbytesPrecision,
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
    TransformerEnginePrecision,
)

from lightning_d9d.errors import ConfigError
from lightning_d9d.loop.patches import Patches

_WORKING = (Precision, DoublePrecision, HalfPrecision, MixedPrecision)
_EXCHANGING = (BitsandbytesPrecision, TransformerEnginePrecision)
"""Plugins that put layers of their own into a module; no code shards these or splits them into stages."""
_REMEDY = "use precision='bf16-mixed', 'bf16-true', '32-true' or '64-true'"


def check_precision(plugin: Precision, *, is_d9d: bool) -> None:
    """Raise `ConfigError` for a plugin of Lightning's that is not known to work, and for one that scales the loss.

    Plugins of other strategies do not work, and nor does a loss scaler, which cannot follow microbatches and stages. A
    user's own subclass of a supported class is accepted.

    Args:
        plugin: The plugin.
        is_d9d: Whether it is for a `D9DModule`. The layers of plain modules may be exchanged.
    """
    working = _WORKING if is_d9d else (*_WORKING, *_EXCHANGING)
    for cls in type(plugin).__mro__:
        is_of_lightning = issubclass(cls, Precision) and cls.__module__.split(".")[0] == "lightning"
        if is_of_lightning and cls not in working:
            raise ConfigError(
                f"the precision plugin {cls.__name__} does not support {'a D9DModule' if is_d9d else 'D9DStrategy'}, "
                f"which works with {', '.join(each.__name__ for each in working)} and their subclasses; {_REMEDY}"
            )
    if getattr(plugin, "scaler", None) is not None or plugin.precision == "16-mixed":
        raise ConfigError(f"precision={plugin.precision!r} scales the loss, which D9DStrategy does not; {_REMEDY}")


def step_context(plugin: Precision, kind: str) -> AbstractContextManager:
    """Return the context of a step of evaluation: "val", "test" or "predict"."""
    contexts = {
        "val": plugin.val_step_context,
        "test": plugin.test_step_context,
        "predict": plugin.predict_step_context,
    }
    return contexts[kind]()


def clip_by(patches: Patches, plugin: Precision, by_norm: Callable[..., Any], by_value: Callable[..., Any]) -> None:
    """Replace how the Trainer's plugin clips gradients in this run; a user's own way stays. Local.

    Args:
        patches: The patches of the run.
        plugin: The plugin.
        by_norm: As `Precision.clip_grad_by_norm`.
        by_value: As `Precision.clip_grad_by_value`.
    """
    if type(plugin).clip_grad_by_norm is Precision.clip_grad_by_norm:
        patches.replace(plugin, "clip_grad_by_norm", by_norm)
    if type(plugin).clip_grad_by_value is Precision.clip_grad_by_value:
        patches.replace(plugin, "clip_grad_by_value", by_value)
    if type(plugin) is MixedPrecision:  # refuses fused optimizers, which matter to a loss scaler only
        patches.replace(plugin, "clip_gradients", partial(Precision.clip_gradients, plugin))
