"""Who sums which gradient: the table, and what ranks do."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path

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
from lightning_d9d.modules import SparseMoE
from lightning_d9d.parallel import WHO_SUMS, Layout, ParallelConfig, Summed, parallelize
from lightning_d9d.parallel.data import FullySharded
from lightning_d9d.parallel.plan import fully_sharded, group_of, layout_of
from lightning_d9d.strategy.data_parallel import DataParallelStages
from lightning_d9d.sync.buckets import GradSyncConfig
from tests.harness.compare import assert_tensors_close
from tests.harness.ranks import RankContext
from tests.harness.recorder import Recorder
from tests.harness.records import mismatches, read
from tests.mesh.fake_world import DENSE, fake_world, legal_meshes
from tests.parallel.meta import meta_stages

EXPERTS = (Layout.EXPERTS, Layout.EXPERTS_FULLY_SHARDED)


def views_of(config: MeshConfig) -> list[dict[str, int]]:
    tensor = config.tensor_parallel
    split = [config.split_tensor(n) for n in range(1, tensor + 1) if tensor % n == 0]
    return [*config.domains().values(), config.expert_weights(), *(v for views in split for v in views.values())]


@pytest.mark.parametrize("layout", Layout)
def test_axes_of_a_layout_are_the_ranks_of_a_stage(layout: Layout) -> None:
    """They are axes of one view of the ranks, so no rank is met along two of them."""
    axes = [*WHO_SUMS[layout]]
    for config in legal_meshes(24, DENSE):
        for view in (view for view in views_of(config) if {*axes} <= {*view}):
            stage = 24 // config.pipeline_parallel
            assert prod(view[axis] for axis in axes) == stage
            assert partition(view, axes) == tuple(tuple(range(first, first + stage)) for first in range(0, 24, stage))


MESHES = {
    "copies": (MeshConfig(data_parallel_replicate=64), Layout.REPLICATED, Layout.REPLICATED),
    "shards": (MeshConfig(data_parallel_shard=64), Layout.FULLY_SHARDED, Layout.FULLY_SHARDED),
    "experts over copies": (
        MeshConfig(pipeline_parallel=2, data_parallel_replicate=32, expert_parallel=8),
        Layout.REPLICATED,
        Layout.EXPERTS,
    ),
    "experts over all": (
        MeshConfig(data_parallel_replicate=64, expert_parallel=64),
        Layout.REPLICATED,
        Layout.EXPERTS,
    ),
    "within a replica": (
        MeshConfig(pipeline_parallel=2, data_parallel_replicate=2, data_parallel_shard=16, expert_parallel=4),
        Layout.FULLY_SHARDED,
        Layout.EXPERTS_FULLY_SHARDED,
    ),
    "over two replicas": (
        MeshConfig(data_parallel_replicate=4, data_parallel_shard=16, expert_parallel=32),
        Layout.FULLY_SHARDED,
        Layout.EXPERTS,
    ),
    "4096": (
        MeshConfig(pipeline_parallel=8, data_parallel_shard=512, expert_parallel=64),
        Layout.FULLY_SHARDED,
        Layout.EXPERTS_FULLY_SHARDED,
    ),
}


@pytest.mark.parametrize("name", MESHES)
def test_each_parameter_has_its_layout(name: str) -> None:
    config, dense, experts = MESHES[name]
    rank = config.world_size // 3
    model = dataclasses.replace(Qwen3MoeConfig.preset("30b-a3b"), num_hidden_layers=config.pipeline_parallel)
    with fake_world(rank, config.world_size):
        mesh = MeshDomains.build(config, "cpu")
        (stage,) = meta_stages(model, mesh)
        units = fully_sharded(stage)
        for parameter_name, parameter in stage.named_parameters():
            layout = layout_of(parameter, units)
            assert layout == (experts if ".experts." in parameter_name else dense)
            group = group_of(layout, mesh, Summed.IN_BUCKETS)
            in_buckets = [axis for axis, summed in WHO_SUMS[layout].items() if summed is Summed.IN_BUCKETS]
            if group is None:
                assert prod(mesh.sizes[axis] for axis in in_buckets) == 1
            else:
                view = next(view for view in views_of(config) if {*in_buckets} <= {*view})
                assert tuple(dist.get_process_group_ranks(group)) in partition(view, in_buckets)


def test_a_sharded_parameter_that_nobody_sums_is_refused() -> None:
    with fake_world(0, 4):
        context = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
        parameter = nn.Parameter(distribute_tensor(torch.ones(8, 8), context, [Shard(0)], src_data_rank=None))
        with pytest.raises(ConfigError, match=r"\(8, 8\) .* on the axes cp, and nothing would sum its gradient"):
            layout_of(parameter, set())


# On ranks


class Stage(nn.Module):
    """A block with a mixture of experts and a layer outside of blocks; of 2 experts 4 ranks have a part of each."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        mixture = SparseMoE(8, 4, num_experts, 2, normalize=True, initializer_range=0.5)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), mixture)])
        self.last = nn.Linear(8, 8)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


def loss_of(stage: nn.Module, rank: int) -> Tensor:
    """Another factor for each rank: a sum that lacks one, or has one twice, is no multiple of the right one."""
    rows = torch.randn(1, 5 + rank, 8, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    device = next(stage.parameters()).device
    return 3**rank * stage(rows.to(device)).square().sum()


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
    Summed.WITH_TOKENS: "alltoall_base",
}


WEIGHTS = (Layout.FULLY_SHARDED,)
BOTH = (Layout.FULLY_SHARDED, Layout.EXPERTS_FULLY_SHARDED)
WHOLE_EXPERTS = (Layout.FULLY_SHARDED, Layout.EXPERTS)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("replicate", "shard", "ep", "num_experts", "layouts"),
    [
        (4, 1, 1, 8, (Layout.REPLICATED,)),
        (4, 1, 2, 8, (Layout.REPLICATED, Layout.EXPERTS)),
        (4, 1, 4, 8, (Layout.REPLICATED, Layout.EXPERTS)),
        (2, 2, 1, 8, WEIGHTS),
        (1, 4, 1, 2, WEIGHTS),  # of each expert a rank has a part
        (1, 4, 2, 2, BOTH),  # too
        (2, 2, 2, 8, WHOLE_EXPERTS),
        (2, 2, 4, 8, WHOLE_EXPERTS),
    ],
)
def test_ranks_sum_as_the_table_says(
    rank: RankContext, replicate: int, shard: int, ep: int, num_experts: int, layouts: Sequence[Layout]
) -> None:
    """In a backward they sum over the axes of the table and over no others, and the sums are those of one process."""
    config = MeshConfig(data_parallel_replicate=replicate, data_parallel_shard=shard, expert_parallel=ep)
    mesh = MeshDomains.build(config, rank.device.type)
    stage = Stage(num_experts).to(rank.device)
    parallelize(stage, mesh, ParallelConfig())
    parameters = [*stage.parameters()]
    units = fully_sharded(stage)
    assert {layout_of(parameter, units) for parameter in parameters} == {*layouts}
    sharded = {0: FullySharded(stage, keeps=True, reduces_each=False)} if units else {}
    data_parallel = DataParallelStages.build(
        parameters, {0: stage}, {}, mesh, GradSyncConfig(), at_least=torch.float32, accumulates=False, sharded=sharded
    )
    data_parallel.begin(is_first=True, reduces=True, splits=False)
    data_parallel.unshard(0)
    loss = loss_of(stage, rank.rank)
    data_parallel.last_backward(0)
    with recorded(rank.tmp_dir / str(rank.rank)):
        loss.backward()
        data_parallel.reduce(0)
        data_parallel.finish()

    rank.barrier()
    records = [read(rank.tmp_dir / str(number)) for number in range(4)]
    assert not mismatches(records)
    expected = set()
    for layout in layouts:
        for axis, summed in WHO_SUMS[layout].items():
            view = next(view for view in views_of(config) if axis in view)
            if view[axis] > 1:
                ranks = next(ranks for ranks in partition(view, [axis]) if rank.rank in ranks)
                expected.add((OPERATORS[summed], ranks))
    issued = {(entry.operator, entry.ranks) for entry in records[rank.rank] if len(entry.ranks) > 1}
    assert issued == expected

    alone = Stage(num_experts).to(rank.device)
    sum((loss_of(alone, number) for number in range(4)), torch.zeros((), device=rank.device)).backward()
    gradients = {name: parameter.grad for name, parameter in stage.named_parameters()}
    whole = {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in gradients.items()}
    assert_tensors_close(whole, {name: parameter.grad for name, parameter in alone.named_parameters()})
