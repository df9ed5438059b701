"""Functions of whole matrices whose parts are on several ranks.

[Note: whole matrices] A tensor of several dims is a stack of matrices, which are its last two dims. If these are whole
on a rank, as those of experts spread over ranks are, the rank computes without a message. If one axis of a mesh shards
matrices, its ranks share the work. Each matrix belongs to one of them, in turn. One all-to-all sends all parts to the
owners, and another sends the results back. If several axes shard a matrix, all ranks gather it and compute the same.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_d9d.mesh.sharding import local, local_ranges
from lightning_d9d.waits import waiting

Function = Callable[[int, Tensor], Tensor]
"""A function of the index of a tensor in its list and the whole matrices; the result has their shape and dtype."""


def on_whole_matrices(parts: Sequence[Tensor], like: Sequence[Tensor], function: Function) -> list[Tensor]:
    """Apply a function to whole matrices of which ranks hold parts. Collective over the ranks that hold them.

    `optim/whole_matrices.py` describes which rank computes what.

    Args:
        parts: This rank's parts, of one dtype.
        like: Parameters of at least two dims with the sharding of the tensors; the same on all ranks.
        function: Function that is applied to each tensor.

    Returns:
        This rank's parts of the results.
    """
    results: dict[int, Tensor] = {}
    shared: dict[tuple[DeviceMesh, int], list[int]] = defaultdict(list)
    for index, parameter in enumerate(like):
        axes = _cutting_axes(parameter)
        if not axes:
            results[index] = function(index, parts[index])
        elif len(axes) == 1:
            assert isinstance(parameter, DTensor)
            shared[parameter.device_mesh, axes[0]].append(index)
        else:
            results[index] = _on_gathered(parts[index], parameter, lambda whole, i=index: function(i, whole))
    for (device_mesh, axis), indices in shared.items():
        round_trip = _RoundTrip(device_mesh, axis, [parts[index] for index in indices], [like[i] for i in indices])
        results |= zip(
            indices, round_trip.apply(lambda place, whole, of=indices: function(of[place], whole)), strict=True
        )
    return [results[index] for index in range(len(parts))]


def is_whole(parameter: Tensor) -> bool:
    """Return whether this rank has whole matrices, so that nothing is sent. Local."""
    return not _cutting_axes(parameter)


def _cutting_axes(parameter: Tensor) -> list[int]:
    """Return the axes of the tensor's mesh that shard one of its last two dims."""
    if not isinstance(parameter, DTensor):
        return []
    dims = [getattr(placement, "dim", None) for placement in parameter.placements]
    sizes = parameter.device_mesh.shape
    return [
        axis
        for axis, dim in enumerate(dims)
        if dim is not None and dim % parameter.ndim >= parameter.ndim - 2 and sizes[axis] > 1
    ]


def _on_gathered(part: Tensor, like: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    assert isinstance(like, DTensor)
    shape = {"shape": like.shape, "stride": like.stride()}
    whole = DTensor.from_local(part, like.device_mesh, like.placements, run_check=False, **shape).full_tensor()
    held = tuple(slice(each.start, each.stop) for each in local_ranges(like))
    return function(whole)[held]


class _Shared(NamedTuple):
    """A tensor whose matrices are sharded along one dim, over the ranks of a group."""

    owner: int
    dim: int
    shapes: list[torch.Size]
    """The shape of each rank's part."""


class _RoundTrip:
    """Sends parts to the owners of matrices, and results back."""

    def __init__(self, device_mesh: DeviceMesh, axis: int, parts: Sequence[Tensor], like: Sequence[Tensor]) -> None:
        self.group, self.parts = device_mesh.get_group(axis), parts
        self.rank, self.size = device_mesh.get_local_rank(axis), device_mesh.size(axis)
        self.tensors = [self._describe(place, axis, parameter) for place, parameter in enumerate(like)]

    def _describe(self, place: int, axis: int, parameter: Tensor) -> _Shared:
        assert isinstance(parameter, DTensor)
        dim = getattr(parameter.placements[axis], "dim", 0) % parameter.ndim
        length, shape = parameter.shape[dim], list(local(parameter).shape)
        chunk = math.ceil(length / self.size)
        shapes = []
        for rank in range(self.size):
            shape[dim] = max(0, min(chunk, length - rank * chunk))
            shapes.append(torch.Size(shape))
        return _Shared(place % self.size, dim, shapes)

    def apply(self, function: Function) -> list[Tensor]:
        """Apply a function to the matrices that this rank owns. Collective over the group."""
        own = [place for place, tensor in enumerate(self.tensors) if tensor.owner == self.rank]
        to_owners = [
            [(part, self.tensors[place].shapes[self.rank]) for place, part in self._of(rank)]
            for rank in range(self.size)
        ]
        from_ranks = [[self.tensors[place].shapes[rank] for place in own] for rank in range(self.size)]
        received = self._exchange([[part for part, _ in each] for each in to_owners], from_ranks)
        results: list[list[Tensor]] = [[] for _ in range(self.size)]
        for number, place in enumerate(own):
            tensor = self.tensors[place]
            whole = torch.cat([received[rank][number] for rank in range(self.size)], tensor.dim)
            lengths = [shape[tensor.dim] for shape in tensor.shapes]
            for rank, part in enumerate(function(place, whole).split(lengths, tensor.dim)):
                results[rank].append(part)
        back = self._exchange(results, [[shape for _, shape in each] for each in to_owners])
        places = [place for rank in range(self.size) for place, _ in self._of(rank)]
        returned = dict(zip(places, (part for each in back for part in each), strict=True))
        return [returned[place] for place in range(len(self.parts))]

    def _of(self, owner: int) -> list[tuple[int, Tensor]]:
        """Return the parts of a rank's matrices, with their places."""
        return [(place, self.parts[place]) for place, tensor in enumerate(self.tensors) if tensor.owner == owner]

    def _exchange(self, sent: list[list[Tensor]], expected: list[list[torch.Size]]) -> list[list[Tensor]]:
        """Send tensors to each rank, and return those of the expected shapes from each. Collective."""
        flat = torch.cat([part.reshape(-1) for each in sent for part in each])
        sizes_out = [sum(shape.numel() for shape in each) for each in expected]
        received = flat.new_empty(sum(sizes_out))
        sizes_in = [sum(part.numel() for part in each) for each in sent]
        with waiting():
            dist.all_to_all_single(received, flat, sizes_out, sizes_in, group=self.group)
        found = []
        for shapes, buffer in zip(expected, received.split(sizes_out), strict=True):
            parts = buffer.split([shape.numel() for shape in shapes])
            found.append([part.view(shape) for part, shape in zip(parts, shapes, strict=True)])
        return found
