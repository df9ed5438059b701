"""Collectives over lists of tensors; all ranks of the group must call each function here, in the same order."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_d9d.errors import RankError

_CHUNK_BYTES = 64 * 2**20


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


def check_equal_tensors(tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Check that all ranks hold tensors of the same names, shapes and dtypes in the same order. Collective.

    Raises:
        RankError: They do not; on every rank, with the first difference.
    """
    ours = [f"{name} {list(tensor.shape)} {tensor.dtype}" for name, tensor in tensors.items()]
    digests: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(digests, hashlib.sha256("\n".join(ours).encode()).hexdigest(), group=group)
    if len(set(digests)) == 1:
        return
    lists: list[list[str]] = [[]] * len(digests)
    dist.all_gather_object(lists, ours, group=group)
    other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    first, second = next(
        pair for pair in zip_longest(lists[0], lists[other], fillvalue="nothing") if pair[0] != pair[1]
    )
    raise RankError(
        f"ranks hold different models: rank 0 has {first} where rank {other} has {second}; build the same module on "
        "every rank"
    )


def _broadcast_chunk(tensors: list[Tensor], group: dist.ProcessGroup | None, source: int) -> None:
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.broadcast(flat, src=source, group=group)
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view(tensor.shape))
