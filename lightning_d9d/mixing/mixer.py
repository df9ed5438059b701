"""Mixes the weights of this rank with those at the same place of other replicas.

[Note: life of a round] After the optimizer's step k `launch` begins the messages of the edge, one bucket at a time. Two
replicas exchange their weights, on one host by `Pushes`; three or more sum copies of them. Meanwhile the forward and
the backward of step k + 1 run on the unmixed weights. Then `finish` waits for the messages and mixes, and the optimizer
applies the gradients to the mixed weights. Own values are not kept, and are sent without a copy. So whatever changes
weights in between calls `settle` before, and restores them.

[Note: copies stay equal] Ranks of one replica may hold copies of a parameter, at different places of their models. Sums
of three or more numbers depend on their order, which may depend on the place in a message. So parameters with equal
sharding have separate buckets. All copies are in such buckets, with the same parameters in the same order.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_d9d.errors import ConfigError
from lightning_d9d.mesh import MeshDomains
from lightning_d9d.mesh.agreement import first_of
from lightning_d9d.mixing.flat import Batches, flat_buffers
from lightning_d9d.mixing.messages import Exchanged, Message, Summed
from lightning_d9d.mixing.pushes import Pushes, reachable
from lightning_d9d.mixing.rounds import Rounds
from lightning_d9d.mixing.topology import Edge
from lightning_d9d.waits import WaitObserver, waiting

MAX_GROUPS = 64
"""Largest number of rounds with different edges: each needs a process group."""


class Mixer:
    """This rank's part in the rounds of its replica. Making one is collective over all ranks.

    Args:
        rounds: The edges of each round.
        mesh: The mesh of this rank's replica, one of several.
        bucket_bytes: Size limit of a message.
        adaptive: Fraction of the way that a replica moves towards the mix. See `ReplicaMixing`.
        peer_copies: Whether pairs on one host copy weights into each other's memory. See `ReplicaMixing`.
        observer: Notified of waits for the edge; None for no notification.

    Raises:
        ConfigError: There are too many different rounds.
    """

    def __init__(
        self,
        rounds: Rounds,
        mesh: MeshDomains,
        *,
        bucket_bytes: int,
        adaptive: float = 1.0,
        peer_copies: bool | None = None,
        observer: WaitObserver | None = None,
    ) -> None:
        self.rounds = rounds
        self.replica = mesh.replica
        self.adaptive = adaptive
        self.num_launched = 0
        """The number of rounds that have begun."""
        self.is_under_way = False
        """True if a round has begun and not ended."""
        self.measures = False
        """True if `finish` measures the distance to the edge's mean."""
        self.squared_distance: Tensor | None = None
        """The squared distance of this rank's values to the mean of the edge, when it was measured last: float64."""
        self._observer = observer
        self._bucket_bytes = bucket_bytes
        self._messages: list[Message] = []
        partitions = [tuple(sorted(edge.replicas for edge in edges)) for edges in rounds.edges]
        if len(different := {*partitions}) > MAX_GROUPS:
            raise ConfigError(
                f"{rounds.topology!r} has {len(different)} different rounds for {rounds.num_replicas} replicas, and "
                f"each needs a process group; use at most {MAX_GROUPS}"
            )
        made = {split: mesh.mixing_group(split) for split in dict.fromkeys(partitions)}
        self.groups = [made[split] for split in partitions]
        """The group of this replica's edge in each round."""
        is_cuda = mesh.device_type == "cuda"
        copies = is_cuda if peer_copies is None else peer_copies
        self._device = torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")
        self._pushes: Pushes | None = reachable(mesh, self._device) if copies and rounds.are_pairs else None

    def __deepcopy__(self, memo: dict[int, Any]) -> Mixer:
        """Return this object: groups and messages belong to one run, and copies of its Trainer share them."""
        return self

    @property
    def num_bytes(self) -> int:
        """The size of all buffers on this rank: a parameter's own size for pairs, else that of its sum."""
        return sum(message.flat.num_bytes for message in self._messages)

    @property
    def edge(self) -> Edge:
        """The edge of the current or last round."""
        return self.rounds.edge(self.replica, max(0, self.num_launched - 1))

    def take(self, batches: Batches) -> None:
        """Mix these parameters from the next round on, instead of the earlier ones. Between rounds.

        Collective over replicas on the same hosts, if these copy weights into each other's memory.

        Args:
            batches: Parameters that may share messages, equal at the same places of all replicas.
        """
        assert not self.is_under_way
        self._messages = []
        flats = flat_buffers(batches, self._bucket_bytes, is_wide=not self.rounds.are_pairs)
        self._messages = [Exchanged(flat) if self.rounds.are_pairs else Summed(flat) for flat in flats]
        if self._pushes is not None:
            self._pushes.take(flats if all(flat.device == self._device for flat in flats) else [])

    def launch(self) -> None:
        """Begin the next round. Collective over the edge, without waiting.

        Raises:
            RankError: A partner did not come in an earlier round.
        """
        assert not self.is_under_way
        self._check()
        group = self.groups[self.num_launched % len(self.groups)]
        self.num_launched += 1
        self.is_under_way = True
        if len(self.edge.replicas) > 1:
            with self._naming_peers():
                if self._pushes is not None and self._pushes.reaches(self._partner):
                    self._pushes.begin(self._partner)
                    return
                for message in self._messages:
                    message.send(group)

    @torch.no_grad()
    def finish(self, optimizer: Optimizer | None = None) -> None:
        """Wait for the current round, and mix. Does nothing if there is none.

        Args:
            optimizer: Optimizer whose `pre_average_hook(edge, weight)` is called before, if it has one. Each parameter
                then has `neighbour_sum`, the sum of the other replicas' values: the part of this rank, float32 or
                wider.

        Raises:
            RankError: A partner did not come in this round, or on CUDA in an earlier one.
        """
        if not self.is_under_way:
            return
        self.is_under_way = False
        edge = self.edge
        if len(edge.replicas) == 1:
            return
        self._wait()
        if self.measures:
            self.squared_distance = self._distance(len(edge.replicas))
        hook = getattr(optimizer, "pre_average_hook", None)
        if hook is not None:
            self._call(hook, edge)
        own = 1 - self.adaptive + self.adaptive * edge.weight
        for message in self._messages:
            message.mix(own, self.adaptive * edge.weight_of_others, self.num_launched)

    def settle(self) -> None:
        """Wait until own weights have left, so that they may change until they are restored. On CUDA the host waits.

        Raises:
            RankError: A partner did not come in an earlier round, so weights are not to be saved or shown.
        """
        with waiting(), self._naming_peers():
            if self._pushes is not None:
                self._pushes.settle()
            for message in self._messages:
                message.settle()
        self._check(waits=True)

    def drop(self) -> None:
        """Wait for the current round, and leave the weights unmixed. On CUDA the host waits.

        Raises:
            RankError: A partner did not come in this round or an earlier one.
        """
        if self.is_under_way and len(self.edge.replicas) > 1:
            self._wait()
        self.is_under_way = False
        self._check(waits=True)

    def repeat(self) -> None:
        """Begin the last round again after a resume: its sums were not saved. Collective over the edge."""
        if self.num_launched > 0 and not self.is_under_way:
            self.num_launched -= 1
            self.launch()

    def close(self) -> None:
        """Free the buffers. Local."""
        self._messages = []
        if self._pushes is not None:
            self._pushes.close()

    @property
    def _partner(self) -> int:
        """The other replica of the current edge, a pair."""
        return next(each for each in self.edge.replicas if each != self.replica)

    def _check(self, *, waits: bool = False) -> None:
        if self._pushes is not None:
            self._pushes.check(waits=waits)

    def _wait(self) -> None:
        with waiting():
            if self._observer is not None:
                self._observer.begin_wait()
            with self._naming_peers():
                if self._pushes is not None:
                    self._pushes.wait()
                for message in self._messages:
                    message.wait()
            self._check()
            if self._observer is not None:
                self._observer.end_wait()

    @contextmanager
    def _naming_peers(self) -> Generator[None]:
        """Add to an error of the round whose weights did not come. Local."""
        try:
            yield
        except Exception as error:
            group = self.groups[(self.num_launched - 1) % len(self.groups)]
            ranks = dist.get_process_group_ranks(group)
            others = [
                f"{replica} (rank {rank})"
                for replica, rank in zip(self.edge.replicas, ranks, strict=True)
                if replica != self.replica
            ]
            error.add_note(
                f"replica {self.replica} mixed with replica{'s' * (len(others) > 1)} {first_of(others)} in round "
                f"{self.num_launched}"
            )
            raise

    def _call(self, hook: Any, edge: Edge) -> None:
        pairs = [
            pair
            for message in self._messages
            for pair in zip(message.flat.whole, message.sums_of_others(), strict=True)
        ]
        for parameter, part in pairs:
            parameter.neighbour_sum = part  # type: ignore[attr-defined]
        try:
            hook(edge, edge.weight)
        finally:
            for parameter, _ in pairs:
                del parameter.neighbour_sum  # type: ignore[attr-defined]

    def _distance(self, size: int) -> Tensor | None:
        squares = [message.squared_distance(size) for message in self._messages]
        return torch.stack([each.to(squares[0].device) for each in squares]).sum() if squares else None
