"""Topologies: each replica in one edge a round, doubly stochastic, right for a number of replicas or refused."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from lightning_d9d.errors import ConfigError
from lightning_d9d.mixing import AlternatingExpRing, Complete, Edge, OnePeerExp, ReplicaMixing, Ring, Topology
from lightning_d9d.mixing.rounds import Rounds

LEGAL = [
    *((Complete(), number) for number in (1, 2, 3, 4, 5, 6, 7, 8)),
    *((Ring(), number) for number in (1, 2, 4, 6, 8, 10)),
    *((OnePeerExp(), number) for number in (1, 2, 4, 8, 16)),
    *((AlternatingExpRing(), number) for number in (1, 2, 4, 8)),
    (AlternatingExpRing(2), 4),
    (AlternatingExpRing(3), 6),
    (AlternatingExpRing(2), 16),
]


@dataclass(frozen=True)
class Given(Topology):
    """Rounds that are given."""

    given: tuple[tuple[Edge, ...], ...]

    def rounds(self, num_replicas: int) -> Sequence[Sequence[Edge]]:
        return self.given


@pytest.mark.parametrize(("topology", "number"), LEGAL, ids=str)
def test_matrices_are_doubly_stochastic_and_lead_to_the_mean(topology: Topology, number: int) -> None:
    rounds = Rounds(topology, number)
    values = np.random.default_rng(0).standard_normal((number, 3))
    mixed = values
    for turn in range(60 * len(rounds)):
        matrix = rounds.matrix(turn)
        np.testing.assert_allclose(matrix.sum(0), 1, atol=1e-14)
        np.testing.assert_allclose(matrix.sum(1), 1, atol=1e-14)
        assert (matrix >= 0).all()
        mixed = matrix @ mixed
    np.testing.assert_allclose(mixed, np.broadcast_to(values.mean(0), values.shape), atol=1e-2 if number > 8 else 1e-6)
    assert rounds.contraction < 1 if number > 1 else rounds.contraction == 0


@pytest.mark.parametrize("number", [2, 4, 8, 64])
def test_one_peer_exp_has_the_exact_mean_after_its_rounds(number: int) -> None:
    rounds = Rounds("one_peer_exp", number)
    assert len(rounds) == number.bit_length() - 1
    assert rounds.contraction < 1e-15
    assert rounds.message_share(0) == 1.0
    assert Rounds("complete", number).message_share(0) == 2 * (number - 1) / number


def test_rounds_are_those_of_the_published_topologies() -> None:
    assert [[edge.replicas for edge in edges] for edges in Rounds("ring", 6).edges] == [
        [(0, 1), (2, 3), (4, 5)],
        [(0, 5), (1, 2), (3, 4)],
    ]
    assert [[edge.replicas for edge in edges] for edges in Rounds("one_peer_exp", 4).edges] == [
        [(0, 1), (2, 3)],
        [(0, 2), (1, 3)],
    ]
    alternating = Rounds(AlternatingExpRing(2), 8)
    assert [[edge.replicas for edge in edges] for edges in alternating.edges] == [
        [(0, 1, 2, 3), (4, 5), (6, 7)],
        [(0, 1), (2, 3), (4, 5, 6, 7)],
        [(0, 1, 4, 5), (2, 3), (6, 7)],
        [(0, 1), (4, 5), (2, 3, 6, 7)],
    ]
    assert {(len(edge.replicas), edge.weight) for edges in alternating.edges for edge in edges} == {(2, 0.5), (4, 0.25)}


@pytest.mark.parametrize(
    ("topology", "number", "message"),
    [
        ("ring", 3, "must be even; let data_parallel_replicate be 2 or 4"),
        ("ring", 7, "be 6 or 8"),
        ("one_peer_exp", 6, "must be a power of two; let data_parallel_replicate be 4 or 8"),
        ("alternating_exp_ring", 3, "be 2 or 4"),
        (AlternatingExpRing(3), 8, "3 \\(replicas_per_node\\) times a power of two from 2 on; .* be 6 or 12"),
        (AlternatingExpRing(4), 4, "be 8"),
    ],
)
def test_other_numbers_are_refused_with_the_nearest(topology: str | Topology, number: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Rounds(topology, number)


@pytest.mark.parametrize(
    ("rounds", "message"),
    [
        ((), "has no round for 4 replicas"),
        (((Edge((0, 1), 0.5), Edge((2,), 1.0)),), r"round 0 of .* replica 3 in no edge; add Edge\(\(3,\), 1.0\)"),
        (((Edge((0, 1, 2, 3), 0.25),), (Edge((0, 1), 0.5), Edge((1, 2, 3), 0.5))), "round 1 .* replica 1 in two edges"),
        (((Edge((0, 1), 0.5), Edge((2, 4), 0.5)),), "round 0 .* replica 4, but replicas are 0 to 3"),
        (((Edge((0, 1), 0.5), Edge((2, 3), 0.5)),), "replica 2 never mixes with replica 0"),
        (((Edge((0, 1, 2, 3), 1.0),),), "replica 1 never mixes with replica 0"),
        ((((0, 1), (2, 3)),), "use objects of Edge"),
    ],
)
def test_rounds_that_cannot_be_are_refused(rounds: tuple, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Rounds(Given(rounds), 4)


@pytest.mark.parametrize(
    ("replicas", "weight", "message"),
    [
        ((), 1.0, "has no replicas"),
        ((1, 1), 0.5, "has a replica twice"),
        ((0, 1), 1.5, "must be above 0, at most 1"),
        ((0, 1), 0.0, "must be above 0"),
        ((3,), 0.5, "replica 3 has a total weight of 0.5"),
    ],
)
def test_edges_that_cannot_be_are_refused(replicas: tuple[int, ...], weight: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Edge(replicas, weight)


def test_settings() -> None:
    assert ReplicaMixing.of("all_reduce") is None
    assert ReplicaMixing.of("ring") == ReplicaMixing(topology="ring")
    assert ReplicaMixing.of(Ring()) == ReplicaMixing(topology=Ring())
    for wrong, message in ((3, "must be 'all_reduce'"), ("rings", "did you mean 'ring'")):
        with pytest.raises(ConfigError, match=message):
            ReplicaMixing.of(wrong)
    for field, value in (("adaptive", 0.0), ("adaptive", 1.5), ("bucket_mb", 0)):
        with pytest.raises(ConfigError, match=f"ReplicaMixing.{field}="):
            ReplicaMixing(**{field: value})


def test_thousands_of_replicas_are_cheap() -> None:
    start = time.process_time()
    rounds = Rounds("one_peer_exp", 4096)
    for step in range(10_000):
        rounds.edge(17, step)
    assert time.process_time() - start < 2
    assert rounds.edge(17, 12).replicas == (16, 17)
    assert len(str(rounds)) < 10_000


def test_printed_and_drawn(tmp_path: Path) -> None:
    rounds = Rounds("alternating_exp_ring", 4)
    assert str(rounds).splitlines() == [
        "AlternatingExpRing(replicas_per_node=1): 4 rounds of 4 replicas",
        "round 0: 0-1 (0.5)  2 (1)  3 (1)",
        "round 1: 0 (1)  1 (1)  2-3 (0.5)",
        "round 2: 0-2 (0.5)  1 (1)  3 (1)",
        "round 3: 0 (1)  2 (1)  1-3 (0.5)",
    ]
    for ending in ("png", "svg", "html"):
        rounds.plot(tmp_path / f"rounds.{ending}")
        assert (tmp_path / f"rounds.{ending}").stat().st_size > 1000
    assert (tmp_path / "rounds.svg").read_text().count("round") >= 1
    with pytest.raises(ConfigError, match=r"must end in .png, .svg or .html"):
        rounds.plot(tmp_path / "rounds.pdf")
