"""Chooses how tokens reach experts on other ranks, for `ParallelConfig(expert_dispatch="auto")`.

[Note: which dispatch] On two H200s the whole 30B makes 13,843 tokens/s a GPU with "peer", and 13,168 with all-to-all
(docs/benchmarks/whole-model.md). So "auto" takes "peer" where all GPUs with a layer's experts can write to each other's
memory, unless microbatches overlap (`overlap_pairs`). A plan and a run use this rule.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

import torch.distributed as dist

from lightning_d9d.mesh.agreement import Ranks
from lightning_d9d.ops.peer_buffers import PeerPlace, unreachable
from lightning_d9d.parallel.config import ParallelConfig


class DispatchChoice(NamedTuple):
    """The dispatch that "auto" takes, and why."""

    kind: Literal["all_to_all", "peer"]
    reason: str

    def __str__(self) -> str:
        return f"expert_dispatch='auto' takes {self.kind}: {self.reason}"


def refusal(parallel: ParallelConfig) -> str | None:
    """Return the setting with which "auto" takes all-to-all on any ranks; None if there is none. Local."""
    return "overlap_pairs=True needs all-to-all" if parallel.overlap_pairs else None


def dispatch_for(groups: Iterable[Sequence[PeerPlace]], refused: str | None) -> DispatchChoice:
    """Choose a dispatch. Local. See [Note: which dispatch].

    Args:
        groups: The places of the ranks of each group of experts.
        refused: Result of `refusal`.
    """
    reason = refused or next((each for each in map(_obstacle, groups) if each is not None), None)
    if reason is not None:
        return DispatchChoice("all_to_all", reason)
    return DispatchChoice("peer", "the GPUs with a layer's experts can write to each other's memory")


def agreed_dispatch(group: dist.ProcessGroup, own: PeerPlace, refused: str | None) -> DispatchChoice:
    """Choose a dispatch, the same on all ranks. Collective over all ranks.

    Args:
        group: The ranks with other experts.
        own: The place of this rank.
        refused: Result of `refusal`, the same on all ranks.
    """
    of_group = dispatch_for([Ranks(group).all_gather(own)], refused)
    return next((each for each in Ranks().all_gather(of_group) if each.kind == "all_to_all"), of_group)


def planned_places(num_ranks: int, group_size: int, gpus_per_node: int) -> Iterator[list[PeerPlace]]:
    """Yield the places of groups of consecutive ranks, on nodes whose GPUs all reach each other. Local.

    Groups that lie on their nodes as others do are left out.
    """
    for first in range(0, min(num_ranks, math.lcm(group_size, gpus_per_node)), group_size):
        ranks = range(first, first + group_size)
        yield [PeerPlace(f"node {rank // gpus_per_node}", "", "cuda", rank % gpus_per_node) for rank in ranks]


def _obstacle(places: Sequence[PeerPlace]) -> str | None:
    """Return why ranks cannot, or should not, write to each other's memory; None if they can."""
    if any(each.device != "cuda" for each in places):
        return "experts are not on CUDA devices"
    if (problem := unreachable(places)) is not None:
        return problem
    if len({each.gpu for each in places}) < len(places):
        return "ranks share a GPU, or see different GPUs under one number"
    return None
