"""The messages and the arithmetic of mixing, against dense matrices in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_d9d.errors import ConfigError
from lightning_d9d.mesh import MeshConfig, MeshDomains
from lightning_d9d.mesh.sharding import local
from lightning_d9d.mixing import AlternatingExpRing, Edge, Topology
from lightning_d9d.mixing.mean import ReplicaMean
from lightning_d9d.mixing.mixer import MAX_GROUPS, Mixer
from lightning_d9d.mixing.rounds import Rounds
from tests.harness.ranks import RankContext

SHAPES = [(3, 5), (), (7,), (0, 2), (4, 4)]
EVERY = ["complete", "ring", "one_peer_exp", "alternating_exp_ring"]


class Uneven(Topology):
    """Rounds of an edge of three beside one alone, with unequal weights."""

    def rounds(self, num_replicas: int) -> Sequence[Sequence[Edge]]:
        return [[Edge((0, 1, 3), 0.5), Edge((2,), 1.0)], [Edge((0, 2), 0.8), Edge((1, 3), 0.3)]]


def tensors_of(replica: int, dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(replica)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)) for shape in SHAPES]


def own_tensors(rank: RankContext, dtype: torch.dtype) -> list[nn.Parameter]:
    return [nn.Parameter(each.detach().to(rank.device)) for each in tensors_of(rank.rank, dtype)]


def mesh_of(rank: RankContext, num_replicas: int, device: str | None = None, **degrees: int) -> MeshDomains:
    config = MeshConfig(**degrees) if degrees else MeshConfig()
    return MeshDomains.build(config, device or rank.device.type, num_replicas=num_replicas)


def mixer_of(rounds: Rounds, mesh: MeshDomains, **options: Any) -> Mixer:
    return Mixer(rounds, mesh, **{"bucket_bytes": 80, **options})


def check_against_matrices(
    rank: RankContext, topology: Any, dtype: torch.dtype, tolerance: float, adaptive: float = 1.0
) -> None:
    """Three turns of all rounds, with a step of each replica's own between two rounds, by messages and by copies."""
    rounds = Rounds(topology, rank.world_size)
    for peer_copies in (False, True) if rounds.are_pairs else (False,):
        mixer = mixer_of(rounds, mesh_of(rank, rank.world_size), adaptive=adaptive, peer_copies=peer_copies)
        check_mixer(rank, mixer, dtype, tolerance)
        mixer.close()


def check_mixer(rank: RankContext, mixer: Mixer, dtype: torch.dtype, tolerance: float) -> None:
    size, rounds, adaptive = rank.world_size, mixer.rounds, mixer.adaptive
    own = own_tensors(rank, dtype)
    mixer.take([own])
    wide = [
        torch.stack([tensors_of(replica, dtype)[index].detach().double() for replica in range(size)])
        for index in range(len(SHAPES))
    ]
    for turn in range(3 * len(rounds)):
        before = [each.mean(0) for each in wide]
        mixer.launch()
        mixer.finish()
        matrix = torch.from_numpy(rounds.matrix(turn))
        matrix = adaptive * matrix + (1 - adaptive) * torch.eye(size, dtype=torch.float64)
        wide = [(matrix @ each.reshape(size, each[0].numel())).view(each.shape) for each in wide]
        for index, expected in enumerate(wide):
            torch.testing.assert_close(own[index].double().cpu(), expected[rank.rank], atol=tolerance, rtol=0)
            torch.testing.assert_close(expected.mean(0), before[index], atol=1e-12, rtol=0)
            with torch.no_grad():
                step = torch.arange(size, dtype=torch.float64).view(-1, *[1] * (expected.dim() - 1)) / 8
                own[index] += step[rank.rank].to(own[index])
                wide[index] = expected + step


@pytest.mark.ranks(2)
@pytest.mark.parametrize("topology", EVERY)
def test_two_replicas_equal_dense_matrices(rank: RankContext, topology: str) -> None:
    check_against_matrices(rank, topology, torch.float64, 1e-12)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("topology", [*EVERY, AlternatingExpRing(2), Uneven()], ids=str)
def test_four_replicas_equal_dense_matrices(rank: RankContext, topology: Any) -> None:
    check_against_matrices(rank, topology, torch.float64, 1e-12)
    check_against_matrices(rank, topology, torch.float32, 1e-5, adaptive=0.6)


@pytest.mark.ranks(3)
def test_three_replicas_equal_dense_matrices(rank: RankContext) -> None:
    check_against_matrices(rank, "complete", torch.float64, 1e-12)


@pytest.mark.meshes
@pytest.mark.ranks(8)
@pytest.mark.parametrize("topology", [*EVERY, AlternatingExpRing(2), AlternatingExpRing(4)], ids=str)
def test_eight_replicas_equal_dense_matrices(rank: RankContext, topology: Any) -> None:
    check_against_matrices(rank, topology, torch.float64, 1e-12)


@pytest.mark.meshes
@pytest.mark.ranks(6)
@pytest.mark.parametrize("topology", ["complete", "ring", AlternatingExpRing(3)], ids=str)
def test_six_replicas_equal_dense_matrices(rank: RankContext, topology: Any) -> None:
    check_against_matrices(rank, topology, torch.float64, 1e-12)


@pytest.mark.ranks(4)
def test_one_peer_exp_ends_in_the_exact_mean(rank: RankContext) -> None:
    rounds = Rounds("one_peer_exp", 4)
    mixer, own = mixer_of(rounds, mesh_of(rank, 4)), own_tensors(rank, torch.float64)
    mixer.take([own])
    for _ in range(len(rounds)):
        mixer.launch()
        mixer.finish()
    for index, tensor in enumerate(own):
        mean = sum(tensors_of(replica, torch.float64)[index].detach() for replica in range(4)) / 4
        torch.testing.assert_close(tensor.detach().cpu(), mean, atol=1e-15, rtol=0)


@pytest.mark.ranks(2)
def test_small_differences_survive_in_bfloat16(rank: RankContext) -> None:
    """The mean of 1 and of the next number lies between them: half of the elements become either."""
    mixer = mixer_of(Rounds("complete", 2), mesh_of(rank, 2), bucket_bytes=2**20)
    value = torch.full((10_000,), 1.0 if rank.rank else 1.0 + 2**-7, dtype=torch.bfloat16, device=rank.device)
    own = nn.Parameter(value)
    mixer.take([[own]])
    mixer.launch()
    mixer.finish()
    assert 0.47 < (own > 1).float().mean() < 0.53
    assert {*own.tolist()} == {1.0, 1.0 + 2**-7}
    sums = torch.stack(rank.all_gather_object(own.detach().float().cpu()))
    assert torch.equal(sums[0], sums[1]), "replicas that agree stay equal"
    mixer.launch()
    mixer.finish()
    assert torch.equal(own.float().cpu(), sums[0]), "equal replicas stay as they are"


@pytest.mark.ranks(4)
@pytest.mark.parametrize("degrees", ["data_parallel_shard", "pipeline_parallel", "tensor_parallel"])
def test_places_of_two_replicas_mix_with_their_like(rank: RankContext, degrees: str) -> None:
    mesh = mesh_of(rank, 2, **{degrees: 2})
    assert mesh.config.world_size == 2
    replica, place = mesh.replica, mesh.rank
    ranks = rank.all_gather_object((replica, place))
    assert ranks == ([(0, 0), (1, 0), (0, 1), (1, 1)] if degrees[0] == "p" else [(0, 0), (0, 1), (1, 0), (1, 1)])
    whole = [torch.arange(10.0, dtype=torch.float64) + 100 * each for each in range(2)]
    axis = {"data_parallel_shard": "dp_shard", "pipeline_parallel": "pp", "tensor_parallel": "tp"}[degrees]
    tensor = distribute_tensor(whole[replica], mesh.for_axes(axis), [Shard(0)], src_data_rank=None)
    mixer = mixer_of(Rounds("one_peer_exp", 2), mesh)
    own = nn.Parameter(tensor)
    mixer.take([[own]])
    mixer.launch()
    mixer.finish()
    expected = (whole[0] + whole[1]).div(2).chunk(2)[place]
    torch.testing.assert_close(local(own).detach(), expected, atol=1e-12, rtol=0)


class Listening(torch.optim.SGD):
    """Keeps what the hook sees."""

    def pre_average_hook(self, edge: Edge, weight: float) -> None:
        self.heard = edge, weight, [p.neighbour_sum.clone() for p in self.param_groups[0]["params"] if p.numel()]


@pytest.mark.ranks(3)
def test_the_hook_of_the_optimizer_sees_the_neighbours(rank: RankContext) -> None:
    mixer, own = mixer_of(Rounds("complete", 3), mesh_of(rank, 3)), own_tensors(rank, torch.float64)
    mixer.take([own])
    optimizer = Listening(own, lr=1.0)
    mixer.launch()
    mixer.finish(optimizer)
    edge, weight, sums = optimizer.heard
    assert (edge.replicas, weight) == ((0, 1, 2), 1 / 3)
    of_others = [tensors_of(replica, torch.float64) for replica in range(3) if replica != rank.rank]
    expected = [(first + second).detach() for first, second in zip(*of_others, strict=True) if first.numel()]
    for tensor, total in zip(sums, expected, strict=True):
        torch.testing.assert_close(tensor, total, atol=1e-14, rtol=0)
    assert not any(hasattr(parameter, "neighbour_sum") for parameter in own)
    whole = [sum(tensors_of(replica, torch.float64)[index].detach() for replica in range(3)) / 3 for index in (0, 4)]
    torch.testing.assert_close([own[0].detach(), own[4].detach()], whole, atol=1e-14, rtol=0)


@pytest.mark.ranks(4)
def test_mean_of_all_and_back(rank: RankContext) -> None:
    mesh = mesh_of(rank, 4)
    mean = ReplicaMean(mesh.mixing_group([range(4)]), 100)
    for dtype, tolerance in ((torch.float64, 1e-15), (torch.float32, 1e-6), (torch.bfloat16, 2e-2)):
        own = own_tensors(rank, dtype)
        before = [tensor.detach().clone() for tensor in own]
        distance = mean.take([own])
        assert mean.is_in_place
        assert distance is not None
        everyone = [tensors_of(replica, dtype) for replica in range(4)]
        exact = [torch.stack([t.detach().double() for t in values]).mean(0) for values in zip(*everyone, strict=True)]
        for tensor, expected in zip(own, exact, strict=True):
            torch.testing.assert_close(tensor.detach().double(), expected, atol=tolerance, rtol=0)
        squares = [(tensor.double() - expected).square().sum() for tensor, expected in zip(before, exact, strict=True)]
        torch.testing.assert_close(distance, torch.stack(squares).sum(), rtol=1e-5, atol=0)
        mean.revert()
        assert all(map(torch.equal, own, before))
        mean.take([own], keeps=False)
        assert not mean.is_in_place
        mean.revert()
        assert len({*map(str, rank.all_gather_object(own[2].detach().tolist()))}) == 1


class Many(Topology):
    """A topology with more different rounds than there are pairs of a replica and its partner."""

    def rounds(self, num_replicas: int) -> Sequence[Sequence[Edge]]:
        order = list(range(1, num_replicas))
        turns = []
        for _ in range(num_replicas - 1):
            ring = [0, *order]
            pairs = zip(ring[: num_replicas // 2], ring[: num_replicas // 2 - 1 : -1], strict=True)
            turns.append([Edge(pair, 0.5) for pair in pairs])
            order = order[1:] + order[:1]
        return turns


def test_too_many_groups_are_refused() -> None:
    mesh = MeshDomains.build(MeshConfig(), "cpu")
    with pytest.raises(ConfigError, match=f"has 67 different rounds for 68 replicas.* at most {MAX_GROUPS}"):
        Mixer(Rounds(Many(), 68), mesh, bucket_bytes=1)
    mesh.close()


@pytest.mark.ranks(2)
def test_a_round_is_repeated_and_dropped(rank: RankContext) -> None:
    mixer, own = mixer_of(Rounds("complete", 2), mesh_of(rank, 2)), own_tensors(rank, torch.float64)
    mixer.take([own])
    before = own[0].detach().clone()
    mixer.finish()
    mixer.launch()
    mixer.drop()
    assert torch.equal(own[0], before)
    assert mixer.num_launched == 1
    mixer.measures = True
    mixer.repeat()
    mixer.finish()
    assert mixer.num_launched == 1
    both = [tensors_of(replica, torch.float64) for replica in range(2)]
    torch.testing.assert_close(own[0].detach().cpu(), (both[0][0] + both[1][0]).detach() / 2, atol=1e-15, rtol=0)
    expected = sum(((a - b) / 2).square().sum() for a, b in zip(*both, strict=True))
    assert mixer.squared_distance is not None
    torch.testing.assert_close(mixer.squared_distance.cpu(), expected.detach(), rtol=1e-6, atol=0)
    assert mixer.num_bytes == 8 * sum(tensor.numel() for tensor in own)
    assert len({id(each) for each in mixer.groups}) == 1
