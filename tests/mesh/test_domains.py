"""What the domains say about ranks, in one process and in many."""

from __future__ import annotations

import copy
import pickle
import re
from itertools import combinations

import pytest
import torch
import torch.distributed as dist

from lightning_d9d import ConfigError
from lightning_d9d.mesh import MeshConfig, MeshDomains
from tests.harness.ranks import RankContext
from tests.mesh.fake_world import MESHES, fake_world, num_groups

DOMAINS = ("regular", "dense", "expert", "batch", "flat")
PAIRS = MeshConfig(data_parallel_shard=2, tensor_parallel=2, expert_parallel=4)


@pytest.mark.parametrize("mesh", MESHES)
def test_domains_are_torch_meshes_over_all_ranks(mesh: str) -> None:
    config = MESHES[mesh]
    rank = 2 * config.world_size // 3
    with fake_world(rank, config.world_size):
        domains = MeshDomains.build(config, "cpu")
        for domain, shape in config.domains().items():
            built = getattr(domains, domain)
            assert built.mesh_dim_names == tuple(shape)
            assert {type(name) for name in built.mesh_dim_names} == {str}
            assert built.mesh.shape == tuple(shape.values())
            assert built.mesh.flatten().tolist() == list(range(config.world_size))
            coordinates = (built.mesh == rank).nonzero()[0].tolist()
            assert [domains.coordinates[axis] for axis in shape] == coordinates
            assert [built.get_local_rank(axis) for axis in shape] == coordinates
            assert {axis: domains.sizes[axis] for axis in shape} == shape


def test_data_ranks_count_replicas_and_shards() -> None:
    config = MESHES["every axis"]
    seen = []
    for rank in range(64):
        with fake_world(rank, 64):
            domains = MeshDomains.build(config, "cpu")
            assert domains.dp_size == 4
            replicate, shard = (domains.coordinates[axis] for axis in ("dp_replicate", "dp_shard"))
            assert domains.dp_rank == 2 * replicate + shard
            seen.append(domains.dp_rank)
    assert [seen.count(dp_rank) for dp_rank in range(4)] == [16] * 4


def test_a_degree_of_minus_one_is_resolved() -> None:
    with fake_world(0, 8):
        domains = MeshDomains.build(MeshConfig(data_parallel_replicate=-1, tensor_parallel=2), "cpu")
        assert domains.config == MeshConfig(data_parallel_replicate=4, tensor_parallel=2)
        with pytest.raises(ConfigError, match="tensor_parallel=3 does not divide 8 ranks"):
            MeshDomains.build(MeshConfig(tensor_parallel=3), "cpu")


# Several axes


@pytest.mark.parametrize("mesh", ["64", "every axis"])
def test_any_axes_of_a_domain_flattened_or_side_by_side(mesh: str) -> None:
    config = MESHES[mesh]
    rank = config.world_size // 3
    with fake_world(rank, config.world_size):
        domains = MeshDomains.build(config, "cpu")
        for domain, shape in config.domains().items():
            for number in range(1, len(shape) + 1):
                for axes in combinations(shape, number):
                    others = [axis for axis in shape if axis not in axes]
                    table = getattr(domains, domain).mesh
                    mine = tuple(
                        domains.coordinates[axis] if axis in others else slice(None) for axis in shape
                    )  # the ranks that differ from this one along `axes` alone
                    side_by_side = domains.for_axes(*axes, domain=domain)
                    assert side_by_side.mesh_dim_names == axes
                    assert torch.equal(side_by_side.mesh, table[mine])
                    for axis in axes:
                        assert side_by_side.get_group(axis) is domains.group(axis)
                    flattened = domains.group(*axes)
                    assert dist.get_process_group_ranks(flattened) == table[mine].flatten().tolist()


def test_side_by_side_costs_no_group_and_flattened_one() -> None:
    with fake_world(0, 64):
        domains = MeshDomains.build(MESHES["64"], "cpu")
        before = num_groups()
        domains.for_axes("dp_replicate", "dp_shard")
        domains.group("dp_replicate", "dp_shard")  # as batch's dp
        domains.group("cp_shard", "cp_replicate")  # of which one is 1
        assert num_groups() == before
        group = domains.group("dp", "cp")
        assert domains.group("dp_replicate", "dp_cp_shard", "cp_replicate") is group
        assert num_groups() == before + 1


def test_axes_that_are_one_together_share_the_group_of_the_lonely() -> None:
    with fake_world(5, 8):
        domains = MeshDomains.build(MESHES["hybrid"], "cpu")
        before = num_groups()
        alone = domains.group("tp")
        assert dist.get_process_group_ranks(alone) == [5]
        assert domains.group("cp_shard", "cp_replicate", "tp") is alone
        assert domains.group("pp", "tp", lane="moe") is alone
        assert domains.for_axes("cp_shard", "tp").shape == (1, 1)
        assert num_groups() == before


@pytest.mark.parametrize(
    ("axes", "domain"),
    [
        (("dp",), "dense"),
        (("dp", "ep_shard"), None),
        (("tp", "pp"), None),
        (("tp", "tp"), None),
        ((), None),
        (("x",), "y"),
    ],
    ids=str,
)
def test_axes_that_no_domain_has_are_refused(axes: tuple[str, ...], domain: str | None) -> None:
    domains = MeshDomains.build(MeshConfig(), "cpu")
    with pytest.raises(
        ConfigError, match=r"in this order; there are regular: pp, dp_replicate, .* batch: pp, dp, cp, tp"
    ):
        domains.for_axes(*axes, domain=domain)
    assert not dist.is_initialized()


# One process


def test_one_process_builds_nothing_before_it_is_asked() -> None:
    domains = MeshDomains.build(MeshConfig(data_parallel_replicate=-1), "cpu")
    assert (domains.dp_rank, domains.dp_size) == (0, 1)
    assert "1 rank on cpu" in domains.describe()
    domains.set_timeout(7)
    assert not dist.is_initialized()
    for domain in DOMAINS:
        assert getattr(domains, domain).size() == 1
    assert num_groups() == 1
    assert dist.get_backend() == "gloo"
    domains.close()
    assert not dist.is_initialized()


def test_one_process_computes_with_its_meshes_and_builds_again() -> None:
    for _ in range(2):
        domains = MeshDomains.build(MeshConfig(), "cpu")
        total = torch.ones(2)
        dist.all_reduce(total, group=domains.group("dp", "cp", lane="reduce"))
        assert total.tolist() == [1.0, 1.0]
        assert num_groups() == 1
        domains.close()


def test_a_process_group_that_was_there_stays() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    domains = MeshDomains.build(MeshConfig(), "cpu")
    assert domains.regular.get_group("pp") is dist.group.WORLD
    domains.close()
    assert dist.is_initialized()
    dist.destroy_process_group()


def test_more_than_one_rank_without_a_process_group_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"tensor_parallel=2 does not divide 1 rank: at most 1 fits; .* start them first"
    ):
        MeshDomains.build(MeshConfig(tensor_parallel=2), "cpu")


# The table


def test_the_table_names_axes_groups_and_what_is_added() -> None:
    with fake_world(5, 64):
        domains = MeshDomains.build(MESHES["64"], "cpu")
        domains.group("ep_shard", lane="moe")
        lines = domains.describe({"tokens per step": 4096, "bytes per rank": "1.5 GiB"}).splitlines()
    assert lines[0] == "64 ranks on cpu, seen from rank 5"
    assert re.search(
        r"^dense +pp 0/2  dp_replicate 0/2  dp_cp_shard 2/8  cp_replicate 0/1  tp 1/2$", "\n".join(lines), re.M
    )
    groups = [re.split(r" {2,}", line) for line in lines if "|" in line]
    assert ["5, 37", "default", "pp|regular,dense,expert,batch"] in groups
    assert ["0, 1, 2, 3, 4, 5, 6, 7", "default", "ep_shard|expert"] in groups
    assert ["0, 1, 2, 3, 4, 5, 6, 7", "moe", "ep_shard|expert"] in groups
    assert ["0, 1, ..., 63 (64)", "default", "world|flat"] in groups
    assert [re.split(r" {2,}", line) for line in lines[-2:]] == [
        ["tokens per step", "4096"],
        ["bytes per rank", "1.5 GiB"],
    ]
    assert len(lines) == 1 + 6 + 1 + 11 + 2  # groups of one rank are left out


# Pickles and copies


def test_a_pickle_needs_a_world_of_the_same_size() -> None:
    with fake_world(5, 8):
        data = pickle.dumps(MeshDomains.build(MESHES["8"], "cpu"))
    with pytest.raises(ConfigError, match=r"8 ranks: the default process group is not initialized; call torch.distr"):
        pickle.loads(data)
    with fake_world(0, 4), pytest.raises(ConfigError, match="8 ranks: the default process group has 4 ranks"):
        pickle.loads(data)
    with fake_world(6, 8):
        again = pickle.loads(data)
        assert again.config == MESHES["8"]
        assert again.coordinates["ep_shard"] == 2
        assert again.regular.get_group("pp") is again.expert.get_group("pp")


def test_one_process_unpickles_without_building() -> None:
    again = pickle.loads(pickle.dumps(MeshDomains.build(MeshConfig(), "cpu")))
    assert again.dp_size == 1
    assert not dist.is_initialized()


def test_a_copied_module_keeps_its_domains() -> None:
    module = torch.nn.Linear(1, 1)
    module.mesh = MeshDomains.build(MeshConfig(), "cpu")  # type: ignore[assignment]
    assert copy.deepcopy(module).mesh is module.mesh


@pytest.mark.ranks(4)
def test_unpickled_domains_have_groups_of_their_own(rank: RankContext) -> None:
    domains = MeshDomains.build(PAIRS, rank.device.type, timeout_seconds=30)
    again = pickle.loads(pickle.dumps(domains))
    assert again.coordinates == domains.coordinates
    domains.close()
    total = torch.tensor(float(rank.rank), device=rank.device)
    dist.all_reduce(total, group=again.dense.get_group("tp"))
    assert total.item() == {0: 1, 1: 1, 2: 5, 3: 5}[rank.rank]
    again.close()
