"""Arguments of a module in a checkpoint: plain values, for which nothing is imported.

The command line saves a dataclass as a dict, an enum's member as its name and a tuple as a list. Any other object
becomes the name of its class with arguments. Lightning passes all of that to jsonargparse, which imports the classes
that the file names.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import reprlib
import types
import typing
from collections.abc import Mapping
from enum import Enum
from typing import Any, Union

from lightning.pytorch.core import saving

from lightning_d9d.errors import StateError
from lightning_d9d.optim import ParameterGroup
from lightning_d9d.optim.settings import LRSchedulerFactory, OptimizerFactory

_BY_NAME = {collections.abc.Callable, type}
"""Annotations of values that the command line saves as an import path."""
_OF_TRAINING = tuple(Union[kind, None] for kind in (OptimizerFactory, LRSchedulerFactory, list[ParameterGroup]))  # noqa: UP007
"""Annotations of `D9DModule`'s arguments that configure its training."""


def build(kind: type, arguments: Mapping[str, Any]) -> Any:
    """Make an object of a class that the caller chose, from arguments of a checkpoint. Local.

    Args:
        kind: The class. Its annotations and those of its bases determine the form of an argument.
        arguments: By name. The class in the file is ignored, and so are the classes of optimizers: they are settings of
            a run.

    Raises:
        StateError: An argument does not fit its annotation, or is an object that would need an import.
    """
    hints: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        hints |= _hints(base.__init__)
    if not callable(arguments.get("optimizer")):
        arguments = {name: value for name, value in arguments.items() if hints.get(name) not in _OF_TRAINING}
    built = {name: argument(name, hints.get(name, Any), value) for name, value in arguments.items()}
    built.pop("_class_path", None)
    return kind(**built)


NEVER_IMPORTS = {"_instantiator": f"{build.__module__}.{build.__qualname__}", "_class_path": None}
"""Arguments for Lightning's loading, which replace the file's: `build` makes the object, whatever the file says."""

getattr(saving, "_ALLOWED_INSTANTIATORS", set()).add(NEVER_IMPORTS["_instantiator"])  # before Lightning 2.6.6: any


def argument(name: str, annotation: Any, value: Any) -> Any:
    """Convert a plain value to the form of its annotation.

    Raises:
        StateError: The value does not fit, or names an object that would have to be imported.
    """
    try:
        return _as_annotated(annotation, value)
    except (StateError, TypeError, ValueError, LookupError) as error:
        raise StateError(
            f"the checkpoint has {name[:80]}={reprlib.repr(value)}, which cannot be used ({error}); pass {name[:80]} "
            "to load_from_checkpoint, or weights_only=False if you trust a file"
        ) from error


def _as_annotated(annotation: Any, value: Any) -> Any:
    is_union = typing.get_origin(annotation) in (Union, types.UnionType)
    options = typing.get_args(annotation) if is_union else (annotation,)
    kinds = [typing.get_origin(option) or option for option in options]
    for kind in kinds:
        if value is None or kind is Any or (isinstance(kind, type) and isinstance(value, kind)):
            return value
        if isinstance(value, Mapping) and isinstance(kind, type) and dataclasses.is_dataclass(kind):
            hints = _hints(kind)
            return kind(**{name: _as_annotated(hints.get(name, Any), inner) for name, inner in value.items()})
        if isinstance(value, list) and kind is tuple:
            return tuple(value)
        if isinstance(value, str) and isinstance(kind, type) and issubclass(kind, Enum):
            return kind[value]
    if (isinstance(value, Mapping) and "class_path" in value) or (isinstance(value, str) and {*kinds} & _BY_NAME):
        raise StateError("nothing is imported for a checkpoint")
    if any(map(dataclasses.is_dataclass, kinds)):
        raise StateError(f"{annotation} is expected")
    return value


def _hints(annotated: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(annotated)
    except NameError:  # of a name that only a type checker imports
        return {}
