"""Registers `strategy="d9d"` with Lightning, whichever of the two packages is imported first."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_REGISTRY = "lightning.pytorch.strategies"
"""The module whose `StrategyRegistry` resolves the names of strategies."""


def register_with_lightning() -> None:
    """Register "d9d" now if Lightning is imported, otherwise as soon as it is. The function itself imports nothing."""
    if _REGISTRY in sys.modules:
        _register(sys.modules[_REGISTRY])
    else:
        sys.meta_path.insert(0, _WaitForLightning())


def _register(strategies: ModuleType) -> None:
    strategies.StrategyRegistry.register(
        "d9d", _make, description="Any mix of parallelism for D9DModules, data-parallel replicas for plain modules"
    )


def _make(**options: Any) -> Any:
    return importlib.import_module("lightning_d9d.strategy.strategy").D9DStrategy(**options)


class _WaitForLightning(MetaPathFinder):
    """Registers once the module with the registry has run; it does not find modules itself."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _REGISTRY:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            _register(module)

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec
