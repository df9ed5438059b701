"""Processes that import one package before all others.

This module imports nothing itself: what a process is to run reaches it as bytes, and brings its own imports.
"""

from __future__ import annotations

import pickle
from importlib import import_module


def importing_first(package: str, pickled: bytes) -> None:
    """Import the package, if one is named, and then call a pickled function with the arguments pickled behind it."""
    if package:
        import_module(package)
    function, *arguments = pickle.loads(pickled)
    function(*arguments)
