"""Memory of the ranks of one host that each of them can write to, and its layout."""

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
OVERFLOW, LATE = 1, 2
"""Bits of `PeerMemory.status`: more rows than fit; a rank that did not arrive in time."""
_ALIGNMENT = 256
_WEIGHT_BYTES = 8
"""A weight is float32, or float64 for tests."""
_MEMORIES: dict[str, PeerMemory] = {}


class PeerLayout(NamedTuple):
    """The offsets in each rank's buffer, in bytes; those of indices and weights are from the start of a region."""

    num_ranks: int
    """The ranks of the group."""

    num_local: int
    """The experts of a rank."""

    num_rows: int
    """The largest number of tokens that a rank can receive at a time, or get back."""

    row_bytes: int
    """The largest number of bytes of a token."""

    top_k: int
    """The experts of a token."""

    @property
    def counts_at(self) -> int:
        """The offset of two tables with the numbers of tokens that each rank sends to each rank."""
        return _aligned(4 * self.num_ranks)

    @property
    def regions_at(self) -> int:
        """The offset of the first of two regions."""
        return self.counts_at + _aligned(8 * self.num_ranks**2)

    @property
    def weights_at(self) -> int:
        """The offset of the weights of each row's experts."""
        return _aligned(self.num_rows * self.row_bytes)

    @property
    def experts_at(self) -> int:
        """The offset of the numbers of each row's experts."""
        return self.weights_at + _aligned(self.num_rows * self.top_k * _WEIGHT_BYTES)

    @property
    def region_bytes(self) -> int:
        """The length of a region."""
        return self.experts_at + _aligned(self.num_rows * self.top_k * 4)

    @property
    def num_bytes(self) -> int:
        """The length of a rank's buffer."""
        return self.regions_at + 2 * self.region_bytes


class PeerMemory:
    """A buffer on each rank of a group, all of them mapped here, and the state of exchanges through them.

    Args:
        buffers: One buffer for each rank, uint8 `[layout.num_bytes]`, zeros before any rank begins.
        rank: The number of this rank.
        layout: The offsets in a buffer.
        timeout_s: The time limit of a wait for other ranks, in seconds; after it `LATE` is set.
        owner: An object that must live as long as the buffers are used.
    """

    def __init__(
        self, buffers: Sequence[Tensor], rank: int, layout: PeerLayout, *, timeout_s: float = 600.0, owner: Any = None
    ) -> None:
        self.buffers, self.rank, self.layout, self.timeout_s, self.owner = list(buffers), rank, layout, timeout_s, owner
        self.own = self.buffers[rank]
        device = self.own.device
        self.pointers = torch.tensor([each.data_ptr() for each in self.buffers], dtype=torch.int64, device=device)
        self.state = torch.zeros(4, dtype=torch.int32, device=device)
        """The number of exchanges, `status`, and the most tokens and the most copies that have come at a time."""

    @property
    def status(self) -> Tensor:
        """The bits `OVERFLOW` and `LATE` that have been set, an int32 on the device."""
        return self.state[1]

    def view(self, rank: int, at: int, dtype: torch.dtype, *shape: int) -> Tensor:
        """Return a part of a rank's buffer, in place."""
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        return self.buffers[rank][at : at + num_bytes].view(dtype).view(shape)

    def region(self, turn: int) -> int:
        """Return the offset of the region of an exchange."""
        return self.layout.regions_at + (turn & 1) * self.layout.region_bytes


def peer_memory(name: str) -> PeerMemory:
    """Return a memory that `keep_peer_memory` has registered."""
    return _MEMORIES[name]


def keep_peer_memory(name: str, memory: PeerMemory) -> None:
    """Register a memory under its name for operators; it replaces an earlier one."""
    _MEMORIES[name] = memory


def drop_peer_memory(name: str) -> None:
    """Forget a memory, if there is one."""
    _MEMORIES.pop(name, None)


def allocate_peer_memory(
    group: dist.ProcessGroup, layout: PeerLayout, device: torch.device, *, timeout_s: float = 600.0
) -> PeerMemory:
    """Give each rank of a group a buffer, and map all of them here. Collective over the group; the host waits.

    On CUDA this is torch's symmetric memory, without multicast; on the CPU files in memory.

    Raises:
        ConfigError: Ranks are on several hosts, a device cannot reach another one's memory, or a rank has no room for
            its buffer; raised on every rank.
    """
    _refuse(unreachable(_each(group, place_of(device))))
    if device.type == "cuda":
        buffers, owner = _device_buffers(group, layout.num_bytes, device)
    else:
        buffers, owner = _host_buffers(group, layout.num_bytes), None
    return PeerMemory(buffers, group.rank(), layout, timeout_s=timeout_s, owner=owner)


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


def _refuse(problem: str | None) -> None:
    if problem is not None:
        raise ConfigError(f"expert_dispatch='peer' is not possible, {problem}; choose 'all_to_all'")


def _together(group: dist.ProcessGroup, action: Callable[[], T]) -> T:
    """Run an action on every rank. If it fails on some rank, raise `ConfigError` on all. Collective."""
    results, problem = [], None
    try:
        results.append(action())
    except (RuntimeError, OSError) as error:
        problem = str(error).splitlines()[0]
    problems = _each(group, problem)
    _refuse(next((f"rank {rank}: {each}" for rank, each in enumerate(problems) if each), None))
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
        paths = _each(group, path)
        buffers = [torch.from_file(each, shared=True, size=num_bytes, dtype=torch.uint8) for each in paths]
        _each(group, None)  # all have mapped it
    finally:
        os.close(descriptor)
        Path(path).unlink()
    return buffers


def _each(group: dist.ProcessGroup, value: Any) -> list[Any]:
    """Return the value of every rank. Collective."""
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def _aligned(num_bytes: int) -> int:
    return ceil_div(num_bytes, _ALIGNMENT) * _ALIGNMENT
