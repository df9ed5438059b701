"""Schedules are pure Python, so these tests start without torch.

Importing `lightning_d9d.schedule` imports the package around it first, and that torch. Here a stand-in for the package
is in its place, which becomes the package when somebody asks for anything that it has not.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any


class _UnreadPackage(ModuleType):
    """A package whose `__init__.py` has not run yet; its modules can be imported."""

    def __getattr__(self, name: str) -> Any:
        self.__class__ = ModuleType
        assert self.__spec__ is not None
        assert self.__spec__.loader is not None
        self.__spec__.loader.exec_module(self)
        return getattr(self, name)


def _defer_the_package(name: str) -> None:
    if name in sys.modules:
        return
    spec = importlib.util.find_spec(name)
    assert spec is not None
    package = _UnreadPackage(name)
    package.__spec__, package.__file__, package.__path__ = spec, spec.origin, spec.submodule_search_locations or []
    sys.modules[name] = package


_defer_the_package("lightning_d9d")
