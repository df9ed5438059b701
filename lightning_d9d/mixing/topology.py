"""Topologies of decentralised replicas: rounds of edges, as data. Pure Python.

[Note: mixing] In each round every replica is in exactly one *edge*, a set of n replicas that mix. With the edge's
weight w, replica i gets

    w * x_i + (1 - w) / (n - 1) * (sum of x_j over the others)

All replicas of an edge have the same w. So the matrix of a round is symmetric and its rows sum to 1: it is doubly
stochastic. The mean over all replicas stays the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from lightning_d9d.errors import ConfigError, did_you_mean
from lightning_d9d.legal import nearest


@dataclass(frozen=True)
class Edge:
    """Replicas that mix with each other in one round; `mixing/topology.py` has the formulas.

    Raises:
        ConfigError: A replica occurs twice, or the weights of a replica do not sum to 1.
    """

    replicas: tuple[int, ...]
    """Numbers of the replicas, ascending. A replica that is alone does not mix in this round."""
    weight: float
    """The weight of a replica's own values, above 0 and at most 1. The other replicas share the rest equally."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "replicas", tuple(sorted(self.replicas)))
        if not self.replicas:
            raise ConfigError("Edge(replicas=()) has no replicas; leave it out")
        if len({*self.replicas}) < len(self.replicas):
            raise ConfigError(f"Edge(replicas={self.replicas}) has a replica twice; name each one once")
        if not 0 < self.weight <= 1:
            raise ConfigError(f"Edge.weight={self.weight!r} of the replicas {self.replicas} must be above 0, at most 1")
        if len(self.replicas) == 1 and self.weight != 1:
            raise ConfigError(
                f"Edge(replicas={self.replicas}, weight={self.weight!r}): replica {self.replicas[0]} has a total "
                f"weight of {self.weight!r} because it is alone; set its weight to 1"
            )

    @property
    def weight_of_others(self) -> float:
        """The weight of each other replica's values; 0 for a replica that is alone."""
        return (1 - self.weight) / (len(self.replicas) - 1) if len(self.replicas) > 1 else 0.0


class Topology(ABC):
    """The rule for which replicas mix. A topology of your own derives from this class."""

    def __repr__(self) -> str:
        """Return a text that is the same on all ranks, which compare their settings."""
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    @abstractmethod
    def rounds(self, num_replicas: int) -> Sequence[Sequence[Edge]]:
        """Return the edges of each round; the first round follows the last.

        Args:
            num_replicas: Number of replicas, at least 1.

        Raises:
            ConfigError: The topology does not support the number of replicas.
        """


@dataclass(frozen=True)
class Complete(Topology):
    """All replicas take the mean of all in every round. This is the reference for the others."""

    def rounds(self, num_replicas: int) -> Sequence[Sequence[Edge]]:
        """Return the only round. Any number of replicas."""
        return [[Edge(tuple(range(num_replicas)), 1 / num_replicas)]]


@dataclass(frozen=True)
class Ring(Topology):
    """Each replica takes the mean with its right neighbour, then with its left one."""

    def rounds(self, num_replicas: int) -> Sequence[Sequence[Edge]]:
        """Return two rounds of pairs.

        Raises:
            ConfigError: The number of replicas is odd.
        """
        if num_replicas == 1:
            return Complete().rounds(1)
        if num_replicas % 2:
            raise ConfigError(_no_such_number("ring", num_replicas, "even", [num_replicas - 1, num_replicas + 1]))
        starts = range(0, num_replicas, 2)
        return [[_pair(start, (start + step) % num_replicas) for start in starts] for step in (1, -1)]


@dataclass(frozen=True)
class OnePeerExp(Topology):
    """Each replica takes the mean with the one whose number differs in bit i, in round i.

    After log2(replicas) rounds all have the mean of all, if nothing else changes them.
    """

    def rounds(self, num_replicas: int) -> Sequence[Sequence[Edge]]:
        """Return log2(num_replicas) rounds of pairs.

        Raises:
            ConfigError: The number of replicas is not a power of two.
        """
        if num_replicas == 1:
            return Complete().rounds(1)
        _check_power("one_peer_exp", num_replicas, num_replicas, 1)
        return [
            [_pair(replica, replica | bit) for replica in range(num_replicas) if not replica & bit]
            for bit in _bits(num_replicas)
        ]


@dataclass(frozen=True)
class AlternatingExpRing(Topology):
    """Pairs of nodes as in `OnePeerExp`, of which half use the network at a time.

    Each pair of nodes has two rounds. In one the replicas of both nodes take their mean. In the other each node takes
    the mean of its own replicas. The order alternates from pair to pair.
    """

    replicas_per_node: int = 1
    """Consecutive replicas that share a node."""

    def __post_init__(self) -> None:
        if self.replicas_per_node < 1:
            raise ConfigError(f"AlternatingExpRing.replicas_per_node={self.replicas_per_node!r} must be at least 1")

    def rounds(self, num_replicas: int) -> Sequence[Sequence[Edge]]:
        """Return 2 * log2(nodes) rounds.

        Raises:
            ConfigError: The number of nodes is not a power of two, or nodes have different numbers of replicas.
        """
        if num_replicas == 1:
            return Complete().rounds(1)
        size = self.replicas_per_node
        num_nodes = num_replicas // size if num_replicas % size == 0 else 0
        _check_power("alternating_exp_ring", num_replicas, num_nodes, size)
        rounds: list[list[Edge]] = []
        for bit in _bits(num_nodes):
            pairs = [(node, node | bit) for node in range(num_nodes) if not node & bit]
            for turn in (0, 1):
                edges: list[Edge] = []
                for place, pair in enumerate(pairs):
                    of_nodes = [tuple(range(node * size, (node + 1) * size)) for node in pair]
                    parts = [of_nodes[0] + of_nodes[1]] if (place + turn) % 2 == 0 else of_nodes
                    edges += [Edge(part, 1 / len(part)) for part in parts]
                rounds.append(edges)
        return rounds


TOPOLOGIES: Mapping[str, type[Topology]] = MappingProxyType(
    {
        "complete": Complete,
        "ring": Ring,
        "one_peer_exp": OnePeerExp,
        "alternating_exp_ring": AlternatingExpRing,
    }
)
"""The topologies that have a name."""


@dataclass(frozen=True, kw_only=True)
class ReplicaMixing:
    """How replicas mix their weights, for `D9DStrategy(replicate_sync=...)`.

    Raises:
        ConfigError: A value is out of range.
    """

    topology: str | Topology = "one_peer_exp"
    """The rule for which replicas mix: a name of `TOPOLOGIES`, or an object of a class derived from `Topology`."""

    adaptive: float = 1.0
    """Fraction of the way that a replica moves towards the mix, above 0 and at most 1:
    `(1 - adaptive) * own + adaptive * mix`."""

    bucket_mb: float = 32.0
    """Size of a message in MiB."""

    peer_copies: bool | None = None
    """If True, pairs of replicas on one host copy weights straight into each other's memory, on the CPU too, for tests.
    If None, they do so between GPUs that can, whose computation then has all multiprocessors. If False, never."""

    def __post_init__(self) -> None:
        topology_of(self.topology)
        if not 0 < self.adaptive <= 1:
            raise ConfigError(f"ReplicaMixing.adaptive={self.adaptive!r} must be above 0 and at most 1")
        if not self.bucket_mb > 0:
            raise ConfigError(f"ReplicaMixing.bucket_mb={self.bucket_mb!r} must be greater than 0")

    @classmethod
    def of(cls, replicate_sync: object) -> ReplicaMixing | None:
        """Convert the argument of `D9DStrategy`; None for "all_reduce", which sums gradients over replicas.

        Raises:
            ConfigError: The value is something else.
        """
        if replicate_sync == "all_reduce":
            return None
        if isinstance(replicate_sync, ReplicaMixing):
            return replicate_sync
        if isinstance(replicate_sync, str | Topology):
            return cls(topology=replicate_sync)
        raise ConfigError(
            f"replicate_sync={replicate_sync!r} must be 'all_reduce', one of {', '.join(map(repr, TOPOLOGIES))}, a "
            "Topology or a ReplicaMixing"
        )


def topology_of(given: str | Topology) -> Topology:
    """Return the topology with a name, or the given topology.

    Raises:
        ConfigError: The name is unknown.
    """
    if isinstance(given, Topology):
        return given
    if given not in TOPOLOGIES:
        known = ["all_reduce", *TOPOLOGIES]
        raise ConfigError(
            f"replicate_sync={given!r} must be one of {', '.join(map(repr, known))}, a Topology or a ReplicaMixing"
            f"{did_you_mean(given, known)}"
        )
    return TOPOLOGIES[given]()


def _pair(first: int, second: int) -> Edge:
    return Edge((first, second), 0.5)


def _bits(number: int) -> list[int]:
    """Return the powers of two below a power of two."""
    return [1 << bit for bit in range(number.bit_length() - 1)]


def _check_power(name: str, num_replicas: int, num_nodes: int, size: int) -> None:
    if num_nodes >= 2 and num_nodes & (num_nodes - 1) == 0:
        return
    legal = [size << bit for bit in range(1, num_replicas.bit_length() + 2)]
    need = "a power of two" if size == 1 else f"{size} (replicas_per_node) times a power of two from 2 on"
    raise ConfigError(_no_such_number(name, num_replicas, need, legal))


def _no_such_number(name: str, num_replicas: int, need: str, legal: Sequence[int]) -> str:
    close = " or ".join(map(str, nearest(num_replicas, legal)))
    return (
        f"replicate_sync={name!r} with {num_replicas} replicas: their number must be {need}; let "
        f"data_parallel_replicate be {close}, or take 'complete'"
    )
