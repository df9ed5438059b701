"""Who sums which gradient: the table, and what ranks do."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lightning_d9d import ConfigError
from lightning_d9d.mesh import MeshConfig, MeshDomains
from lightning_d9d.mesh.groups import partition
from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig
from lightning_d9d.modules import (
    GroupedQueryAttention,
    LMHead,
    RMSNorm,
    SparseMoE,
    SwiGLU,
    TokenEmbedding,
    rope_tables,
)
from lightning_d9d.ops import LossOptions
from lightning_d9d.parallel import (
    WHO_SUMS,
    ParallelConfig,
    ShardingKind,
    Summed,
    TokenShard,
    parallelize,
    shard_context,
    shard_tensors,
)
from lightning_d9d.parallel.context import SequenceShard
from lightning_d9d.parallel.data import FullySharded
from lightning_d9d.parallel.fsdp import fully_sharded
from lightning_d9d.parallel.plan import group_of, sharding_kind
from lightning_d9d.strategy.data_parallel import DataParallelStages
from lightning_d9d.sync.buckets import GradSyncConfig
from tests.harness.compare import assert_tensors_close
from tests.harness.ranks import RankContext
from tests.harness.recorder import Recorder
from tests.harness.records import mismatches, read
from tests.mesh.fake_world import DENSE, fake_world, legal_meshes
from tests.meshes.cases import Case
from tests.parallel.meta import meta_stages


def views_of(config: MeshConfig) -> list[dict[str, int]]:
    tensor = config.tensor_parallel
    split = [config.split_tensor(n) for n in range(1, tensor + 1) if tensor % n == 0]
    return [*config.domains().values(), config.expert_weights(), *(v for views in split for v in views.values())]


@pytest.mark.parametrize("layout", ShardingKind)
def test_axes_of_a_layout_are_the_ranks_of_a_stage(layout: ShardingKind) -> None:
    """The axes of a layout are axes of one view of the ranks, so no rank is met along two of them."""
    axes = [*WHO_SUMS[layout]]
    for config in legal_meshes(24, DENSE):
        for view in (view for view in views_of(config) if {*axes} <= {*view}):
            stage = 24 // config.pipeline_parallel
            assert prod(view[axis] for axis in axes) == stage
            assert partition(view, axes) == tuple(tuple(range(first, first + stage)) for first in range(0, 24, stage))


class Layouts(NamedTuple):
    """Kinds of a stage's parameters: sharded over tensor ranks, keys and values among those, and the rest."""

    rest: ShardingKind
    experts: ShardingKind
    sharded: ShardingKind | None = None
    keys_and_values: ShardingKind | None = None

    def of(self, name: str) -> ShardingKind:
        if ".experts." in name:
            return self.experts
        if self.sharded is None:
            return self.rest
        if ".k_proj." in name or ".v_proj." in name:
            return self.keys_and_values or self.sharded
        return (
            self.sharded
            if any(each in name for each in (".q_proj.", ".o_proj.", "embed_tokens", "lm_head"))
            else self.rest
        )


MESHES = {
    "copies": (MeshConfig(data_parallel_replicate=64), Layouts(ShardingKind.REPLICATED, ShardingKind.REPLICATED)),
    "shards": (MeshConfig(data_parallel_shard=64), Layouts(ShardingKind.FULLY_SHARDED, ShardingKind.FULLY_SHARDED)),
    "experts over copies": (
        MeshConfig(pipeline_parallel=2, data_parallel_replicate=32, expert_parallel=8),
        Layouts(ShardingKind.REPLICATED, ShardingKind.EXPERTS),
    ),
    "experts over all": (
        MeshConfig(data_parallel_replicate=64, expert_parallel=64),
        Layouts(ShardingKind.REPLICATED, ShardingKind.EXPERTS),
    ),
    "within a replica": (
        MeshConfig(pipeline_parallel=2, data_parallel_replicate=2, data_parallel_shard=16, expert_parallel=4),
        Layouts(ShardingKind.FULLY_SHARDED, ShardingKind.EXPERTS_FULLY_SHARDED),
    ),
    "over two replicas": (
        MeshConfig(data_parallel_replicate=4, data_parallel_shard=16, expert_parallel=32),
        Layouts(ShardingKind.FULLY_SHARDED, ShardingKind.EXPERTS),
    ),
    "context of shards": (
        MeshConfig(context_parallel_shard=8, data_parallel_replicate=8, expert_parallel=8),
        Layouts(ShardingKind.FULLY_SHARDED, ShardingKind.EXPERTS),
    ),
    "context of copies": (
        MeshConfig(context_parallel_replicate=8, data_parallel_replicate=8),
        Layouts(ShardingKind.REPLICATED, ShardingKind.EXPERTS),
    ),
    "tensor": (
        MeshConfig(tensor_parallel=4, data_parallel_replicate=16),
        Layouts(ShardingKind.REPLICATED, ShardingKind.EXPERTS, ShardingKind.TENSOR),
    ),
    "shared heads": (  # 4 of keys and values
        MeshConfig(pipeline_parallel=2, tensor_parallel=8, context_parallel_replicate=4, expert_parallel=32),
        Layouts(ShardingKind.REPLICATED, ShardingKind.EXPERTS, ShardingKind.TENSOR, ShardingKind.TENSOR_SHARED),
    ),
    "tensor and shards": (
        MeshConfig(tensor_parallel=4, data_parallel_shard=8, data_parallel_replicate=2, expert_parallel=8),
        Layouts(ShardingKind.FULLY_SHARDED, ShardingKind.EXPERTS_FULLY_SHARDED, ShardingKind.TENSOR_FULLY_SHARDED),
    ),
    "shared heads and shards": (
        MeshConfig(tensor_parallel=8, data_parallel_shard=8, expert_parallel=64),
        Layouts(
            ShardingKind.FULLY_SHARDED,
            ShardingKind.EXPERTS,
            ShardingKind.TENSOR_FULLY_SHARDED,
            ShardingKind.TENSOR_SHARED_FULLY_SHARDED,
        ),
    ),
    "4096": (
        MeshConfig(pipeline_parallel=8, data_parallel_shard=512, expert_parallel=64),
        Layouts(ShardingKind.FULLY_SHARDED, ShardingKind.EXPERTS_FULLY_SHARDED),
    ),
    "4096 on every axis": (
        MeshConfig(
            pipeline_parallel=4,
            data_parallel_replicate=2,
            data_parallel_shard=16,
            context_parallel_shard=2,
            context_parallel_replicate=2,
            tensor_parallel=8,
            expert_parallel=64,
        ),
        Layouts(
            ShardingKind.FULLY_SHARDED,
            ShardingKind.EXPERTS_FULLY_SHARDED,
            ShardingKind.TENSOR_FULLY_SHARDED,
            ShardingKind.TENSOR_SHARED_FULLY_SHARDED,
        ),
    ),
}


@pytest.mark.parametrize("name", MESHES)
def test_each_parameter_has_its_layout(name: str) -> None:
    config, layouts = MESHES[name]
    rank = config.world_size // 3
    model = dataclasses.replace(Qwen3MoeConfig.preset("30b-a3b"), num_hidden_layers=config.pipeline_parallel)
    with fake_world(rank, config.world_size):
        mesh = MeshDomains.build(config, "cpu")
        (stage,) = meta_stages(model, mesh)
        units = fully_sharded(stage)
        for parameter_name, parameter in stage.named_parameters():
            layout = sharding_kind(parameter, units)
            assert layout == layouts.of(parameter_name), parameter_name
            for summed in (Summed.IN_BUCKETS, Summed.AFTERWARDS):
                group = group_of(layout, mesh, summed)
                ranks = (rank,) if group is None else tuple(dist.get_process_group_ranks(group))
                assert ranks == ranks_of_sums(layout, config, model.num_key_value_heads, rank).get(summed, (rank,))


def ranks_of_sums(layout: ShardingKind, config: MeshConfig, num_heads: int, rank: int) -> dict[Summed, tuple[int, ...]]:
    """Return the ranks of the sums that a rank takes part in, for each way of summing of a layout. If there are more
    tensor ranks than `num_heads` heads of keys and values, there are copies.

    Of `num_heads` heads of keys and values there are copies if there are more tensor ranks.
    """
    split = config.split_tensor(min(num_heads, config.tensor_parallel))
    views = [*config.domains().values(), config.expert_weights(), *split.values()]
    ranks = {}
    for summed in {*WHO_SUMS[layout].values()}:
        axes = [axis for axis, by in WHO_SUMS[layout].items() if by is summed]
        view = next(view for view in views if {*axes} <= {*view})
        ranks[summed] = next(ranks for ranks in partition(view, axes) if rank in ranks)
    return ranks


def test_a_sharded_parameter_that_nobody_sums_is_refused() -> None:
    with fake_world(0, 4):
        context = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
        parameter = nn.Parameter(distribute_tensor(torch.ones(8, 8), context, [Shard(0)], src_data_rank=None))
        with pytest.raises(ConfigError, match=r"\(8, 8\) .* on the axes cp, so nothing would sum its gradient"):
            sharding_kind(parameter, set())


# On ranks


class Block(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.norm = RMSNorm(8, 1e-6)
        self.inner = inner

    def forward(self, x: Tensor, *rope: tuple[Tensor, Tensor]) -> Tensor:
        return x + self.inner(self.norm(x), *rope)


class Stage(nn.Module):
    """A block of each kind, and layers outside of blocks.

    Of 2 experts 4 ranks have a part of each, of 2 heads of keys and values two ranks have the same one. `has_options`
    gives attention and the loss all that they can have, of which ring attention takes neither window nor sinks.
    """

    def __init__(self, num_experts: int, num_heads: int, *, has_options: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        std = 0.5
        self.embed = TokenEmbedding(16, 8, initializer_range=std)
        options: dict[str, Any] = {"window": 5, "sinks": True, "interleaved": True} if has_options else {}
        attention = GroupedQueryAttention(
            8, 4, num_heads, 2, norm_eps=1e-6, bias=True, initializer_range=std, **options
        )
        if attention.sinks is not None:
            nn.init.normal_(attention.sinks)
        mlp = SwiGLU(8, 12, initializer_range=std)
        mixture = SparseMoE(8, 4, num_experts, 2, normalize=True, initializer_range=std)
        self.attention, self.mlps = Block(attention), nn.ModuleList([Block(mlp), Block(mixture)])
        self.norm = RMSNorm(8, 1e-6)
        loss_options = LossOptions(3.0, 0.05, 0.1) if has_options else LossOptions()
        self.head = LMHead(16, 8, initializer_range=std, loss_options=loss_options)
        for module in self.modules():
            if isinstance(module, RMSNorm):
                nn.init.normal_(module.weight)
        self.double()

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        """The loss of each token."""
        x = self.attention(self.embed(ids), rope_tables(positions, 2, 100.0, torch.float64))
        for block in self.mlps:
            x = block(x)
        return self.head(self.norm(x), ids)


def loss_of(stage: nn.Module, dp_rank: int, shard: SequenceShard) -> Tensor:
    """Return a loss of a rank's part of a row, with random weights. A sum that lacks a part, or has one twice,
    differs."""
    generator = torch.Generator().manual_seed(dp_rank)
    length = 8 + 8 * dp_rank
    ids = torch.randint(16, (1, length), generator=generator)
    weights = torch.randn(1, length, generator=generator, dtype=torch.float64)
    device = next(stage.parameters()).device
    ids, weights, positions = (shard.take(t.to(device), 1) for t in (ids, weights, torch.arange(length).unsqueeze(0)))
    return (weights * stage(ids, positions)).sum()


@contextmanager
def recorded(path: Path) -> Iterator[None]:
    recorder = Recorder()
    recorder.start(path)
    try:
        yield
    finally:
        recorder.close()


OPERATORS = {
    Summed.IN_BUCKETS: "allreduce",
    Summed.BY_REDUCE_SCATTER: "reduce_scatter_base",
    Summed.BY_ALL_REDUCE: "allreduce",
    Summed.AFTERWARDS: "allreduce",
}


def expected_messages(
    layouts: Sequence[ShardingKind], config: MeshConfig, num_heads: int, rank: int
) -> set[tuple[str, tuple[int, ...]]]:
    """Operators and ranks of a backward: the sums of the table, and messages of activations."""
    expected = set()
    for layout in layouts:
        for summed, ranks in ranks_of_sums(layout, config, num_heads, rank).items():
            if summed is not Summed.WITH_TOKENS:
                expected.add((OPERATORS[summed], ranks))

    def peers(domain: str, axis: str) -> tuple[int, ...]:
        return next(ranks for ranks in partition(config.domains()[domain], [axis]) if rank in ranks)

    expected.add(("alltoall_base", peers("expert", "ep_shard")))
    expected |= {(operator, peers("batch", "cp")) for operator in ("send", "receive")}  # round the ring
    expected |= {(operator, peers("batch", "tp")) for operator in ("allgather_base", "reduce_scatter_base")}
    return {(operator, ranks) for operator, ranks in expected if len(ranks) > 1}


COPIES = (ShardingKind.REPLICATED,)
WEIGHTS = (ShardingKind.FULLY_SHARDED,)
BOTH = (ShardingKind.FULLY_SHARDED, ShardingKind.EXPERTS_FULLY_SHARDED)
CUT = (ShardingKind.REPLICATED, ShardingKind.TENSOR, ShardingKind.EXPERTS)
SHARED = (*CUT, ShardingKind.TENSOR_SHARED)
CUT_AND_SHARDED = (ShardingKind.FULLY_SHARDED, ShardingKind.TENSOR_FULLY_SHARDED)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("degrees", "num_experts", "num_heads", "layouts"),
    [
        ("rep4", 8, 2, COPIES),
        ("rep4 ep2", 8, 2, (*COPIES, ShardingKind.EXPERTS)),
        ("rep4 ep4", 8, 2, (*COPIES, ShardingKind.EXPERTS)),
        ("rep2 shard2", 8, 2, WEIGHTS),
        ("shard4", 2, 2, WEIGHTS),  # of each expert a rank has a part
        ("shard4 ep2", 2, 2, BOTH),  # too
        ("rep2 shard2 ep2", 8, 2, (*WEIGHTS, ShardingKind.EXPERTS)),
        ("rep2 shard2 ep4", 8, 2, (*WEIGHTS, ShardingKind.EXPERTS)),
        ("rep2 tp2", 8, 2, CUT),
        ("tp4", 8, 2, SHARED),
        ("tp4 ep4", 8, 2, SHARED),
        ("shard2 tp2", 8, 2, (*CUT_AND_SHARDED, ShardingKind.EXPERTS_FULLY_SHARDED)),
        (
            "shard2 tp2",
            8,
            1,
            (*CUT_AND_SHARDED, ShardingKind.TENSOR_SHARED_FULLY_SHARDED, ShardingKind.EXPERTS_FULLY_SHARDED),
        ),
        ("shard2 tp2 ep4", 8, 2, (*CUT_AND_SHARDED, ShardingKind.EXPERTS)),
        ("rep2 cp2", 8, 2, WEIGHTS),
        ("rep2 cprep2", 8, 2, (*COPIES, ShardingKind.EXPERTS)),
        ("shard2 cprep2", 8, 2, BOTH),
        ("cp2 tp2", 8, 2, (*CUT_AND_SHARDED, ShardingKind.EXPERTS_FULLY_SHARDED)),
    ],
)
def test_ranks_sum_as_the_table_says(
    rank: RankContext, degrees: str, num_experts: int, num_heads: int, layouts: Sequence[ShardingKind]
) -> None:
    """In a backward they sum over the axes of the table and no others, and the sums are those of one process."""
    config = Case(degrees).config
    mesh = MeshDomains.build(config, rank.device.type)
    has_options = mesh.sizes["cp"] == 1
    stage = Stage(num_experts, num_heads, has_options=has_options).to(rank.device)
    shard_tensors(stage, mesh)
    if mesh.sizes["cp"] > 1:
        shard_context(stage, mesh.group("cp"), "ring")
    parallelize(stage, mesh, ParallelConfig())
    parameters = [*stage.parameters()]
    units = fully_sharded(stage)
    assert {sharding_kind(parameter, units) for parameter in parameters} == {*layouts}
    sharded = {0: FullySharded(stage, keeps=True, reduces_each=False)} if units else {}
    data_parallel = DataParallelStages.build(
        parameters, {0: stage}, {}, mesh, GradSyncConfig(), at_least=torch.float32, accumulates=False, sharded=sharded
    )
    data_parallel.begin(is_first=True, reduces=True, splits_backward=False)
    data_parallel.unshard(0)
    loss = loss_of(stage, mesh.dp_rank, TokenShard.of(mesh).sequence)
    data_parallel.last_backward(0)
    with recorded(rank.tmp_dir / str(rank.rank)):
        loss.backward()
        data_parallel.reduce(0)
        data_parallel.finish()

    rank.barrier()
    records = [read(rank.tmp_dir / str(number)) for number in range(4)]
    assert not mismatches(records)
    issued = {(entry.operator, entry.ranks) for entry in records[rank.rank] if len(entry.ranks) > 1}
    assert issued == expected_messages(layouts, config, num_heads, rank.rank)

    alone = Stage(num_experts, num_heads, has_options=has_options).to(rank.device)
    losses = [loss_of(alone, number, SequenceShard()) for number in range(mesh.dp_size)]
    sum(losses, torch.zeros((), device=rank.device)).backward()
    gradients = {name: parameter.grad for name, parameter in stage.named_parameters()}
    whole = {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in gradients.items()}
    assert_tensors_close(whole, {name: parameter.grad for name, parameter in alone.named_parameters()})
