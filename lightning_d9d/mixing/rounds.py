"""The rounds of a topology for one number of replicas: checked, looked up, printed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np

from lightning_d9d.errors import ConfigError
from lightning_d9d.mixing.picture import draw_image, draw_page
from lightning_d9d.mixing.topology import Edge, Topology, topology_of
from lightning_d9d.pictures import write_picture

_MAX_PRINTED = 16
"""The most edges of a round that are printed, and the most rounds."""


class Rounds:
    """The edges of each round. The rounds are made once for a run; a lookup costs the same for any number of replicas.

    Args:
        topology: Name of the topology, or the topology.
        num_replicas: Number of replicas, at least 1.

    Raises:
        ConfigError: The topology does not support this number, or some replicas never mix with the others. Or a round
            leaves a replica out, has one twice, or has one that does not exist.
    """

    def __init__(self, topology: str | Topology, num_replicas: int) -> None:
        if num_replicas < 1:
            raise ConfigError(f"num_replicas={num_replicas!r} must be at least 1")
        self.topology = topology_of(topology)
        self.num_replicas = num_replicas
        self.edges = tuple(tuple(edges) for edges in self.topology.rounds(num_replicas))
        """The edges of each round."""
        if not self.edges:
            raise ConfigError(f"{self.topology!r} has no round for {num_replicas} replicas; give at least one")
        self._edge_of = [self._checked(number, edges) for number, edges in enumerate(self.edges)]
        self._check_connected()

    def __len__(self) -> int:
        return len(self.edges)

    def edge(self, replica: int, number: int) -> Edge:
        """Return the edge of a replica in a round; the number of rounds has no limit."""
        number %= len(self.edges)
        return self.edges[number][self._edge_of[number][replica]]

    def matrix(self, number: int) -> np.ndarray:
        """Return the matrix of a round, `[replicas, replicas]` float64: row i has the weights of replica i's inputs."""
        matrix = np.zeros((self.num_replicas, self.num_replicas))
        for edge in self.edges[number % len(self.edges)]:
            members = np.array(edge.replicas)
            matrix[np.ix_(members, members)] = edge.weight_of_others
            matrix[members, members] = edge.weight
        return matrix

    @property
    def are_pairs(self) -> bool:
        """True if no edge has more than two replicas."""
        return all(len(edge.replicas) <= 2 for edges in self.edges for edge in edges)

    @property
    def contraction(self) -> float:
        """The largest share of a difference between replicas that remains after all rounds.

        It is 0 if all then have the mean: the second largest singular value of the product of all matrices. Its memory
        grows with the square of the number of replicas.
        """
        product = np.eye(self.num_replicas)
        for number in range(len(self.edges)):
            product = self.matrix(number) @ product
        return float(np.linalg.norm(product - 1 / self.num_replicas, 2))

    def message_share(self, replica: int) -> float:
        """Return which share of its weights a replica sends in a round, averaged over rounds.

        A ring all-reduce over the n replicas of an edge sends `2 (n - 1) / n` of them.
        """
        sizes = [len(self.edge(replica, number).replicas) for number in range(len(self.edges))]
        return sum(2 * (size - 1) / size for size in sizes) / len(sizes)

    def __str__(self) -> str:
        lines = [f"{self.topology!r}: {len(self.edges)} rounds of {self.num_replicas} replicas"]
        for number, edges in enumerate(self.edges[:_MAX_PRINTED]):
            shown = "  ".join(_printed(edge) for edge in edges[:_MAX_PRINTED])
            more = f"  and {len(edges) - _MAX_PRINTED} more" if len(edges) > _MAX_PRINTED else ""
            lines.append(f"round {number}: {shown}{more}")
        if len(self.edges) > _MAX_PRINTED:
            lines.append(f"and {len(self.edges) - _MAX_PRINTED} more rounds")
        return "\n".join(lines)

    def plot(self, path: str | Path) -> None:
        """Draw the replicas of each round on a circle, and the edges between them.

        Args:
            path: File that ends in .png or .svg (drawn by matplotlib) or .html (by plotly). It needs the extra `viz`.

        Raises:
            ConfigError: Another ending, or the library is not installed.
        """
        drawn = [[(edge.replicas, edge.weight) for edge in edges] for edges in self.edges]
        write_picture(path, *(partial(draw, drawn, self.num_replicas) for draw in (draw_image, draw_page)))

    def _checked(self, number: int, edges: Sequence[Edge]) -> list[int]:
        """Return for each replica the index of its edge in a round."""
        index_of: list[int | None] = [None] * self.num_replicas
        for index, edge in enumerate(edges):
            if not isinstance(edge, Edge):
                raise ConfigError(
                    f"round {number} of {self.topology!r} has {edge!r}, which is not an Edge; use objects of Edge"
                )
            for replica in edge.replicas:
                if not 0 <= replica < self.num_replicas:
                    raise ConfigError(
                        f"round {number} of {self.topology!r} has replica {replica}, but replicas are 0 to "
                        f"{self.num_replicas - 1}"
                    )
                if index_of[replica] is not None:
                    raise ConfigError(
                        f"round {number} of {self.topology!r} has replica {replica} in two edges; keep one"
                    )
                index_of[replica] = index
        if None in index_of:
            raise ConfigError(
                f"round {number} of {self.topology!r} has replica {index_of.index(None)} in no edge; add "
                f"Edge(({index_of.index(None)},), 1.0) if it does not mix in this round"
            )
        return [index for index in index_of if index is not None]

    def _check_connected(self) -> None:
        """Check that every replica reaches every other one over the edges of all rounds."""
        leader = list(range(self.num_replicas))

        def find(replica: int) -> int:
            while leader[replica] != replica:
                leader[replica] = leader[leader[replica]]
                replica = leader[replica]
            return replica

        for edge in chain.from_iterable(self.edges):
            if edge.weight < 1:
                for replica in edge.replicas[1:]:
                    leader[find(replica)] = find(edge.replicas[0])
        apart = next((each for each in range(self.num_replicas) if find(each) != find(0)), None)
        if apart is not None:
            raise ConfigError(
                f"{self.topology!r}: replica {apart} never mixes with replica 0, even through others; add an edge that "
                "connects them"
            )


def _printed(edge: Edge) -> str:
    numbers = list(map(str, edge.replicas))
    if len(numbers) > _MAX_PRINTED:
        numbers = [*numbers[:2], "...", numbers[-1]]
    return f"{'-'.join(numbers)} ({edge.weight:g})"
