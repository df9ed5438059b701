"""Spreads a module over the ranks of a mesh; each function can be used alone, on any module."""

from lightning_d9d.parallel.compiling import compile_blocks
from lightning_d9d.parallel.config import ParallelConfig
from lightning_d9d.parallel.context import shard_context
from lightning_d9d.parallel.data import blocks_of, shard_data, weight_mesh
from lightning_d9d.parallel.expert import shard_experts
from lightning_d9d.parallel.graphs import capture_blocks
from lightning_d9d.parallel.plan import WHO_SUMS, ShardingKind, Summed, parallelize
from lightning_d9d.parallel.recompute import recompute_activations
from lightning_d9d.parallel.tensor import shard_tensors
from lightning_d9d.parallel.tokens import TokenShard

__all__ = [
    "WHO_SUMS",
    "ParallelConfig",
    "ShardingKind",
    "Summed",
    "TokenShard",
    "blocks_of",
    "capture_blocks",
    "compile_blocks",
    "parallelize",
    "recompute_activations",
    "shard_context",
    "shard_data",
    "shard_experts",
    "shard_tensors",
    "weight_mesh",
]
