"""What stages hand over: trees of tensors, taken apart and put together again.

A tree is a tensor, or a list, tuple, NamedTuple, mapping or dataclass of trees; all else in it (None, numbers, texts)
is carried as it is.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor


class _Hole(NamedTuple):
    """Where a tensor was."""

    place: int


class _Branch(NamedTuple):
    """A container: by names (fields, keys) or, without, by position."""

    kind: type
    names: tuple[Any, ...] | None
    children: tuple[Any, ...]


class Skeleton(NamedTuple):
    """A tree without its tensors; picklable if what else is in it is."""

    root: Any


def take_apart(tree: Any) -> tuple[list[Tensor], Skeleton]:
    """The tensors of a tree in a fixed order, and the rest."""
    tensors: list[Tensor] = []
    return tensors, Skeleton(_without(tree, tensors))


def put_together(skeleton: Skeleton, tensors: list[Tensor]) -> Any:
    """The tree whose tensors these are."""
    return _filled(skeleton.root, tensors)


def others(skeleton: Skeleton) -> list[Any]:
    """What a tree carries beside tensors: None, numbers, texts."""
    return [leaf for leaf in _leaves(skeleton.root) if not isinstance(leaf, _Hole)]


def in_words(skeleton: Skeleton, tensors: list[str]) -> str:
    """The leaves of a tree in order, tensors by these texts."""
    return ", ".join(tensors[leaf.place] if isinstance(leaf, _Hole) else repr(leaf) for leaf in _leaves(skeleton.root))


def _leaves(node: Any) -> list[Any]:
    return [leaf for child in node.children for leaf in _leaves(child)] if isinstance(node, _Branch) else [node]


def _without(tree: Any, tensors: list[Tensor]) -> Any:
    if isinstance(tree, Tensor):
        tensors.append(tree)
        return _Hole(len(tensors) - 1)
    names: tuple[Any, ...] | None = None
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        names = tuple(field.name for field in dataclasses.fields(tree) if field.init)
        values = [getattr(tree, name) for name in names]
    elif isinstance(tree, Mapping):
        names, values = tuple(tree), list(tree.values())
    elif isinstance(tree, list | tuple):
        values = list(tree)
    else:
        return tree
    kind = dict if isinstance(tree, defaultdict) else type(tree)  # its function need not travel
    return _Branch(kind, names, tuple(_without(value, tensors) for value in values))


def _filled(node: Any, tensors: list[Tensor]) -> Any:
    if isinstance(node, _Hole):
        return tensors[node.place]
    if not isinstance(node, _Branch):
        return node
    values = [_filled(child, tensors) for child in node.children]
    if dataclasses.is_dataclass(node.kind):
        assert node.names is not None
        return node.kind(**dict(zip(node.names, values, strict=True)))
    if node.names is not None:
        return node.kind(dict(zip(node.names, values, strict=True)))  # type: ignore[call-arg]
    if hasattr(node.kind, "_fields"):
        return node.kind(*values)
    return node.kind(values)  # type: ignore[call-arg]
