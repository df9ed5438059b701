"""Collectives over objects, lists of tensors and tensors of unequal shapes, and who goes first.

All ranks of the group must call each function here, in the same order. `group=None` is the default process group.
"""

from __future__ import annotations

import hashlib
import math
import socket
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_d9d.errors import RankError
from lightning_d9d.waits import waiting

T = TypeVar("T")
_CHUNK_BYTES = 64 * 2**20
_MAX_DIMS = 64
"""More than any operator of torch takes."""


@torch.no_grad()
def broadcast_tensors(tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None, source: int = 0) -> None:
    """Overwrite each tensor in place with global rank `source`'s. Collective.

    Tensors travel in flat chunks of one dtype and device (about 64 MiB), so that many small ones cost one message.
    """
    by_type: dict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        by_type[tensor.dtype, tensor.device].append(tensor)
    for (dtype, _), same_type in by_type.items():
        chunk: list[Tensor] = []
        chunk_bytes = 0
        for tensor in same_type:
            chunk.append(tensor)
            chunk_bytes += tensor.numel() * dtype.itemsize
            if chunk_bytes >= _CHUNK_BYTES:
                _broadcast_chunk(chunk, group, source)
                chunk, chunk_bytes = [], 0
        if chunk:
            _broadcast_chunk(chunk, group, source)


def device_of_messages(group: dist.ProcessGroup | None) -> torch.device:
    """What messages of a group lie on, whatever tensors they are made of: the CPU on gloo and without a group."""
    accelerator = torch.accelerator.current_accelerator()
    if group is None or accelerator is None or dist.get_backend(group) == "gloo":
        return torch.device("cpu")
    return accelerator


def check_equal_tensors(tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Check that all ranks hold tensors of the same names, shapes, dtypes and placements in the same order. Collective.

    Shapes of DTensors are those of the whole.

    Raises:
        RankError: They do not; on every rank, with the first difference.
    """
    ours = [f"{name} {list(tensor.shape)} {tensor.dtype}{_placed(tensor)}" for name, tensor in tensors.items()]
    if difference := first_difference(ours, group):
        raise RankError(f"ranks hold different models: {difference}; build the same module on every rank")


def _placed(tensor: Tensor) -> str:
    if not isinstance(tensor, DTensor):
        return ""
    return f" {tensor.placements} on a mesh {tuple(tensor.device_mesh.shape)}"


def digest(tensors: Iterable[Tensor]) -> str:
    """A hash of the dtypes, shapes and values of tensors: of what this rank holds. Local; the host waits for them."""
    result = hashlib.sha256()
    for tensor in tensors:
        result.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
        result.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return result.hexdigest()


def first_difference(lines: Sequence[str], group: dist.ProcessGroup | None = None) -> str | None:
    """Where the lines of the first rank that differs from rank 0 begin to differ; None if all are equal. Collective.

    Hashes travel; the lines themselves only if these differ.
    """
    digests = all_gather_object(hashlib.sha256("\n".join(lines).encode()).hexdigest(), group)
    if len(set(digests)) == 1:
        return None
    lists = all_gather_object(list(lines), group)
    other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    first, second = next(
        pair for pair in zip_longest(lists[0], lists[other], fillvalue="nothing") if pair[0] != pair[1]
    )
    return f"rank 0 has {first} where rank {other} has {second}"


def all_gather_object(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Every rank's picklable value, in the order of ranks, on every rank. Collective."""
    values = [value] * dist.get_world_size(group)
    with waiting():
        dist.all_gather_object(values, value, group=group)
    return values


def gather_object(value: T, group: dist.ProcessGroup | None = None, dst: int = 0) -> list[T] | None:
    """Every rank's picklable value, in the order of ranks, on global rank `dst`; None elsewhere. Collective."""
    values = [value] * dist.get_world_size(group) if dist.get_rank() == dst else None
    dist.gather_object(value, values, dst=dst, group=group)
    return values


@torch.no_grad()
def all_gather_variadic_shape(tensor: Tensor, group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """Every rank's tensor, in the order of ranks, whatever its shape and number of dimensions. Collective.

    Two messages: all shapes, then all values, filled up to the longest. The host waits for the shapes.

    Args:
        tensor: Of the same dtype on all ranks and at most 64 dimensions.
        group: Its ranks.

    Returns:
        Copies without a graph, this rank's among them.
    """
    shapes = _all_gather_shapes(tensor, group)
    sent = _padded_bytes(tensor, shapes)
    parts = [torch.empty_like(sent) for _ in shapes]
    dist.all_gather(parts, sent, group=group)
    return [_from_bytes(part, shape, tensor.dtype) for part, shape in zip(parts, shapes, strict=True)]


@torch.no_grad()
def gather_variadic_shape(tensor: Tensor, group: dist.ProcessGroup | None = None, dst: int = 0) -> list[Tensor] | None:
    """`all_gather_variadic_shape` for global rank `dst` alone; None elsewhere. Collective."""
    shapes = _all_gather_shapes(tensor, group)
    sent = _padded_bytes(tensor, shapes)
    parts = [torch.empty_like(sent) for _ in shapes] if dist.get_rank() == dst else None
    dist.gather(sent, parts, dst=dst, group=group)
    return parts and [_from_bytes(part, shape, tensor.dtype) for part, shape in zip(parts, shapes, strict=True)]


@contextmanager
def main_first(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """The first rank of the group runs the body before the others, such as to download what they then find. Collective.

    The others wait in a collective, so the group's timeout is the longest that the body may take. Without a default
    process group the body just runs.

    Raises:
        RankError: On the other ranks, which do not run the body: it raised on the first one.
    """
    if not dist.is_initialized():
        yield
        return
    with _before_others(dist.get_rank(group) == 0, group):
        yield


@contextmanager
def first_on_node(group: dist.ProcessGroup | None = None, node: str | None = None) -> Iterator[None]:
    """As `main_first`, for the first of the group's ranks on each machine. Collective.

    Args:
        group: Its ranks wait for the first ranks of all machines.
        node: Name of this rank's machine; by default the host name.

    Raises:
        RankError: The body raised on the first rank of some machine; on all others, of which only first ones ran it.
    """
    if not dist.is_initialized():
        yield
        return
    nodes = all_gather_object(node or socket.gethostname(), group)
    rank = dist.get_rank(group)
    with _before_others(nodes.index(nodes[rank]) == rank, group):
        yield


@contextmanager
def _before_others(is_first: bool, group: dist.ProcessGroup | None) -> Iterator[None]:
    """One collective that first ranks reach after the body and the others before it tells of errors."""
    if not is_first:
        _meet(group)
    try:
        yield
    except BaseException as error:
        if is_first:
            all_gather_object(f"{type(error).__name__}: {error}", group)
        raise
    if is_first:
        _meet(group)


def _meet(group: dist.ProcessGroup | None) -> None:
    errors: list[str | None] = all_gather_object(None, group)
    for group_rank, text in enumerate(errors):
        if text is not None:
            rank = dist.get_process_group_ranks(group)[group_rank]
            raise RankError(f"rank {rank}, for which the others waited, failed with {text}")


def _all_gather_shapes(tensor: Tensor, group: dist.ProcessGroup | None) -> list[tuple[int, ...]]:
    """In one message of fixed size: the number of dimensions, then as many lengths."""
    header = torch.tensor([tensor.dim(), *tensor.shape, *[0] * (_MAX_DIMS - tensor.dim())], device=tensor.device)
    headers = [torch.empty_like(header) for _ in range(dist.get_world_size(group))]
    dist.all_gather(headers, header, group=group)
    return [tuple(lengths[:num_dims]) for num_dims, *lengths in torch.stack(headers).tolist()]


def _padded_bytes(tensor: Tensor, shapes: list[tuple[int, ...]]) -> Tensor:
    """As many as the longest tensor has. Bytes, since not every backend knows every dtype."""
    own = tensor.reshape(-1).contiguous().view(torch.uint8)
    return torch.nn.functional.pad(own, (0, max(map(math.prod, shapes)) * tensor.itemsize - own.numel()))


def _from_bytes(part: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return part[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


def _broadcast_chunk(tensors: list[Tensor], group: dist.ProcessGroup | None, source: int) -> None:
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    with waiting():
        dist.broadcast(flat, src=source, group=group)
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view(tensor.shape))
