"""Trees of tensors, which can be taken apart and put together again: batches, and outputs of stages.

A tree is a tensor, or a list, tuple, deque, NamedTuple, mapping (of any class) or dataclass of trees. Other leaves
(None, numbers, texts) are kept unchanged.
"""

from __future__ import annotations

import dataclasses
import reprlib
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from lightning_d9d.errors import ConfigError

_MAX_NAMED = 8
"""How many entries of a mapping an error names."""


class _Hole(NamedTuple):
    """The place of a tensor."""

    place: int


class _Branch(NamedTuple):
    """A container with its children by name (fields, keys) or by position."""

    kind: type
    names: tuple[Any, ...] | None
    children: tuple[Any, ...]


class Skeleton(NamedTuple):
    """A tree without its tensors; picklable if its other leaves are."""

    root: Any


def take_apart(tree: Any) -> tuple[list[Tensor], Skeleton]:
    """Return the tensors of a tree in a fixed order, and its skeleton."""
    tensors: list[Tensor] = []
    return tensors, Skeleton(_without(tree, tensors))


def put_together(skeleton: Skeleton, tensors: list[Tensor]) -> Any:
    """Return the tree with these tensors."""
    return _filled(skeleton.root, tensors)


def others(skeleton: Skeleton) -> list[Any]:
    """Return the leaves of a tree other than tensors: None, numbers, texts."""
    return [leaf for leaf in _leaves(skeleton.root) if not isinstance(leaf, _Hole)]


def in_words(skeleton: Skeleton, tensors: list[str]) -> str:
    """Describe the leaves of a tree in order, with these texts for tensors."""
    return ", ".join(tensors[leaf.place] if isinstance(leaf, _Hole) else repr(leaf) for leaf in _leaves(skeleton.root))


def described(tree: Any) -> str:
    """Describe a batch for errors: its class, and the names, types and shapes of its contents.

    Args:
        tree: Any object; only the first entries of long containers are named.

    Returns:
        The text, such as "a dict with ids: tensor int64 [4, 8], text: a list of 4 with str 'one', str 'two', ...".
    """
    is_container = children(tree) is not None or tree is None
    return _brief(tree, levels=2) if is_container else _with_article(_brief(tree))


def _with_article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiouAEIOU' else 'a'} {noun}"


def _brief(tree: Any, levels: int = 1) -> str:
    if isinstance(tree, Tensor):
        return f"tensor {str(tree.dtype).removeprefix('torch.')} {list(tree.shape)}"
    if (parts := children(tree)) is None:
        return "None" if tree is None else f"{type(tree).__name__} {reprlib.repr(tree)}"
    names, values = parts
    kind = _with_article(type(tree).__name__) + (f" of {len(values)}" if names is None else "")
    if not values:
        return f"an empty {type(tree).__name__}"
    most = _MAX_NAMED if names is not None else 2
    texts = [_brief(value, levels - 1) for value in values[:most]] if levels else []
    if names is not None and levels:
        texts = [f"{name}: {text}" for name, text in zip(names, texts, strict=False)]
    more = ["..."] if levels and len(values) > most else []
    return f"{kind} with {', '.join(texts + more)}" if levels else kind


def _leaves(node: Any) -> list[Any]:
    return [leaf for child in node.children for leaf in _leaves(child)] if isinstance(node, _Branch) else [node]


def children(tree: Any) -> tuple[tuple[Any, ...] | None, list[Any]] | None:
    """Return the names (keys or fields; None for positions) and values of a container; None for other objects."""
    if isinstance(tree, Tensor | type):
        return None
    if dataclasses.is_dataclass(tree):
        names = tuple(field.name for field in dataclasses.fields(tree) if field.init)
        return names, [getattr(tree, name) for name in names]
    if isinstance(tree, Mapping):
        return tuple(tree), list(tree.values())
    if isinstance(tree, list | tuple | deque):
        return None, list(tree)
    return None


def with_children(tree: Any, values: Mapping[Any, Any] | Sequence[Any]) -> Any:
    """Make a container of the same class as `tree`.

    Args:
        tree: A container that `children` takes apart.
        values: The new values: by name if it has names (a mapping may get other names), else in order.

    Raises:
        ConfigError: The class cannot be built from a dictionary or a list of values.
    """
    try:
        if isinstance(tree, defaultdict):
            assert isinstance(values, Mapping)
            return defaultdict(tree.default_factory, values)
        names = tuple(values) if isinstance(values, Mapping) else None
        return _made(type(tree), names, list(values.values()) if isinstance(values, Mapping) else list(values))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"a batch has a {type(tree).__name__}, which cannot be built from new values ({error}). Make it a "
            "dictionary in the DataLoader's collate_fn, or override split_batch(batch, n)"
        ) from error


def copy_containers(tree: Any) -> Any:
    """Copy all containers but not their leaves; dataclasses, and classes that cannot be built again, are not copied."""
    parts = None if dataclasses.is_dataclass(tree) else children(tree)
    if parts is None:
        return tree
    names, values = parts
    copies = [copy_containers(value) for value in values]
    try:
        return with_children(tree, copies if names is None else dict(zip(names, copies, strict=True)))
    except ConfigError:
        return tree


def _without(tree: Any, tensors: list[Tensor]) -> Any:
    if isinstance(tree, Tensor):
        tensors.append(tree)
        return _Hole(len(tensors) - 1)
    parts = children(tree)
    if parts is None:
        return tree
    names, values = parts
    kind = dict if isinstance(tree, defaultdict) else type(tree)  # its function need not be sent
    return _Branch(kind, names, tuple(_without(value, tensors) for value in values))


def _filled(node: Any, tensors: list[Tensor]) -> Any:
    if isinstance(node, _Hole):
        return tensors[node.place]
    if not isinstance(node, _Branch):
        return node
    return _made(node.kind, node.names, [_filled(child, tensors) for child in node.children])


def _made(kind: type, names: tuple[Any, ...] | None, values: list[Any]) -> Any:
    if names is None:
        return kind(*values) if hasattr(kind, "_fields") else kind(values)  # type: ignore[call-arg]
    named = dict(zip(names, values, strict=True))
    return kind(**named) if dataclasses.is_dataclass(kind) else kind(named)  # type: ignore[call-arg]
