"""Collectives over objects, lists of tensors and tensors of unequal shapes, and code that runs on one rank first.

All ranks of the group must call these functions in the same order. `group=None` is the default process group.
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
"""Limit on the number of dims, above that of any operator of torch."""


@torch.no_grad()
def broadcast_tensors(tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None, source: int = 0) -> None:
    """Overwrite each tensor in place with that of global rank `source`. Collective.

    Tensors are sent in flat chunks of one dtype and device (about 64 MiB), so many small ones cost one message.
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
    """Return the device of a group's messages, for tensors on any device: the CPU on gloo and without a group."""
    accelerator = torch.accelerator.current_accelerator()
    if group is None or accelerator is None or dist.get_backend(group) == "gloo":
        return torch.device("cpu")
    return accelerator


def check_equal_tensors(tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Check that all ranks hold tensors with the same names, shapes, dtypes and placements in the same order.

    Collective.

    Shapes of DTensors are the global ones.

    Raises:
        RankError: The tensors differ. Every rank raises the error, with the first difference.
    """
    ours = [f"{name} {list(tensor.shape)} {tensor.dtype}{_placed(tensor)}" for name, tensor in tensors.items()]
    if difference := first_difference(ours, group):
        raise RankError(f"ranks hold different models: {difference}; build the same module on every rank")


def _placed(tensor: Tensor) -> str:
    if not isinstance(tensor, DTensor):
        return ""
    return f" {tensor.placements} on a mesh {tuple(tensor.device_mesh.shape)}"


def digest(tensors: Iterable[Tensor]) -> str:
    """Hash the dtypes, shapes and values that this rank holds of tensors. Local; the host waits for the values."""
    result = hashlib.sha256()
    for tensor in tensors:
        result.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
        result.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return result.hexdigest()


def first_difference(lines: Sequence[str], group: dist.ProcessGroup | None = None) -> str | None:
    """Return the place where the first rank that differs from rank 0 begins to differ; None if all are equal.

    Collective.

    Ranks send hashes, and the lines themselves only if hashes differ.
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
    """Return every rank's picklable value, in the order of ranks, on every rank. Collective."""
    values = [value] * dist.get_world_size(group)
    with waiting():
        dist.all_gather_object(values, value, group=group)
    return values


def gather_object(value: T, group: dist.ProcessGroup | None = None, dst: int = 0) -> list[T] | None:
    """Return every rank's picklable value, in the order of ranks, on global rank `dst`; None elsewhere. Collective."""
    values = [value] * dist.get_world_size(group) if dist.get_rank() == dst else None
    dist.gather_object(value, values, dst=dst, group=group)
    return values


@torch.no_grad()
def all_gather_variadic_shape(tensor: Tensor, group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """Return every rank's tensor, in the order of ranks; shapes may differ, also in their number of dims. Collective.

    It takes two messages: all shapes, then all values, padded to the longest. The host waits for the shapes.

    Args:
        tensor: A tensor of the same dtype on all ranks, with at most 64 dims.
        group: The ranks that take part.

    Returns:
        Copies without a graph, also of this rank's own tensor.
    """
    shapes = _all_gather_shapes(tensor, group)
    sent = _padded_bytes(tensor, shapes)
    parts = [torch.empty_like(sent) for _ in shapes]
    dist.all_gather(parts, sent, group=group)
    return [_from_bytes(part, shape, tensor.dtype) for part, shape in zip(parts, shapes, strict=True)]


@torch.no_grad()
def gather_variadic_shape(tensor: Tensor, group: dist.ProcessGroup | None = None, dst: int = 0) -> list[Tensor] | None:
    """Gather like `all_gather_variadic_shape`, but only on global rank `dst`; None elsewhere. Collective."""
    shapes = _all_gather_shapes(tensor, group)
    sent = _padded_bytes(tensor, shapes)
    parts = [torch.empty_like(sent) for _ in shapes] if dist.get_rank() == dst else None
    dist.gather(sent, parts, dst=dst, group=group)
    return parts and [_from_bytes(part, shape, tensor.dtype) for part, shape in zip(parts, shapes, strict=True)]


@contextmanager
def main_first(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Let the first rank of the group run the body before the others, such as to download a file for all. Collective.

    The others wait in a collective, so the body may take at most the group's timeout. Without a default process group
    the body simply runs.

    Raises:
        RankError: The body raised on the first rank. The other ranks raise this error, and do not run the body.
    """
    if not dist.is_initialized():
        yield
        return
    with _before_others(dist.get_rank(group) == 0, group):
        yield


@contextmanager
def first_on_node(group: dist.ProcessGroup | None = None, node: str | None = None) -> Iterator[None]:
    """Let the first of the group's ranks on each machine run the body before the others. Collective.

    Args:
        group: The ranks; they wait for the first ranks of all machines.
        node: Name of this rank's machine; by default the host name.

    Raises:
        RankError: The body raised on the first rank of some machine. All other ranks raise this error; only the first
            ranks have run the body.
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
    """Report errors in one collective, which first ranks reach after the body and the others before it."""
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
            raise RankError(f"rank {rank}, which the others waited for, failed with {text}")


def _all_gather_shapes(tensor: Tensor, group: dist.ProcessGroup | None) -> list[tuple[int, ...]]:
    """Gather all shapes in one message of fixed size: the number of dims, then their lengths."""
    header = torch.tensor([tensor.dim(), *tensor.shape, *[0] * (_MAX_DIMS - tensor.dim())], device=tensor.device)
    headers = [torch.empty_like(header) for _ in range(dist.get_world_size(group))]
    dist.all_gather(headers, header, group=group)
    return [tuple(lengths[:num_dims]) for num_dims, *lengths in torch.stack(headers).tolist()]


def _padded_bytes(tensor: Tensor, shapes: list[tuple[int, ...]]) -> Tensor:
    """Return the tensor as bytes, padded to the longest.

    Bytes are used because not every backend supports every dtype.
    """
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
