"""One process as any rank of any world, on torch's fake backend, whose collectives leave tensors as they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from math import prod

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_d9d.mesh import MeshConfig

MESHES = {
    "8": MeshConfig(pipeline_parallel=2, data_parallel_shard=4, expert_parallel=4),
    "64": MeshConfig(
        pipeline_parallel=2,
        data_parallel_replicate=2,
        data_parallel_shard=4,
        context_parallel_shard=2,
        tensor_parallel=2,
        expert_parallel=8,
    ),
    "4096": MeshConfig(
        pipeline_parallel=8,
        data_parallel_replicate=4,
        data_parallel_shard=16,
        context_parallel_shard=2,
        tensor_parallel=4,
        expert_parallel=64,
    ),
    "replicas": MeshConfig(data_parallel_replicate=8),
    "hybrid": MeshConfig(data_parallel_replicate=2, data_parallel_shard=4, expert_parallel=4),
    "tensor": MeshConfig(tensor_parallel=8, expert_parallel=8),
    "pipeline": MeshConfig(pipeline_parallel=8),
    "every axis": MeshConfig(
        pipeline_parallel=2,
        data_parallel_replicate=2,
        data_parallel_shard=2,
        context_parallel_shard=2,
        context_parallel_replicate=2,
        tensor_parallel=2,
        expert_parallel=4,
    ),
}


DATA = ("pipeline_parallel", "data_parallel_replicate", "data_parallel_shard")
DENSE = (*DATA, "context_parallel_shard", "context_parallel_replicate", "tensor_parallel")


def legal_meshes(world_size: int, degrees: Sequence[str] = DENSE) -> Iterator[MeshConfig]:
    """All meshes of so many ranks that differ from 1 in these degrees and in that of experts."""
    divisors = [number for number in range(1, world_size + 1) if world_size % number == 0]
    for chosen in product(divisors, repeat=len(degrees)):
        if prod(chosen) == world_size:
            config = MeshConfig(**dict(zip(degrees, chosen, strict=True)))
            ranks_of_stage = world_size // config.pipeline_parallel
            yield from (replace(config, expert_parallel=ep) for ep in divisors if ranks_of_stage % ep == 0)


@contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def num_groups() -> int:
    """Return the number of groups of this rank, the default group among them."""
    return len(dist.distributed_c10d._world.pg_map)
