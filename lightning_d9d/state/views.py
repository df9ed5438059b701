"""Views: Tensors assembled from parts of others, known before there is any data. Mappers compute with views.

A `View` maps each part of a tensor to the part of a source that has its values. Splitting and joining views gives views
again, and their boxes still name the original sources. So a chain of mappers is one step for readers and writers. A
rank that needs a slice of the result finds the slices of the sources that it needs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_d9d.errors import StateError
from lightning_d9d.mesh.sharding import Sharding, ranges_on, sharding_of
from lightning_d9d.state.boxes import Box, MappedBox, Readable, size, whole_box


class Spec(NamedTuple):
    """Shape and dtype of a tensor, without its data."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None
    """The dtype; None if it is not known."""

    def __str__(self) -> str:
        known = "" if self.dtype is None else f" {str(self.dtype).removeprefix('torch.')}"
        return f"{list(self.shape)}{known}"


@dataclass(frozen=True)
class View:
    """A tensor assembled from parts of others."""

    name: str
    """Name for errors."""
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    boxes: tuple[MappedBox, ...]
    sharding: Sharding | None = None
    """Sharding over ranks. None: whole."""

    @classmethod
    def of(cls, name: str, spec: Spec | Tensor) -> View:
        """Return the view of all of one source."""
        shape = tuple(spec.shape)
        box = whole_box(shape)
        return cls(name, shape, spec.dtype, (MappedBox(box, name, box, tuple(range(len(box)))),), sharding_of(spec))

    @property
    def spec(self) -> Spec:
        """Shape and dtype."""
        return Spec(self.shape, self.dtype)

    @property
    def box(self) -> Box:
        """The box of all of it."""
        return whole_box(self.shape)

    def renamed(self, name: str) -> View:
        """Return the view under another name."""
        return dataclasses.replace(self, name=name)

    def cast(self, dtype: torch.dtype) -> View:
        """Return the view in another dtype."""
        boxes = tuple(mapped._replace(casts=(*mapped.casts, dtype)) for mapped in self.boxes)
        return dataclasses.replace(self, dtype=dtype, boxes=boxes)

    def narrow(self, dim: int, start: int, length: int) -> View:
        """Return the view of some indices of a dim."""
        held = tuple(range(start, start + length) if i == dim else r for i, r in enumerate(self._whole("split").box))
        boxes = tuple(mapped for each in self.boxes if (mapped := each.within(held)))
        return dataclasses.replace(self, shape=tuple(map(len, held)), boxes=boxes)

    def select(self, dim: int, index: int) -> View:
        """Return the view of one index of a dim, without that dim."""
        one = self.narrow(dim, index, 1)
        return one._with_dims([i for i in range(len(self.shape)) if i != dim])

    def permute(self, dims: Sequence[int]) -> View:
        """Return the view with the dims in another order."""
        return self._whole("transposed")._with_dims(dims)

    def as_sharded(self, sharding: Sharding) -> View:
        """Return the view sharded over ranks."""
        return dataclasses.replace(self._whole("distributed again"), sharding=sharding)

    def as_gathered(self) -> View:
        """Return the view whole on each rank."""
        if self.sharding is None:
            raise StateError(f"{self.name} is not a DTensor, so it cannot be gathered; remove it from Gather")
        return dataclasses.replace(self, sharding=None)

    def _with_dims(self, dims: Sequence[int]) -> View:
        boxes = tuple(
            MappedBox(
                tuple(each.place[i] for i in dims), each.source, each.box, tuple(each.dims[i] for i in dims), each.casts
            )
            for each in self.boxes
        )
        return dataclasses.replace(self, shape=tuple(self.shape[i] for i in dims), boxes=boxes)

    def _whole(self, done: str) -> View:
        if self.sharding is not None:
            raise StateError(
                f"{self.name} is sharded over ranks and cannot be {done}; put Gather before it, or Distribute last"
            )
        return self

    def _placed(self, dim: int, start: int, new: bool) -> tuple[MappedBox, ...]:
        """Return the boxes in a larger tensor: at an index of a `new` dim, or further along an existing one."""
        placed = []
        for mapped in self._whole("put together with others").boxes:
            before, there, after = mapped.place[:dim], mapped.place[dim : dim + 1], mapped.place[dim + 1 :]
            if new:
                place = (*before, range(start, start + 1), *there, *after)
                dims = (*mapped.dims[:dim], None, *mapped.dims[dim:])
            else:
                place = (*before, range(there[0].start + start, there[0].stop + start), *after)
                dims = mapped.dims
            placed.append(mapped._replace(place=place, dims=dims))
        return tuple(placed)


def checked_dim(name: str, num_dims: int, dim: int) -> int:
    """Return the dim counted from the front.

    Raises:
        StateError: The tensor has no such dim.
    """
    if not -num_dims <= dim < num_dims:
        raise StateError(f"{name} has {num_dims} dims, so {dim} is not one of them; give -{num_dims} to {num_dims - 1}")
    return dim % num_dims


def stack(name: str, views: Sequence[View], dim: int) -> View:
    """Stack views along a new dim."""
    first = _alike(name, views, None)
    dim = checked_dim(name, len(first.shape) + 1, dim)
    boxes = tuple(mapped for index, view in enumerate(views) for mapped in view._placed(dim, index, new=True))
    return View(name, (*first.shape[:dim], len(views), *first.shape[dim:]), first.dtype, boxes)


def concatenate(name: str, views: Sequence[View], dim: int) -> View:
    """Concatenate views along an existing dim."""
    dim = checked_dim(name, len(views[0].shape), dim)
    first = _alike(name, views, dim)
    boxes: list[MappedBox] = []
    end = 0
    for view in views:
        boxes += view._placed(dim, end, new=False)
        end += view.shape[dim]
    return View(name, (*first.shape[:dim], end, *first.shape[dim + 1 :]), first.dtype, tuple(boxes))


def _alike(name: str, views: Sequence[View], free_dim: int | None) -> View:
    first = views[0]
    for view in views:
        shapes = [[n for dim, n in enumerate(each.shape) if dim != free_dim] for each in (first, view)]
        if shapes[0] != shapes[1] or len(first.shape) != len(view.shape):
            raise StateError(
                f"{first.name} {list(first.shape)} and {view.name} {list(view.shape)} cannot be combined into {name}; "
                "their shapes must agree"
            )
        if first.dtype != view.dtype:
            raise StateError(
                f"{first.name} is {first.dtype} but {view.name} is {view.dtype}, so they cannot be combined into "
                f"{name}; put Cast before it"
            )
    return first


def inverted(views: Mapping[str, View], specs: Mapping[str, Spec]) -> dict[str, View]:
    """Return views that compute the sources from the tensors that `views` compute.

    Args:
        views: Whole views without common sources.
        specs: Specs of the sources.

    Raises:
        StateError: Some part of a source is in no view, or a view is sharded over ranks.
    """
    boxes: dict[str, list[MappedBox]] = {name: [] for name in specs}
    for name, view in views.items():
        for mapped in view._whole("turned around").boxes:
            dtype = specs[mapped.source].dtype
            place, _, box, dims, _ = mapped.flipped(name)
            boxes[mapped.source].append(MappedBox(place, name, box, dims, () if dtype is None else (dtype,)))
    for name, spec in specs.items():
        if sum(size(mapped.place) for mapped in boxes[name]) != size(whole_box(spec.shape)):
            raise StateError(
                f"the mapper does not keep all of {name}, so it cannot be inverted; use a mapper that keeps everything"
            )
    return {name: View(name, spec.shape, spec.dtype, tuple(boxes[name])) for name, spec in specs.items()}


def substituted(view: View, sources: Mapping[str, View]) -> View:
    """Replace sources that are views by their own sources. An unknown dtype becomes that of the sources."""
    boxes = []
    for mapped in view.boxes:
        values = sources[mapped.source]
        for dim, those in enumerate(mapped.box):
            values = values.narrow(dim, those.start, len(those))
        values = values._with_dims([dim for dim in mapped.dims if dim is not None])
        for dim, (there, of_source) in enumerate(zip(mapped.place, mapped.dims, strict=True)):
            boxes_here = values._placed(dim, there.start, new=of_source is None)
            length = (1,) if of_source is None else ()
            shape = (*values.shape[:dim], *length, *values.shape[dim:])
            values = dataclasses.replace(values, shape=shape, boxes=boxes_here)
        boxes += [each._replace(casts=each.casts + mapped.casts) for each in values.boxes]
    dtype = view.dtype or next((sources[mapped.source].dtype for mapped in view.boxes), None)
    return dataclasses.replace(view, dtype=dtype, boxes=tuple(boxes))


def materialized(views: Mapping[str, View], sources: Mapping[str, Readable]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors, one by one. Collective if DTensors become whole: each is gathered once.

    A view that is a whole source gets no new memory. For a view that is sharded over ranks, each rank takes its shard
    from its own sources.
    """
    gathered: dict[str, Tensor] = {}
    for name, view in views.items():
        yield name, _materialized(view, sources, gathered)


def _materialized(view: View, sources: Mapping[str, Readable], gathered: dict[str, Tensor]) -> Tensor:
    used = {mapped.source: sources[mapped.source] for mapped in view.boxes}
    first = next(iter(used.values()), None)
    dtype = view.dtype or (torch.get_default_dtype() if first is None else first.dtype)
    same = _unmoved(view, used)
    if isinstance(same, DTensor) and view.sharding == sharding_of(same):
        return view.boxes[0].cast(same).to(dtype)
    for name, value in used.items():
        if isinstance(value, DTensor):
            if name not in gathered:
                gathered[name] = value.full_tensor()
            used[name] = gathered[name]
    if view.sharding is None:
        same = _unmoved(view, used)
        return assembled(view, view.box, used, dtype) if same is None else view.boxes[0].cast(same).to(dtype)
    device_mesh, placements = view.sharding
    local = assembled(view, tuple(ranges_on(view.shape, device_mesh, placements)), used, dtype).to(
        device_mesh.device_type
    )
    stride = torch.empty(view.shape, device="meta").stride()
    return DTensor.from_local(
        local, device_mesh, placements, run_check=False, shape=torch.Size(view.shape), stride=stride
    )


def _unmoved(view: View, sources: Mapping[str, Readable]) -> Tensor | None:
    """Return the source that the view equals, element by element; None if it equals none."""
    if len(view.boxes) != 1:
        return None
    [mapped], source = view.boxes, sources[view.boxes[0].source]
    unmoved = mapped.box == mapped.place == view.box and mapped.dims == tuple(range(len(view.shape)))
    return source if unmoved and isinstance(source, Tensor) and tuple(source.shape) == view.shape else None


def assembled(view: View, box: Box, sources: Mapping[str, Readable], dtype: torch.dtype) -> Tensor:
    """Return a box of a view, assembled from the parts of its sources that can be read. Local."""
    devices = {value.device for value in sources.values() if isinstance(value, Tensor)}
    whole = torch.empty([len(held) for held in box], dtype=dtype, device=devices.pop() if devices else "cpu")
    for each in view.boxes:
        if mapped := each.within(box):
            mapped.copy(sources[mapped.source], whole[mapped.place_index()])
    return whole
