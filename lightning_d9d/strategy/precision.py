"""Precision: which plugins the strategy takes."""

from __future__ import annotations

from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision

from lightning_d9d.errors import ConfigError

_WORKING = (Precision, DoublePrecision, HalfPrecision, MixedPrecision)
_REMEDY = "use precision='bf16-mixed', 'bf16-true', '32-true' or '64-true'"


def check_precision(plugin: Precision) -> None:
    """Raise `ConfigError` for a plugin of Lightning's that is not known to work, and for one that scales the loss.

    Those that do not work go with another strategy or put in layers of their own, which nobody here shards. A loss
    scaler cannot follow microbatches and stages. A user's own subclass of a class that works is taken.
    """
    for cls in type(plugin).__mro__:
        is_of_lightning = issubclass(cls, Precision) and cls.__module__.split(".")[0] == "lightning"
        if is_of_lightning and cls not in _WORKING:
            raise ConfigError(
                f"the precision plugin {cls.__name__} is not for D9DStrategy, which works with "
                f"{', '.join(each.__name__ for each in _WORKING)} and their subclasses; {_REMEDY}"
            )
    if getattr(plugin, "scaler", None) is not None or plugin.precision == "16-mixed":
        raise ConfigError(f"precision={plugin.precision!r} scales the loss, which D9DStrategy does not; {_REMEDY}")
