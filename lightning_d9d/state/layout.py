"""Which part of a parameter is which part of a tensor in a file.

Everything is a box: what a rank holds of a parameter, an expert's gate in a stack of experts, a part of the vocabulary
in the matrix of all of it. To read or to write is to intersect boxes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

Box = tuple[range, ...]
"""The indices of each dim, in steps of one."""

Index = tuple[int | slice, ...]
"""What picks a box out of a tensor."""


def whole_box(shape: Iterable[int]) -> Box:
    """All of a tensor."""
    return tuple(map(range, shape))


class LocalShard(NamedTuple):
    """What this rank holds of a parameter: `values` shares the parameter's memory, `box` says where they belong."""

    values: Tensor
    box: Box


class Piece(NamedTuple):
    """A part of a parameter that a file has in one tensor, or in a part of one.

    `box`, of the parameter, and `place`, of the tensor, have the same lengths; where the parameter has more dims than
    the tensor, as stacks do, its first ones have length one in `box`.
    """

    box: Box
    tensor: str
    place: Box

    def overlap(self, held: Box) -> tuple[Index, Index] | None:
        """The part of the piece in `held`, another box of the parameter.

        Returns:
            Its index in the values of `held`, without the first dims that the tensor lacks, and its index in the
            tensor; None if nothing overlaps.
        """
        shared = []
        for ours, theirs in zip(self.box, held, strict=True):
            both = range(max(ours.start, theirs.start), min(ours.stop, theirs.stop))
            if not both:
                return None
            shared.append(both)
        stacked = len(self.box) - len(self.place)
        in_held: list[int | slice] = [
            slice(both.start - theirs.start, both.stop - theirs.start)
            for both, theirs in zip(shared, held, strict=True)
        ]
        in_held[:stacked] = [both.start - theirs.start for both, theirs in zip(shared[:stacked], held, strict=False)]
        in_tensor = [
            slice(both.start - ours.start + there.start, both.stop - ours.start + there.start)
            for both, ours, there in zip(shared[stacked:], self.box[stacked:], self.place, strict=True)
        ]
        return tuple(in_held), tuple(in_tensor)


def tensor_shapes(pieces: Iterable[Piece]) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor that the pieces make up, in the order of the pieces."""
    shapes: dict[str, tuple[int, ...]] = {}
    for piece in pieces:
        stops = tuple(there.stop for there in piece.place)
        shapes[piece.tensor] = tuple(map(max, stops, shapes.get(piece.tensor, stops)))
    return shapes
