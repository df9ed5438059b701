"""Triton's interpreter without the work that it repeats for every call and every operation."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any


@cache
def quicken_interpreter() -> None:
    """Leave out what takes more than half of the interpreter's time and changes no result.

    - It looks for functions to replace again whenever a kernel calls a device function. A launch has replaced them by
      then, and puts them back at its end.
    - It computes for every sum and product of integers whether they overflow, and looks at that only in debug mode.
    - It makes a table of all dtypes whenever it looks one up.
    """
    if find_spec("triton") is None:
        return
    from triton.runtime import interpreter

    builder = getattr(interpreter, "interpreter_builder", None)
    if builder is not None and hasattr(builder.options, "sanitize_overflow"):
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)
    for name, quicker in (("_patch_lang", _once_a_launch), ("_get_np_dtype", _by_name)):
        if function := getattr(interpreter, name, None):  # else another version, which works, but slowly
            setattr(interpreter, name, quicker(function))


def _once_a_launch(replace: Callable[[Any], Any]) -> Callable[[Any], Any]:
    import triton.language as tl

    def replace_once(function: Any) -> Any:
        languages = [each for each in function.__globals__.values() if inspect.ismodule(each) and each in (tl, tl.core)]
        if any(tl.core.is_builtin(each.load) for each in languages):
            return replace(function)
        return None  # only a launch needs a result

    return replace_once


def _by_name(dtype_of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    known: dict[str, Any] = {}

    def look_up(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in known:
            known[name] = dtype_of(dtype)
        return known[name]

    return look_up
