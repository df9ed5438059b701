"""Boxes of tensors, and the mapping of a tensor's box to a box of another tensor.

Everything is a box: a rank's part of a parameter, an expert's gate in a stack of experts, a part of the vocabulary.
Reading and writing intersect boxes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from lightning_d9d.errors import StateError
from lightning_d9d.mesh.sharding import local, local_ranges

Box = tuple[range, ...]
"""The indices of each dim, in steps of one."""

Index = tuple[int | slice, ...]
"""The index that picks a box out of a tensor."""


class Readable(Protocol):
    """A tensor in memory, or one in a file whose slices can be read."""

    @property
    def shape(self) -> Sequence[int]:
        """The shape of the whole."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the slices."""
        ...

    def __getitem__(self, index: Any, /) -> Tensor:
        """Read the elements that `index`, an `Index`, selects."""
        ...


@runtime_checkable
class Copied(Protocol):
    """A `Readable` that can be copied without being in memory as a whole."""

    def copy_to(self, index: Index, target: Tensor, casts: Sequence[torch.dtype] = ()) -> None:
        """Copy the elements at the index, cast to some dtypes one after the other, into a tensor of their shape."""
        ...


class LocalShard(NamedTuple):
    """The shard of a tensor on this rank: `values` shares its memory or reads its file, `box` is their place."""

    values: Any
    """A `Tensor`; to write from, any `Readable`."""
    box: Box

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> LocalShard:
        """Take the shard that this rank holds of a DTensor, or all of a plain tensor.

        Raises:
            StateError: The tensor, of this name, is on the meta device.
        """
        values = local(tensor)
        if values.is_meta:
            raise StateError(f"{name} is on the meta device: call to_empty(device=...) on the model first")
        return cls(values, tuple(local_ranges(tensor)))


def memory_of(tensor: Tensor) -> object:
    """Return an id of the memory of a rank's part: equal for one tensor under two names, and for its `detach()`."""
    values = local(tensor)
    return values.untyped_storage()._cdata, values.storage_offset(), values.dtype, values.shape, values.stride()


def whole_box(shape: Iterable[int]) -> Box:
    """Return the box that is all of a tensor."""
    return tuple(map(range, shape))


def size(box: Box) -> int:
    """Return the number of elements in a box."""
    return math.prod(map(len, box))


class MappedBox(NamedTuple):
    """A box of a tensor that has the values of a box of another one, its source, perhaps with dims in another order.

    If one of the two has a dim that the other lacks, as stacks do, its box has length one there.
    """

    place: Box
    """The box in the tensor."""
    source: str
    box: Box
    """The box in the source."""
    dims: tuple[int | None, ...]
    """The source's dim for each dim of the tensor; None if the source lacks it."""
    casts: tuple[torch.dtype, ...] = ()
    """Dtypes to which the values are cast on their way from the source, one after the other. Each may round."""

    def within(self, held: Box) -> MappedBox | None:
        """Return the part in `held`, a box of the tensor, with its place in `held`; None if they do not overlap."""
        if all(
            not ours.start and there.start < there.stop <= ours.stop
            for there, ours in zip(self.place, held, strict=True)
        ):
            return self
        place, box = [], list(self.box)
        for there, ours, dim in zip(self.place, held, self.dims, strict=True):
            start, stop = max(there.start, ours.start), min(there.stop, ours.stop)
            if start >= stop:
                return None
            place.append(range(start - ours.start, stop - ours.start))
            if dim is not None:
                shift = self.box[dim].start - there.start
                box[dim] = range(start + shift, stop + shift)
        return MappedBox(tuple(place), self.source, tuple(box), self.dims, self.casts)  # `_replace` is far slower

    def flipped(self, tensor: str) -> MappedBox:
        """Return the mapped box seen from the source; `tensor` is the tensor's name. The casts stay the same."""
        place_of = {dim: place for place, dim in enumerate(self.dims)}
        dims = tuple(place_of.get(dim) for dim in range(len(self.box)))
        return MappedBox(self.box, tensor, self.place, dims, self.casts)

    def place_index(self) -> Index:
        """Return the index of the part in the tensor, without the dims that the source lacks."""
        return tuple(
            there.start if dim is None else slice(there.start, there.stop)
            for there, dim in zip(self.place, self.dims, strict=True)
        )

    def order(self) -> list[int]:
        """Return the permutation from the source's dims, in the form of `flipped().place_index()`, to the tensor's."""
        dims = [dim for dim in self.dims if dim is not None]
        return [sorted(dims).index(dim) for dim in dims]

    def cast(self, values: Tensor) -> Tensor:
        """Cast values of the source to those of the tensor."""
        for dtype in self.casts:
            values = values.to(dtype)
        return values

    def take(self, source: Readable) -> Tensor:
        """Read the values from the source, in the form in which `place_index` selects them from the tensor."""
        return self.cast(source[self.flipped("").place_index()]).permute(self.order())

    def copy(self, source: Readable, target: Tensor) -> None:
        """Copy the values into `target`, the part that `place_index` selects from the tensor."""
        if isinstance(source, Copied):
            in_order_of_source = target.permute([*map(self.order().index, range(target.dim()))])
            source.copy_to(self.flipped("").place_index(), in_order_of_source, self.casts)
        else:
            target.copy_(self.take(source))
