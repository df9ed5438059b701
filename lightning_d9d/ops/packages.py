"""Packages that ops use if they are installed."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType

from lightning_d9d.log import logger


@cache
def optional_module(name: str) -> ModuleType | None:
    """Return the module, or None if it is not installed. A warning names a module that fails to import."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):
            logger.warning("%s is installed, but not what it needs: %s. Ops run without it", name, error)
    except Exception as error:  # one that was built for other versions may raise anything
        logger.warning("%s cannot be imported: %s: %s. Ops run without it", name, type(error).__name__, error)
    return None
