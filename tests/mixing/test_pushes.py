"""Weights that pairs of replicas write into each other's memory: the bits of messages, whoever is ahead."""

from __future__ import annotations

import resource
import socket
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_d9d.errors import ConfigError, RankError
from lightning_d9d.mixing.mixer import Mixer
from lightning_d9d.mixing.pushes import reachable
from lightning_d9d.mixing.rounds import Rounds
from lightning_d9d.ops.backend import using_kernels
from tests.harness.peer_writes import PeerWrites
from tests.harness.ranks import RankContext
from tests.mixing.test_mixer import mesh_of, mixer_of, own_tensors, tensors_of

DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def copying_mixer(rank: RankContext, topology: str, own: list[nn.Parameter]) -> Mixer:
    size, device = rank.world_size, own[0].device.type
    mixer = mixer_of(Rounds(topology, size), mesh_of(rank, size, device), peer_copies=True)
    mixer.take([own])
    return mixer


def mixed(rank: RankContext, topology: str, tensors: list[nn.Parameter], delayed: int | None = None) -> list[Tensor]:
    """Mix in three turns of all rounds, with a step between; one rank may be late in every other round."""
    results = []
    for peer_copies in (False, True):
        own = [nn.Parameter(each.detach().clone()) for each in tensors]
        mixer = mixer_of(Rounds(topology, rank.world_size), mesh_of(rank, rank.world_size), peer_copies=peer_copies)
        mixer.take([own])
        mixer.measures = True
        distances = []
        for turn in range(3 * len(mixer.rounds)):
            mixer.launch()
            if rank.rank == delayed and turn % 2:
                torch.cuda._sleep(20_000_000)
            mixer.finish()
            if mixer.squared_distance is not None:  # a replica alone in its first edge has none
                distances.append(mixer.squared_distance.clone())
            with torch.no_grad():
                for tensor in own:
                    tensor.mul_(1 + rank.rank / 8).add_(0.5)
        mixer.drop()
        mixer.close()
        results.append([each.detach() for each in own] + distances)
    assert all(map(torch.equal, *results))
    return results[0]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_replicas_have_the_bits_of_messages(rank: RankContext, dtype: torch.dtype) -> None:
    mixed(rank, "one_peer_exp", own_tensors(rank, dtype))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("topology", ["ring", "one_peer_exp", "alternating_exp_ring"])
def test_four_replicas_have_the_bits_of_messages(rank: RankContext, topology: str) -> None:
    for dtype in DTYPES:
        mixed(rank, topology, own_tensors(rank, dtype))


@pytest.mark.meshes
@pytest.mark.ranks(8)
def test_eight_replicas_have_the_bits_of_messages(rank: RankContext) -> None:
    mixed(rank, "one_peer_exp", own_tensors(rank, torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.two_gpus
@pytest.mark.ranks(2)
@pytest.mark.parametrize("delayed", [None, 0, 1])
def test_two_gpus_have_the_bits_of_messages(rank: RankContext, delayed: int | None) -> None:
    generator = torch.Generator(rank.device).manual_seed(rank.rank)
    for dtype in DTYPES:
        large = [torch.randn(4_000_037, generator=generator, device=rank.device).to(dtype) for _ in range(3)]
        mixed(rank, "one_peer_exp", [*own_tensors(rank, dtype), *map(nn.Parameter, large)], delayed)


@pytest.mark.gpu
@pytest.mark.two_gpus
@pytest.mark.ranks(2)
def test_the_host_waits_for_nothing(rank: RankContext) -> None:
    own = own_tensors(rank, torch.bfloat16)
    mixer = copying_mixer(rank, "one_peer_exp", own)
    mixer.launch()
    mixer.finish()  # compiles kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        mixer.launch()
        mixer.finish()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    mixer.drop()
    mixer.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_a_rank_ahead_waits_until_its_partner_has_mixed(rank: RankContext, kernels: Any) -> None:
    """Rank 0 is in round 2 before rank 1 has mixed round 1, and overwrites nothing. Its wait ends, and the error names
    the other. On the CPU: a stream of CUDA goes on after a wait that ends late."""
    own = tensors_of(rank.rank, torch.float32)
    mixer = copying_mixer(rank, "complete", own)
    assert mixer._pushes is not None
    with using_kernels(kernels), pytest.MonkeyPatch.context() as monkeypatch:
        mixer.launch()
        mixer._pushes.wait()
        rank.barrier()
        arrived = [part.clone() for message in mixer._messages for part in message.flat.parts]
        if rank.rank == 0:
            mixer.finish()
            monkeypatch.setattr("lightning_d9d.ops.kernels.peer_words._LOOKS_ON_CPU", 50)
            monkeypatch.setattr(mixer._pushes, "_timeout_s", lambda: 0.2)
            mixer.launch()
            with pytest.raises(RankError, match=r"^replica 1 \(rank 1\) did not exchange its weights within 0.2 s"):
                mixer.settle()
            with pytest.raises(RankError, match=r"^replica 1 \(rank 1\)"):
                mixer.drop()
        rank.barrier()
    of_other = tensors_of(1 - rank.rank, torch.float32)
    parts = [part for message in mixer._messages for part in message.flat.parts]
    assert all(map(torch.equal, parts, arrived))
    assert all(torch.equal(part, other.detach()) for part, other in zip(parts, filter(_has_any, of_other), strict=True))
    mixer.close()


def _has_any(tensor: Tensor) -> bool:
    return tensor.numel() > 0


@pytest.mark.ranks(4)
def test_replicas_on_other_hosts_get_messages(rank: RankContext) -> None:
    """Replicas 0 and 1 are on one host, 2 and 3 on another; the second round goes between hosts."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(socket, "gethostname", lambda: f"node-{rank.rank // 2}")
        mixer = copying_mixer(rank, "one_peer_exp", own_tensors(rank, torch.float64))
        assert mixer._pushes is not None
        near, far = rank.rank ^ 1, rank.rank ^ 2
        assert mixer._pushes.reaches(near)
        assert not mixer._pushes.reaches(far)
        mixed(rank, "one_peer_exp", own_tensors(rank, torch.float64))
        mixer.close()
        monkeypatch.setattr(socket, "gethostname", lambda: f"node-{rank.rank}")
        assert reachable(mesh_of(rank, 4), rank.device) is None


@pytest.mark.ranks(2)
def test_bytes_are_those_of_the_weights(rank: RankContext) -> None:
    own = own_tensors(rank, torch.bfloat16)
    mixer = copying_mixer(rank, "one_peer_exp", own)
    assert mixer._pushes is not None
    with PeerWrites(mixer._pushes.buffers, rank.rank) as writes:
        for _ in range(3):
            mixer.launch()
            mixer.finish()
    assert writes.num_bytes == 3 * 2 * sum(tensor.numel() for tensor in own)
    assert mixer.num_bytes == 2 * sum(tensor.numel() for tensor in own)
    mixer.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("peer_copies", [False, True])
def test_weights_may_change_after_they_have_left(rank: RankContext, peer_copies: bool) -> None:
    """As at a validation: the mean is in their place for a while."""
    value = torch.full((2**24,), 1.0 + rank.rank, device=rank.device)
    own = nn.Parameter(value.clone())
    mixer = mixer_of(Rounds("complete", 2), mesh_of(rank, 2), peer_copies=peer_copies)
    mixer.take([[own]])
    mixer.launch()
    mixer.settle()
    own.data.fill_(torch.nan)
    rank.barrier()
    own.data.copy_(value)
    mixer.finish()
    assert {*own.detach().unique().tolist()} == {1.5}
    mixer.close()


@pytest.mark.ranks(2)
def test_memory_that_cannot_be_made_is_an_error_with_the_remedy(rank: RankContext) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    mixer = mixer_of(Rounds("complete", 2), mesh_of(rank, 2, "cpu"), peer_copies=True)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, before[1]))
    try:
        with pytest.raises(ConfigError, match=r"File too large; ReplicaMixing\(peer_copies=False\)"):
            mixer.take([[nn.Parameter(torch.zeros(2**20))]])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
