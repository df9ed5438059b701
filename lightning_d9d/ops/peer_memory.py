"""Memory of the ranks of one host for tokens that they send to each other's experts, and its layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_d9d.errors import ConfigError
from lightning_d9d.ops.peer_buffers import aligned, peer_buffers

OVERFLOW, LATE = 1, 2
"""Bits of `PeerMemory.status`: more rows than fit; a rank that did not arrive in time."""
SPARE_ROOM = 1.25
"""Memory that is allocated again, because tokens had no room, has this many times the needed size."""
LEAST_SPARE_ROOM = 1.05
"""The same where a device lacks memory for more."""
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
        """The offset of two tables with what each rank sends: tokens to each rank, and copies to each expert."""
        return aligned(4 * self.num_ranks)

    @property
    def counts_bytes(self) -> int:
        """The length of a table."""
        return aligned(4 * self.num_ranks**2 * (1 + self.num_local))

    @property
    def regions_at(self) -> int:
        """The offset of the first of two regions."""
        return self.counts_at + 2 * self.counts_bytes

    @property
    def weights_at(self) -> int:
        """The offset of the weights of each row's experts."""
        return aligned(self.num_rows * self.row_bytes)

    @property
    def copies_at(self) -> int:
        """The offset of the places of each row's copies."""
        return self.weights_at + aligned(self.num_rows * self.top_k * _WEIGHT_BYTES)

    @property
    def flags_at(self) -> int:
        """The offset of a flag for each row, which is set when the row has come."""
        return self.copies_at + aligned(self.num_rows * self.top_k * 4)

    @property
    def region_bytes(self) -> int:
        """The length of a region."""
        return self.flags_at + aligned(self.num_rows * 4)

    @property
    def num_bytes(self) -> int:
        """The length of a rank's buffer."""
        return self.regions_at + 2 * self.region_bytes


class Notes(NamedTuple):
    """The weights of tokens' copies, and what their places among the rows of an expert's rank follow from."""

    weights: Tensor
    """Shape `[tokens, top_k]`."""

    experts: Tensor
    """Their numbers among the experts of all ranks, shape `[tokens, top_k]`."""

    numbers: Tensor
    """The place of each copy among this rank's, sorted by the experts of all ranks, int32 `[tokens, top_k]`."""

    shifts: Tensor
    """The number that is added to it, for each expert, to get the row on the expert's rank, int32."""

    of_rows: Tensor
    """The weights of the rows of this rank's experts, `[num_rows]`, which are written."""


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
        self.state = torch.zeros(5, dtype=torch.int32, device=device)
        """The number of waits, `status`, and the most tokens and the most copies that have come at a time.

        The last number counts programs of an exchange that have written all their tokens."""
        self.counted: torch.cuda.Event | None = None
        """The point on the device at which the last exchange knows whether its tokens fit, if the host can wait."""

    @property
    def status(self) -> Tensor:
        """The bits `OVERFLOW` and `LATE` that have been set, an int32 on the device."""
        return self.state[1]

    def mark_counted(self) -> None:
        """Set `counted` to this point of the current stream. The host cannot wait for a point inside a graph. Local."""
        if self.own.is_cuda and not torch.cuda.is_current_stream_capturing():
            self.counted = self.counted or torch.cuda.Event()
            self.counted.record(torch.cuda.current_stream(self.own.device))

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

    Raises:
        ConfigError: Ranks are on several hosts, a device cannot reach another one's memory, or a rank has no room for
            its buffer; raised on every rank.
    """
    try:
        buffers, owner = peer_buffers(group, layout.num_bytes, device)
    except ConfigError as error:
        raise ConfigError(f"expert_dispatch='peer' is not possible, {error}; choose 'all_to_all'") from error
    return PeerMemory(buffers, group.rank(), layout, timeout_s=timeout_s, owner=owner)
