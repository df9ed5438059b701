"""Which process groups there are, on which ranks, in which order, and how long they wait."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator
from datetime import timedelta
from itertools import product
from math import prod
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_d9d import ConfigError
from lightning_d9d.mesh import MeshConfig, MeshDomains
from lightning_d9d.mesh.groups import GroupPool, abandon, partition
from lightning_d9d.schedule import OneForwardOneBackward
from lightning_d9d.strategy.pipeline import Pipeline
from tests.harness.ranks import RankContext
from tests.harness.recorder import Recorder
from tests.harness.records import mismatches, read
from tests.mesh.fake_world import MESHES, fake_world, num_groups

PAIRS = MeshConfig(pipeline_parallel=2, tensor_parallel=2)


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    return group._get_backend(device).options._timeout


def pool() -> GroupPool:
    pool = GroupPool.living()
    assert pool is not None
    return pool


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    recorder = Recorder()
    yield recorder
    recorder.close()


@pytest.mark.parametrize("sizes", [(2, 3, 4), (1, 6, 1), (4,)], ids=str)
def test_a_partition_groups_ranks_that_differ_along_its_axes_alone(sizes: tuple[int, ...]) -> None:
    shape = dict(zip("abc", sizes, strict=False))
    for chosen in product([False, True], repeat=len(sizes)):
        axes = [axis for axis, choose in zip(shape, chosen, strict=True) if choose]
        groups = defaultdict(list)
        for rank, coordinates in enumerate(product(*map(range, sizes))):
            groups[tuple(c for c, choose in zip(coordinates, chosen, strict=True) if not choose)].append(rank)
        cut = partition(shape, axes)
        assert cut == tuple(map(tuple, groups.values()))
        assert list(cut) == sorted(cut)
        assert {len(ranks) for ranks in cut} == {prod(shape[axis] for axis in axes)}


@pytest.mark.parametrize(
    ("mesh", "expected"),
    [
        ("8", 4),
        ("64", 11),
        ("4096", 11),
        ("replicas", 2),
        ("hybrid", 4),
        ("tensor", 2),
        ("pipeline", 2),
        ("every axis", 12),  # and no rank is alone along any
    ],
)
def test_one_group_for_each_partition(mesh: str, expected: int) -> None:
    """The default group, one shared by all axes of a single rank, and one for each other way to cut the ranks."""
    config = MESHES[mesh]
    cuts = {partition(shape, [axis]) for shape in config.domains().values() for axis in shape}
    assert len(cuts) == expected
    with fake_world(config.world_size // 3, config.world_size):
        domains = MeshDomains.build(config, "cpu")
        assert num_groups() == (
            1 if mesh in ("replicas", "tensor", "pipeline") else expected
        )  # these need the default group only
        assert domains.flat.size() == config.world_size
        assert num_groups() == expected
        domains.close()
        MeshDomains.build(config, "cpu")
        assert num_groups() == expected
        pool().close()
        assert num_groups() == 1


@pytest.mark.parametrize("mesh", ["64", "4096"])
def test_groups_of_all_lanes_and_links_of_the_pipeline(mesh: str) -> None:
    config = MESHES[mesh]
    with fake_world(config.world_size // 2, config.world_size):
        domains = MeshDomains.build(config, "cpu")
        num_neighbours = 1 if domains.coordinates["pp"] in (0, config.pipeline_parallel - 1) else 2
        for _ in range(2):  # asking again makes none
            domains.group("ep_shard", lane="moe")
            for axes in ("dp_replicate",), ("ep_replicate",), ("dp", "cp"):
                domains.group(*axes, lane="reduce")
            Pipeline(OneForwardOneBackward(), domains, torch.device("cpu"))
            assert num_groups() == 18 + 2 * num_neighbours  # links, of two ranks each: one for either direction


@pytest.mark.parametrize(
    ("config", "without_experts"),
    [
        (MESHES["64"], 11),
        (MESHES["4096"], 11),
        (
            MeshConfig(pipeline_parallel=2, data_parallel_replicate=2, data_parallel_shard=16, expert_parallel=4),
            8,
        ),
        (
            MeshConfig(pipeline_parallel=8, data_parallel_replicate=4, data_parallel_shard=128, expert_parallel=16),
            8,
        ),
    ],
    ids=["64, every axis", "4096, every axis", "64", "4096"],
)
def test_fully_sharded_experts_add_two_groups(config: MeshConfig, without_experts: int) -> None:
    """They are the ranks that share a copy of the same experts, and a lane for tokens. Copies are along
    `dp_replicate`."""
    rank = config.world_size // 2
    with fake_world(rank, config.world_size):
        domains = MeshDomains.build(config, "cpu")
        assert num_groups() == without_experts
        weights, lane = domains.expert_weights, domains.group("ep_shard", lane="moe")
        assert num_groups() == without_experts + 2
        assert domains.expert_weights == weights
        assert domains.group("ep_shard", lane="moe") is lane
        assert num_groups() == without_experts + 2
        assert weights.get_group("ep_dp_replicate") is domains.group("dp_replicate")
        assert weights.get_group("ep_shard") is domains.group("ep_shard")
        shape = config.expert_weights()
        for axis in ("ep_dp_replicate", "ep_fsdp", "ep_shard"):
            ranks = next(ranks for ranks in partition(shape, [axis]) if rank in ranks)
            assert tuple(dist.get_process_group_ranks(weights.get_group(axis))) == ranks


def test_axes_that_cut_alike_hold_the_same_group() -> None:
    with fake_world(3, 64):
        domains = MeshDomains.build(MESHES["64"], "cpu")
        meshes = {
            "regular": domains.regular,
            "dense": domains.dense,
            "expert": domains.expert,
            "batch": domains.batch,
            "flat": domains.flat,
        }
        by_cut: dict[object, set[int]] = defaultdict(set)
        for domain, shape in MESHES["64"].domains().items():
            for axis in shape:
                group = meshes[domain].get_group(axis)
                by_cut[partition(shape, [axis])].add(id(group))
                assert domains.group(axis) is group
                assert dist.get_process_group_ranks(group) == next(
                    list(ranks) for ranks in partition(shape, [axis]) if 3 in ranks
                )
        assert {len(groups) for groups in by_cut.values()} == {1}
        assert len({group for groups in by_cut.values() for group in groups}) == len(by_cut)
        assert domains.regular.get_group("pp") is domains.expert.get_group("pp")
        assert domains.flat.get_group() is dist.group.WORLD


def test_the_world_cut_by_one_axis_is_the_default_group() -> None:
    with fake_world(5, 8):
        domains = MeshDomains.build(MESHES["tensor"], "cpu")
        assert domains.regular.get_group("tp") is dist.group.WORLD
        assert domains.expert.get_group("ep_shard") is dist.group.WORLD


@pytest.mark.parametrize("mesh", ["8", "64", "hybrid", "every axis"])
def test_all_ranks_make_the_same_groups_in_the_same_order(mesh: str) -> None:
    config = MESHES[mesh]
    orders, names = set(), defaultdict(set)
    for rank in range(config.world_size):
        with fake_world(rank, config.world_size):
            domains = MeshDomains.build(config, "cpu")
            domains.group("dp", "cp", lane="reduce")
            orders.add(tuple((pooled.description, pooled.lane) for pooled in pool().groups))
            for pooled in pool().groups:
                assert pooled.ranks == tuple(dist.get_process_group_ranks(pooled.group))
                names[pooled.ranks, pooled.lane].add(pooled.group.group_name)
    assert len(orders) == 1
    assert {len(of_all_members) for of_all_members in names.values()} == {1}


def test_another_lane_is_another_group_made_when_asked_for() -> None:
    with fake_world(0, 64):
        domains = MeshDomains.build(MESHES["64"], "cpu")
        before = num_groups()
        default, moe = domains.group("ep_shard"), domains.group("ep_shard", lane="moe")
        assert moe is not default
        assert dist.get_process_group_ranks(moe) == dist.get_process_group_ranks(default)
        assert domains.group("ep_shard", lane="moe") is moe
        assert domains.group("world", lane="moe") is not dist.group.WORLD
        assert num_groups() == before + 2
        assert domains.group("cp_replicate", lane="moe") is domains.group("cp_replicate")
        with pytest.raises(ConfigError, match="lane='experts' must be one of 'default', 'moe'"):
            domains.group("ep_shard", lane="experts")  # type: ignore[arg-type]
        assert num_groups() == before + 2


def test_another_backend_is_another_group_and_priority_is_for_nccl() -> None:
    pool = GroupPool.acquire("cpu")
    with_gloo = pool.group(((0,),), description="world")
    assert pool.group(((0,),), description="world", backend="gloo", high_priority=True) is with_gloo
    other = pool.group(((0,),), description="world", backend="cpu:gloo")
    assert other.group is not with_gloo.group
    assert pool.group(((0,),), description="world", backend="cpu:gloo") is other
    pool.release()
    assert not dist.is_initialized()


def test_groups_are_called_by_all_their_axes() -> None:
    with fake_world(0, 64):
        domains = MeshDomains.build(MESHES["64"], "cpu")
        names = {
            "pp": "pp|regular,dense,expert,batch",
            "tp": "tp|regular,dense,batch",
            "cp_shard": "cp_shard|regular;cp|batch",
            "ep_shard": "ep_shard|expert",
        }
        assert {axis: domains.group(axis).group_desc for axis in names} == names
        assert domains.group("dp", "cp", lane="reduce").group_desc == "dp+cp|batch@reduce"


def test_every_group_is_warmed_up_and_linked_ranks_exchange_messages(recorder: Recorder, tmp_path: Path) -> None:
    config = MeshConfig(pipeline_parallel=4, data_parallel_shard=2, tensor_parallel=2)
    pairs = [(0, 1), (2, 3)], [(1, 2)]
    for rank in range(16):
        with fake_world(rank, 16):
            recorder.start(tmp_path / str(rank))
            domains = MeshDomains.build(config, "cpu")
            links = []
            for _ in range(2):  # once is enough
                links = [domains.pipeline_group(each, lane="pipeline", neighbours=True) for each in pairs]
            recorder.stop()
            entries = read(tmp_path / str(rank))
            reduced = [entry.group for entry in entries if entry.operator == "allreduce"]
            used = [pooled.group.group_name for pooled in pool().groups if len(pooled.ranks) > 1]
            assert reduced == used
            stage, rest = divmod(rank, 4)
            for of_stage, link in zip(({0: 1, 1: 0, 2: 3, 3: 2}, {1: 2, 2: 1}), links, strict=True):
                peers = [4 * of_stage[stage] + rest] if stage in of_stage else []
                assert dist.get_process_group_ranks(link) == sorted([rank, *peers])
                messages = [entry for entry in entries if entry.is_message and entry.group == link.group_name]
                for operator in ("send", "receive"):
                    assert {e.peer for e in messages if e.operator == operator} == set(peers)
    assert not mismatches([read(tmp_path / str(rank)) for rank in range(16)])


def test_ranks_of_some_stages_and_all_data_ranks() -> None:
    config = MeshConfig(pipeline_parallel=3, data_parallel_replicate=2, tensor_parallel=2)
    for rank in range(12):
        with fake_world(rank, 12):
            group = MeshDomains.build(config, "cpu").pipeline_group([(0, 2)], "dp")
            tensor = rank % 2
            expected = [rank] if rank // 4 == 1 else [tensor, 2 + tensor, 8 + tensor, 10 + tensor]
            assert dist.get_process_group_ranks(group) == expected


@pytest.mark.ranks(4)
@pytest.mark.parametrize("config", [PAIRS, MeshConfig(pipeline_parallel=4)], ids=["pairs", "pipeline"])
def test_pooled_groups_reach_their_ranks(rank: RankContext, config: MeshConfig) -> None:
    domains = MeshDomains.build(config, rank.device.type)
    for axis, size in domains.sizes.items():
        group = domains.group(axis)
        total = torch.tensor(float(rank.rank), device=rank.device)
        dist.all_reduce(total, group=group)
        ranks = dist.get_process_group_ranks(group)
        assert len(ranks) == size
        assert total.item() == sum(ranks)
    moe = domains.group("ep_replicate", lane="moe")
    dist.barrier(moe)
    domains.close()


@pytest.mark.ranks(4)
def test_a_destroyed_pool_leaves_nothing_and_can_be_built_again(rank: RankContext) -> None:
    for config in (PAIRS, PAIRS, MeshConfig(data_parallel_replicate=2, data_parallel_shard=2)):
        domains = MeshDomains.build(config, rank.device.type)
        assert num_groups() > 1
        total = torch.ones(1, device=rank.device)
        dist.all_reduce(total, group=domains.regular.get_group("dp_shard"))
        assert total.item() == config.data_parallel_shard
        domains.close()
        pool().close()
        assert num_groups() == 1


@pytest.mark.ranks(2, record=False)
def test_a_group_in_which_all_ranks_wait_for_each_other_is_replaced(rank: RankContext) -> None:
    """To free it would wait for its collectives, which never end."""
    domains = MeshDomains.build(MeshConfig(data_parallel_replicate=2), rank.device.type)
    domains.group("dp_replicate", lane="moe")
    own = functools.partial(pool().group, ((0, 1),), description="for this test", lane="mixing")
    old = own().group
    dist.broadcast(torch.ones(4, device=rank.device), 1 - rank.rank, group=old, async_op=True)
    abandon(old)
    new = own().group
    assert new is not old
    del old
    total = torch.ones(4, device=rank.device)
    dist.all_reduce(total, group=new)
    assert total.tolist() == [2] * 4
    domains.close()


@pytest.mark.ranks(4)
def test_timeouts_reach_every_group(rank: RankContext) -> None:
    world_timeout = timeout_of(rank.group, rank.device)
    domains = MeshDomains.build(PAIRS, rank.device.type, timeout_seconds=40)
    pooled = [domains.group(axis) for axis in ("pp", "tp", "dp_shard")]
    assert {timeout_of(group, rank.device) for group in pooled} == {timedelta(seconds=40)}
    assert timeout_of(rank.group, rank.device) == world_timeout
    domains.set_timeout(20)
    later = domains.group("pp", lane="pipeline")
    everyone = (*pooled, rank.group, later)
    assert {timeout_of(group, rank.device) for group in everyone} == {timedelta(seconds=20)}
    domains.set_timeout(world_timeout.total_seconds())
    assert timeout_of(rank.group, rank.device) == world_timeout
    domains.close()


def test_domains_built_later_have_the_same_groups() -> None:
    """Whatever else is different: DTensor takes equal meshes for one, and so uses either's groups for both."""
    with fake_world(0, 8):
        first = MeshDomains.build(MeshConfig(data_parallel_replicate=2, data_parallel_shard=4), "cpu")
        groups = {axis: first.group(axis) for axis in ("dp_replicate", "dp_shard", "tp")}
        first.close()
        with pytest.raises(RuntimeError, match=r"closed; build new ones"):
            first.regular  # noqa: B018
        second = MeshDomains.build(MeshConfig(pipeline_parallel=2, tensor_parallel=4), "cpu")
        assert second.group("pp") is groups["dp_replicate"]
        assert second.group("tp") is groups["dp_shard"]
        assert second.group("dp") is groups["tp"]
        assert "0, 4  " in second.describe()
        assert "pp|regular,dense,expert,batch" in second.describe()


def test_the_pool_ends_with_its_default_group() -> None:
    with fake_world(0, 8):
        domains = MeshDomains.build(MESHES["8"], "cpu")
        old = pool()
    assert GroupPool.living() is None
    domains.close()
    with fake_world(0, 4):
        MeshDomains.build(PAIRS, "cpu")
        old.close()
        assert num_groups() > 1
        assert dist.get_process_group_ranks(pool().groups[0].group) == [0, 2]


def test_whoever_makes_groups_waits_for_their_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    guarded = []
    monkeypatch.setattr("lightning_d9d.mesh.groups.guard_native_threads", lambda: guarded.append(True))
    pool = GroupPool.acquire("cpu")
    pool.release()
    assert guarded
