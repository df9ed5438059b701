"""One process as any rank of any world, on torch's fake backend, whose collectives leave tensors as they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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


@contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def num_groups() -> int:
    """Of this rank, the default group among them."""
    return len(dist.distributed_c10d._world.pg_map)
