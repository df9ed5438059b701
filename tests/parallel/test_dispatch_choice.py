"""The rule by which "auto" chooses how tokens reach experts on other ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from lightning_d9d import ParallelConfig
from lightning_d9d.ops.peer_buffers import PeerPlace
from lightning_d9d.parallel.dispatch_choice import agreed_dispatch, dispatch_for, planned_places, refusal
from tests.harness.ranks import RankContext


def place(
    index: int, host: str = "a", boot: str = "1", device: str = "cuda", blocked: tuple[int, ...] = ()
) -> PeerPlace:
    return PeerPlace(host, boot, device, index, blocked)


NEAR = [place(0), place(1)]
"""Two GPUs of one host that reach each other."""


@pytest.mark.parametrize(
    ("groups", "kind", "reason"),
    [
        ([NEAR], "peer", "the GPUs with a layer's experts can write to each other's memory"),
        ([NEAR, [place(0, "b"), place(1, "b")]], "peer", "can write to each other's memory"),
        ([[place(0), place(0, "b")]], "all_to_all", "rank 0: rank 1 is on another host (b)"),
        ([[place(0), place(1, boot="2")]], "all_to_all", "rank 0: rank 1 is on another host (a)"),
        ([NEAR, [place(2), place(0, "b")]], "all_to_all", "rank 0: rank 1 is on another host (b)"),
        ([[place(0), place(1, blocked=(0,))]], "all_to_all", "rank 1: GPU 1 has no peer access to GPU 0"),
        ([[place(0, blocked=(3,)), place(1)]], "peer", "can write to each other's memory"),
        ([[place(0), place(0)]], "all_to_all", "ranks share a GPU, or see different GPUs under one number"),
        ([[place(0, device="cpu"), place(0, device="cpu")]], "all_to_all", "experts are not on CUDA devices"),
        ([[place(0), place(0, device="cpu")]], "all_to_all", "experts are not on CUDA devices"),
    ],
)
def test_the_links_of_ranks(groups: list[list[PeerPlace]], kind: str, reason: str) -> None:
    choice = dispatch_for(groups, None)
    assert choice.kind == kind
    assert reason in str(choice)
    assert dispatch_for(groups, "the user says so") == ("all_to_all", "the user says so")


@pytest.mark.parametrize(
    ("parallel", "reason"),
    [
        (ParallelConfig(recompute="full", overlap_experts=True, expert_capacity=2.0), None),
        (ParallelConfig(compile=True), None),
        (ParallelConfig(overlap_pairs=True), "overlap_pairs=True needs all-to-all"),
    ],
    ids=["full", "compiled", "pairs"],
)
def test_settings_that_refuse_peers(parallel: ParallelConfig, reason: str | None) -> None:
    assert refusal(parallel) == reason


@pytest.mark.parametrize(
    ("num_ranks", "size", "gpus_per_node", "kind"),
    [(8, 8, 8, "peer"), (64, 8, 8, "peer"), (16, 16, 8, "all_to_all"), (12, 3, 8, "all_to_all"), (12, 4, 8, "peer")],
)
def test_planned_nodes(num_ranks: int, size: int, gpus_per_node: int, kind: str) -> None:
    """A group of three of the twelve spans two nodes of eight."""
    assert dispatch_for(planned_places(num_ranks, size, gpus_per_node), None).kind == kind


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("blocked", "kind"), [((), "peer"), ((0,), "all_to_all")])
def test_all_ranks_take_the_same(rank: RankContext, blocked: tuple[int, ...], kind: str) -> None:
    """Only rank 1 says that it cannot write to the other's memory."""
    own = place(rank.rank, blocked=blocked if rank.rank == 1 else ())
    choice = agreed_dispatch(rank.group, own, None)
    assert choice.kind == kind
    assert rank.all_gather_object(choice) == [choice, choice]
    assert agreed_dispatch(rank.group, own, "no").reason == "no"


@pytest.mark.ranks(2)
def test_all_groups_take_the_same(rank: RankContext) -> None:
    """Each rank is a group; that of rank 1 is on a CPU."""
    alone: Any
    alone, _ = dist.new_subgroups(1)
    try:
        choice = agreed_dispatch(alone, place(0, device=["cuda", "cpu"][rank.rank]), None)
    finally:
        dist.destroy_process_group(alone)
    assert choice == ("all_to_all", "experts are not on CUDA devices")
