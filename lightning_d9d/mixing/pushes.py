"""Pairs of replicas on one host write their weights straight into each other's memory.

[Note: copy engines] Messages of NCCL run on multiprocessors, which then are missing to matrix products. A plain copy
between two GPUs is done by a copy engine. No processor takes part, and own weights need no second copy in between.

[Note: one buffer] Each rank has one buffer, for all its partners. Two words go with each copy. A rank tells its partner
that its buffer is free, and the partner tells it when all is there. A word is the number of the exchange between these
two ranks, which both count. Nothing is overwritten before it is mixed, however far one rank is ahead. A rank tells its
next partner so only after it has mixed what came before, in the order of its stream. The partner copies only after it
has heard the number of this exchange. So at any time at most one partner copies, and not before the buffer is free.

[Note: late] A wait has a time limit. After it a mark is set, and the host raises an error when it next looks. On CUDA
the stream goes on until then, and what it mixes is invalid. It writes no word any more, so the partner's wait ends late
as well. Neither rank saves or shows such weights: before that the host waits for the stream, and looks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_d9d.errors import ConfigError, RankError
from lightning_d9d.mesh import MeshDomains
from lightning_d9d.mesh.agreement import Ranks
from lightning_d9d.mixing.flat import Flat
from lightning_d9d.ops.peer_buffers import PeerPlace, aligned, peer_buffers, place_of, unreachable
from lightning_d9d.ops.peer_words import hear, tell

_FREE, _THERE = 0, 1
"""The words of a partner: its buffer is free; all that it sends is in this rank's buffer."""
_DEFAULT_TIMEOUT_S = 600.0
"""The limit of torch's collectives on NCCL, for a mesh without one."""
_KEPT: list[Any] = []
"""Memory of copies that had not ended when their run failed: they would fault without it."""


class Pushes:
    """Copies of this rank's tensors into the memory of a partner, and of the partner's into this rank's.

    On CUDA a stream of its own copies, and the host never waits. On the CPU `settle` copies.

    Args:
        group: Ranks at this rank's place in several replicas; each can write to the memory of the others.
        replicas: The numbers of these replicas, in the order of the ranks.
        timeout_s: Function that returns the current limit of a wait for a partner, in seconds.
    """

    def __init__(self, group: dist.ProcessGroup, replicas: Sequence[int], timeout_s: Callable[[], float]) -> None:
        self.group = group
        self.replicas = list(replicas)
        self.buffers: list[Tensor] = []
        """The buffer of each rank, uint8; empty before `take`."""
        self._timeout_s = timeout_s
        self._limit_s = 0.0
        self._rank = group.rank()
        self._owner: Any = None
        self._there: dict[int, list[Tensor]] = {}
        self._places: list[tuple[Flat, int]] = []
        self._counts: Counter[int] = Counter()
        self._partner: int | None = None
        self._has_left = True
        self._late = torch.zeros(1, dtype=torch.int32)
        self._lane: torch.cuda.Stream | None = None

    def take(self, flats: Sequence[Flat]) -> None:
        """Give the flat buffers memory that partners can write to. Collective over the group; the host waits.

        Args:
            flats: Buffers of one device, equal on all ranks, in the dtype of their tensors. Without any, no replica is
                reached.

        Raises:
            ConfigError: A rank has no room for its buffer; raised on every rank.
        """
        assert self._partner is None
        self.close()
        if not flats:
            return
        device, at = flats[0].device, aligned(8 * len(self.replicas))
        for flat in flats:
            self._places.append((flat, at))
            at = aligned(at + flat.num_bytes)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()  # torch's allocator does not give memory to others
            self._lane = torch.cuda.Stream(device)
        try:
            self.buffers, self._owner = peer_buffers(self.group, at, device)
        except ConfigError as error:
            raise ConfigError(
                f"replicas on one host use memory of each other, which is not possible here: {error}; "
                "ReplicaMixing(peer_copies=False) sends messages"
            ) from error
        self._late = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        for flat, place in self._places:
            flat.place(_part(self.buffers[self._rank], flat, place))

    def reaches(self, replica: int) -> bool:
        """Return True if the rank at this place of a replica can exchange tensors in this way."""
        return bool(self._places) and replica in self.replicas

    @torch.no_grad()
    def begin(self, replica: int) -> None:
        """Begin to exchange tensors with another replica. Collective over both ranks, without waiting.

        The tensors must not change before `settle`.
        """
        assert self._partner is None
        self._partner = partner = self.replicas.index(replica)
        self._counts[partner] += 1
        self._has_left, self._limit_s = False, self._timeout_s()
        if self._lane is not None:
            self._lane.wait_stream(torch.cuda.current_stream(self._lane.device))
        with self._on_lane():
            self._tell(partner, _FREE)
            if self._lane is not None:
                self._push(partner)

    @torch.no_grad()
    def settle(self) -> None:
        """Wait until this rank's tensors have left, so that they may change. On CUDA the stream waits, not the host."""
        if self._partner is None or self._has_left:
            return
        if self._lane is None:
            self._push(self._partner)
        else:
            torch.cuda.current_stream(self._lane.device).wait_stream(self._lane)
        self._has_left = True

    def wait(self) -> None:
        """Wait until the partner's tensors are in the flat buffers. On CUDA the stream waits, not the host."""
        if self._partner is not None:
            self.settle()
            self._hear(self._partner, _THERE)
            self._partner = None

    def check(self, *, waits: bool = False) -> None:
        """Check that partners came in time in all exchanges whose waits have ended. Local.

        Args:
            waits: If True, the host first waits for these. Weights may be saved or shown only after that.

        Raises:
            RankError: One did not; what was mixed since is invalid.
        """
        if waits and self._lane is not None:
            torch.cuda.current_stream(self._lane.device).synchronize()
        if late := int(self._late):
            rank = dist.get_process_group_ranks(self.group)[late - 1]
            raise RankError(
                f"replica {self.replicas[late - 1]} (rank {rank}) did not exchange its weights within "
                f"{self._limit_s:g} s: it has died or hangs, or is slower; then raise TimeoutConfig.step_seconds"
            )

    def close(self) -> None:
        """Free the memory. Local."""
        if self._lane is not None and not self._lane.query():
            _KEPT.append(self._owner)
        self.buffers, self._places, self._there, self._owner, self._partner = [], [], {}, None, None
        self._counts.clear()

    def _push(self, partner: int) -> None:
        """Wait until the partner's buffer is free, fill it, and say so."""
        self._hear(partner, _FREE)
        if self._lane is None:
            self.check()
        if partner not in self._there:
            buffer = self.buffers[partner]
            self._there[partner] = [part for flat, at in self._places for part in flat.split(_part(buffer, flat, at))]
        own = [tensor for flat, _ in self._places for tensor in flat.tensors]
        for tensor, there in zip(own, self._there[partner], strict=True):
            there.copy_(tensor)
        self._tell(partner, _THERE)

    def _tell(self, partner: int, kind: int) -> None:
        tell(self._word(partner, kind, self._rank), self._counts[partner], self._late)

    def _hear(self, partner: int, kind: int) -> None:
        word = self._word(self._rank, kind, partner)
        hear(word, self._counts[partner], self._late, partner + 1, self._limit_s)

    def _word(self, rank: int, kind: int, other: int) -> Tensor:
        """Return a word in a rank's memory that another rank writes, int32 `[1]`."""
        size = len(self.replicas)
        return self.buffers[rank][: 8 * size].view(torch.int32)[kind * size + other :][:1]

    def _on_lane(self) -> Any:
        return nullcontext() if self._lane is None else torch.cuda.stream(self._lane)


def reachable(mesh: MeshDomains, device: torch.device) -> Pushes | None:
    """Return an exchange with the replicas on the same hosts as this one, if they can write to each other's memory.

    Collective over all ranks.

    Args:
        mesh: The mesh of this rank's replica, one of several.
        device: The device of the weights.

    Returns:
        None without such replicas, on all ranks that would exchange weights with each other.
    """
    places: dict[int, list[PeerPlace]] = defaultdict(list)
    for replica, _, place in sorted(Ranks().all_gather((mesh.replica, mesh.rank, place_of(device)))):
        places[replica].append(place)
    alike: dict[tuple[tuple[str, str], ...], list[int]] = defaultdict(list)
    hosts = {replica: tuple((each.host, each.boot) for each in of_replica) for replica, of_replica in places.items()}
    for replica, of_replica in hosts.items():
        alike[of_replica].append(replica)
    neighbours = alike[hosts[mesh.replica]]
    if max(map(len, alike.values())) == 1:
        return None
    group = mesh.mixing_group([*alike.values()])
    if len(neighbours) == 1 or unreachable([places[replica][mesh.rank] for replica in neighbours]) is not None:
        return None
    return Pushes(group, neighbours, lambda: mesh.timeout_seconds or _DEFAULT_TIMEOUT_S)


def _part(buffer: Tensor, flat: Flat, at: int) -> Tensor:
    return buffer[at : at + flat.num_bytes].view(flat.dtype)
