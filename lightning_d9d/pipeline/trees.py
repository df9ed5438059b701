"""What stages hand over: trees of tensors, taken apart and put together again.

A tree is a tensor, or a list, tuple, NamedTuple, mapping or dataclass of trees, or whatever torch's pytree knows; all
else in it (None, numbers, texts) is carried as it is.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten


class _Hole(NamedTuple):
    """Where a tensor was."""

    place: int


class Skeleton(NamedTuple):
    """A tree without its tensors; picklable if what else is in it is."""

    spec: TreeSpec
    leaves: tuple[Any, ...]


class _Dataclass(NamedTuple):
    kind: type
    fields: Skeleton


def take_apart(tree: Any) -> tuple[list[Tensor], Skeleton]:
    """The tensors of a tree in a fixed order, and the rest."""
    tensors: list[Tensor] = []
    return tensors, _skeleton(tree, tensors)


def put_together(skeleton: Skeleton, tensors: list[Tensor]) -> Any:
    """The tree whose tensors these are."""
    leaves = [_leaf(leaf, tensors) for leaf in skeleton.leaves]
    return tree_unflatten(leaves, skeleton.spec)


def _skeleton(tree: Any, tensors: list[Tensor]) -> Skeleton:
    leaves, spec = tree_flatten(tree)
    rest: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            rest.append(_Hole(len(tensors)))
            tensors.append(leaf)
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            fields = {field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf) if field.init}
            rest.append(_Dataclass(type(leaf), _skeleton(fields, tensors)))
        else:
            rest.append(leaf)
    return Skeleton(spec, tuple(rest))


def _leaf(leaf: Any, tensors: list[Tensor]) -> Any:
    if isinstance(leaf, _Hole):
        return tensors[leaf.place]
    if isinstance(leaf, _Dataclass):
        return leaf.kind(**put_together(leaf.fields, tensors))
    return leaf
