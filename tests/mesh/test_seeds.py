"""Which ranks draw the same numbers, over whole meshes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import get_args

import pytest

from lightning_d9d import ConfigError
from lightning_d9d.mesh import MeshConfig, MeshDomains
from lightning_d9d.mesh.seeds import Purpose, derived, seed_for
from tests.mesh.fake_world import MESHES, fake_world

# What of (pp, dp, cp, tp) must tell seeds apart; ranks that agree in these must have equal seeds.
EXPECTED = {
    "dropout": ("pp", "dp", "cp"),
    "sharded_dropout": ("pp", "dp", "cp", "tp"),
    "router_noise": ("pp", "dp", "cp"),
    "sharded_router_noise": ("pp", "dp", "cp", "tp"),
    "dataloader": ("dp",),
}
SMALL = ["8", "64", "replicas", "hybrid", "tensor", "pipeline", "every axis"]


def coordinates(config: MeshConfig) -> Iterator[dict[str, int]]:
    """Return the coordinates of each rank, written out again instead of asking the domains."""
    rank = 0
    for pp in range(config.pipeline_parallel):
        for dp in range(config.data_parallel_replicate * config.data_parallel_shard):
            for cp in range(config.context_parallel_shard * config.context_parallel_replicate):
                for tp in range(config.tensor_parallel):
                    rest = {"ep_shard": rank % config.expert_parallel, "world": rank}
                    yield {"pp": pp, "dp": dp, "cp": cp, "tp": tp, **rest}
                    rank += 1


def test_every_purpose_is_in_the_table() -> None:
    assert set(get_args(Purpose)) == EXPECTED.keys()


@pytest.mark.parametrize("mesh", SMALL)
@pytest.mark.parametrize("purpose", EXPECTED)
def test_ranks_have_equal_seeds_exactly_where_they_shall(mesh: str, purpose: Purpose) -> None:
    seeds: dict[tuple[int, ...], set[int]] = {}
    for place in coordinates(MESHES[mesh]):
        seed = seed_for(7, purpose=purpose, coordinates=place)
        assert 0 <= seed < 2**63
        seeds.setdefault(tuple(place[axis] for axis in EXPECTED[purpose]), set()).add(seed)
    assert all(len(of_place) == 1 for of_place in seeds.values())
    assert len(set.union(*seeds.values())) == len(seeds)


@pytest.mark.parametrize("mesh", SMALL)
def test_the_domains_give_the_coordinates(mesh: str) -> None:
    config = MESHES[mesh]
    expected = [seed_for(7, purpose="sharded_dropout", coordinates=place) for place in coordinates(config)]
    for rank in range(0, config.world_size, 5):
        with fake_world(rank, config.world_size):
            domains = MeshDomains.build(config, "cpu")
            assert seed_for(7, purpose="sharded_dropout", coordinates=domains.coordinates) == expected[rank]


def test_copies_and_shards_of_an_axis_are_the_same_to_a_seed() -> None:
    """Data ranks and context ranks count, not whether weights are sharded over them."""
    shards = replace(MESHES["every axis"], data_parallel_replicate=1, data_parallel_shard=4)
    found = []
    for config in (shards, MESHES["every axis"]):
        with fake_world(45, 64):
            found.append(seed_for(7, purpose="dropout", coordinates=MeshDomains.build(config, "cpu").coordinates))
    assert found[0] == found[1]


@pytest.mark.parametrize("purpose", EXPECTED)
@pytest.mark.parametrize("name", ["worker", "step", "microbatch", "stage"])
def test_other_coordinates_always_count(purpose: Purpose, name: str) -> None:
    seeds = [
        seed_for(7, purpose=purpose, coordinates={**place, name: index})
        for place in ({"pp": 1, "dp": 2, "cp": 0, "tp": 1}, {"pp": 1, "dp": 0, "cp": 0, "tp": 1})
        for index in range(20)
    ]
    assert len(set(seeds)) == 40


def test_workers_of_ranks_that_read_the_same_samples_are_equal() -> None:
    seeds = {
        seed_for(7, purpose="dataloader", coordinates={**place, "worker": worker})
        for place in coordinates(MESHES["64"])
        for worker in range(3)
    }
    assert len(seeds) == 8 * 3


def test_base_and_purpose_tell_seeds_apart_and_order_does_not() -> None:
    place = {"pp": 0, "dp": 1, "cp": 2, "tp": 3}
    seeds = [seed_for(base, purpose=p, coordinates=place) for base in (-1, 0, 1, 2**70) for p in get_args(Purpose)]
    assert len(set(seeds)) == 20
    backwards = dict(reversed(place.items()))
    assert seed_for(1, purpose="dropout", coordinates=backwards) == seed_for(1, purpose="dropout", coordinates=place)


def test_seeds_stay_what_they_are() -> None:
    """Else a job that a later version resumes would go on with other masks."""
    assert seed_for(42, purpose="dropout", coordinates={"pp": 0, "dp": 3, "cp": 0, "tp": 1, "step": 7}) == PINNED


PINNED = 1_445_925_885_225_183_031


def test_derived_numbers_fill_their_bits_and_keep_parts_apart() -> None:
    for bits in (1, 7, 63, 64, 128):
        largest = max(derived(i, bits=bits) for i in range(64))
        assert 2 ** (bits - 1) <= largest < 2**bits
    assert len({derived("a", "b"), derived("ab"), derived("a/b"), derived(("a", "b")), derived(1), derived("1")}) == 6


def test_mistakes_are_told() -> None:
    with pytest.raises(ConfigError, match=r"'noise'.* must be one of 'dropout', 'sharded_dropout'"):
        seed_for(0, purpose="noise", coordinates={})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"needs the coordinates pp, dp, cp, but cp is missing; it has pp, dp\."):
        seed_for(0, purpose="dropout", coordinates={"pp": 0, "dp": 0})
