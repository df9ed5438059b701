"""Buffers of the ranks of one host that each of them can write to, on GPUs and, with files in memory, on the CPU."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_d9d.errors import ConfigError
from lightning_d9d.ops.rows import ceil_div

T = TypeVar("T")
_ALIGNMENT = 256


class PeerPlace(NamedTuple):
    """The place of a rank's memory, and the devices that cannot write to each other."""

    host: str
    boot: str
    """The number that the host's system drew when it started; hosts may have equal names."""
    device: str
    """The type of the rank's device, such as "cuda"."""
    gpu: int
    """The device's number among those that the rank sees."""
    blocked: tuple[int, ...] = ()
    """The numbers of those devices whose memory it cannot write to."""


def place_of(device: torch.device) -> PeerPlace:
    """Return the place of this rank's memory. Local."""
    host, boot = socket.gethostname(), Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    if device.type != "cuda":
        return PeerPlace(host, boot, device.type, 0)
    index = torch.cuda.current_device() if device.index is None else device.index
    others = [other for other in range(torch.cuda.device_count()) if other != index]
    blocked = [other for other in others if not torch.cuda.can_device_access_peer(index, other)]
    return PeerPlace(host, boot, device.type, index, tuple(blocked))


def unreachable(places: Sequence[PeerPlace]) -> str | None:
    """Return the first rank that cannot write to another one's memory, and why; None if all can. Local."""
    for rank, here in enumerate(places):
        for other, there in enumerate(places):
            if (there.host, there.boot) != (here.host, here.boot):
                return f"rank {rank}: rank {other} is on another host ({there.host})"
            if there.gpu in here.blocked:
                return f"rank {rank}: GPU {here.gpu} has no peer access to GPU {there.gpu}"
    return None


def peer_buffers(group: dist.ProcessGroup, num_bytes: int, device: torch.device) -> tuple[list[Tensor], Any]:
    """Give each rank of a group a buffer, and map all of them here. Collective; the host waits.

    On CUDA this is torch's symmetric memory, without multicast; on the CPU files in memory.

    Returns:
        The buffer of each rank, uint8 `[num_bytes]`, zeros before any rank returns; and an object that must live as
        long as they are used.

    Raises:
        ConfigError: A rank cannot write to another one's memory, or has no room for its buffer; raised on every rank.
    """
    if problem := unreachable(gathered_objects(group, place_of(device))):
        raise ConfigError(problem)
    if device.type == "cuda":
        return _device_buffers(group, num_bytes, device)
    return _host_buffers(group, num_bytes), None


def aligned(num_bytes: int) -> int:
    """Return the next place in a buffer at which any tensor may begin."""
    return ceil_div(num_bytes, _ALIGNMENT) * _ALIGNMENT


def gathered_objects(group: dist.ProcessGroup, value: Any) -> list[Any]:
    """Return the value of every rank. Collective."""
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def _together(group: dist.ProcessGroup, action: Callable[[], T]) -> T:
    """Run an action on every rank. If it fails on some rank, raise `ConfigError` on all. Collective."""
    results, problem = [], None
    try:
        results.append(action())
    except (RuntimeError, OSError) as error:
        problem = str(error).splitlines()[0]
    for rank, each in enumerate(gathered_objects(group, problem)):
        if each is not None:
            raise ConfigError(f"rank {rank}: {each}")
    return results[0]


def _device_buffers(group: dist.ProcessGroup, num_bytes: int, device: torch.device) -> tuple[list[Tensor], Any]:
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    import torch.distributed._symmetric_memory as symmetric

    def allocate() -> Tensor:
        try:
            return symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
        except RuntimeError:
            torch.cuda.empty_cache()  # torch's own allocator keeps free blocks
            return symmetric.empty(num_bytes, dtype=torch.uint8, device=device)

    def share() -> Any:
        handle = symmetric.rendezvous(own, group.group_name)
        own.zero_()
        torch.cuda.synchronize(device)
        return handle

    own = _together(group, allocate)
    handle = _together(group, share)  # after it all are zero, so that ranks may write
    buffers = [handle.get_buffer(rank, (num_bytes,), torch.uint8) for rank in range(group.size())]
    return buffers, (own, handle)


def _host_buffers(group: dist.ProcessGroup, num_bytes: int) -> list[Tensor]:
    folder = "/dev/shm" if Path("/dev/shm").is_dir() else tempfile.gettempdir()
    descriptor, path = tempfile.mkstemp(prefix="lightning-d9d-", dir=folder)
    try:
        _together(group, lambda: os.posix_fallocate(descriptor, 0, num_bytes))  # a file with holes may end in SIGBUS
        paths = gathered_objects(group, path)
        buffers = [torch.from_file(each, shared=True, size=num_bytes, dtype=torch.uint8) for each in paths]
        gathered_objects(group, None)  # all have mapped it
    finally:
        os.close(descriptor)
        Path(path).unlink()
    return buffers
