"""Buffers of the ranks of one host that each of them can write to, on GPUs and, with files in memory, on the CPU."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_d9d.ops.rows import ceil_div

_ALIGNMENT = 256


def why_no_peers(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Return why a rank of a group cannot write to the memory of another one, None if all can. Collective."""
    problems = gathered_objects(group, _problem(group, device))
    return next((f"rank {rank}: {each}" for rank, each in enumerate(problems) if each), None)


def peer_buffers(group: dist.ProcessGroup, num_bytes: int, device: torch.device) -> tuple[list[Tensor], Any]:
    """Give each rank of a group a buffer, and map all of them here. Collective; the host waits.

    On CUDA this is torch's symmetric memory, without multicast; on the CPU files in memory. `why_no_peers` tells
    whether it is possible.

    Returns:
        The buffer of each rank, uint8 `[num_bytes]`, zeros before any rank returns; and an object that must live as
        long as they are used.
    """
    if device.type == "cuda":
        return _device_buffers(group, num_bytes, device)
    return _host_buffers(group, num_bytes), None


def this_host() -> str:
    """Return a text that only the processes on this host have, since it has been started. Local."""
    return f"{socket.gethostname()} {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"


def aligned(num_bytes: int) -> int:
    """Return the next place in a buffer at which any tensor may begin."""
    return ceil_div(num_bytes, _ALIGNMENT) * _ALIGNMENT


def gathered_objects(group: dist.ProcessGroup, value: Any) -> list[Any]:
    """Return the value of every rank. Collective."""
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def _device_buffers(group: dist.ProcessGroup, num_bytes: int, device: torch.device) -> tuple[list[Tensor], Any]:
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    import torch.distributed._symmetric_memory as symmetric

    own = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
    handle = symmetric.rendezvous(own, group.group_name)
    own.zero_()
    torch.cuda.synchronize(device)
    gathered_objects(group, None)  # nobody writes before all are zero
    buffers = [handle.get_buffer(rank, (num_bytes,), torch.uint8) for rank in range(group.size())]
    return buffers, (own, handle)


def _host_buffers(group: dist.ProcessGroup, num_bytes: int) -> list[Tensor]:
    folder = "/dev/shm" if Path("/dev/shm").is_dir() else tempfile.gettempdir()
    descriptor, path = tempfile.mkstemp(prefix="lightning-d9d-", dir=folder)
    try:
        os.truncate(descriptor, num_bytes)
        os.close(descriptor)
        paths = gathered_objects(group, path)
        buffers = [torch.from_file(each, shared=True, size=num_bytes, dtype=torch.uint8) for each in paths]
        gathered_objects(group, None)  # all have mapped it
    finally:
        Path(path).unlink()
    return buffers


def _problem(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Return why this rank cannot write to the memory of others; None if it can. Collective."""
    here = this_host()
    index = device.index if device.index is not None or device.type != "cuda" else torch.cuda.current_device()
    for rank, (host, other) in enumerate(gathered_objects(group, (here, index))):
        if host != here:
            return f"rank {rank} is on another host ({host.split()[0]})"
        is_visible = device.type == "cuda" and other != index and other < torch.cuda.device_count()
        if is_visible and not torch.cuda.can_device_access_peer(index, other):
            return f"GPU {index} has no peer access to GPU {other}"
    return None
