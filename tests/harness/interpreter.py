"""Triton's interpreter without the work that it repeats for every call of a device function."""

from __future__ import annotations

import inspect
from functools import cache
from importlib.util import find_spec
from typing import Any


@cache
def quicken_interpreter() -> None:
    """Make the interpreter replace functions of `triton.language` once a launch.

    It looks for functions to replace again whenever a kernel calls a device function, which takes a third of its time.
    A launch has replaced them by then, and puts them back at its end.
    """
    if find_spec("triton") is None:
        return
    import triton.language as tl
    from triton.runtime import interpreter

    replace = getattr(interpreter, "_patch_lang", None)
    if replace is None:  # another version, which works, but slowly
        return

    def replace_once(function: Any) -> Any:
        languages = [each for each in function.__globals__.values() if inspect.ismodule(each) and each in (tl, tl.core)]
        if any(tl.core.is_builtin(each.load) for each in languages):
            return replace(function)
        return None  # only a launch needs a result

    interpreter._patch_lang = replace_once
