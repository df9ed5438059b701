"""FSDP2 and DTensor take these meshes: what four ranks compute equals one process."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_d9d.mesh import MeshConfig, MeshDomains
from tests.harness.compare import assert_close_named, assert_gradients_equal
from tests.harness.ranks import RankContext

ROWS = 8
SHARDED = {
    "shards": MeshConfig(data_parallel_shard=4),
    "shards of samples and sequences": MeshConfig(data_parallel_shard=2, context_parallel_shard=2),
    "copies of shards": MeshConfig(data_parallel_replicate=2, data_parallel_shard=2),
    "shards and tensor": MeshConfig(data_parallel_shard=2, tensor_parallel=2),
    "copies and tensor": MeshConfig(data_parallel_replicate=2, tensor_parallel=2),
}


def network(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).to(device, torch.float64)


def rows(device: torch.device) -> Tensor:
    return torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(device)


def loss_of(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).square().mean()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("mesh", SHARDED)
def test_fully_sharded_over_the_dense_domain(rank: RankContext, mesh: str) -> None:
    domains = MeshDomains.build(SHARDED[mesh], rank.device.type)
    reference = network(rank.device)
    module = copy.deepcopy(reference)
    if domains.sizes["tp"] > 1:
        parallelize_module(
            module, domains.for_axes("tp", domain="dense"), {"0": ColwiseParallel(), "2": RowwiseParallel()}
        )
    fully_shard(module, mesh=domains.for_axes("dp_replicate", "dp_cp_shard"))
    part = domains.coordinates["dp_replicate"] * domains.sizes["dp_cp_shard"] + domains.coordinates["dp_cp_shard"]
    x = rows(rank.device)
    loss = loss_of(module, x.chunk(4 // domains.sizes["tp"])[part])
    loss.backward()
    expected = loss_of(reference, x)
    expected.backward()
    assert_gradients_equal(module, reference)
    total = loss.detach().clone()
    dist.all_reduce(total, group=domains.group("dp", "cp"))
    assert_close_named("loss", total * domains.sizes["tp"] / 4, expected)
    domains.close()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("tensor_parallel", [2, 4])
def test_tensor_parallel_over_the_regular_domain(rank: RankContext, tensor_parallel: int) -> None:
    config = MeshConfig(pipeline_parallel=4 // tensor_parallel, tensor_parallel=tensor_parallel)
    domains = MeshDomains.build(config, rank.device.type)
    reference = network(rank.device)
    module = copy.deepcopy(reference)
    parallelize_module(module, domains.regular["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    loss, expected = (loss_of(m, rows(rank.device)) for m in (module, reference))
    loss.backward()
    expected.backward()
    assert_close_named("loss", loss, expected)
    assert_gradients_equal(module, reference)
    domains.close()


@pytest.mark.ranks(4)
def test_domains_built_again_work_with_what_dtensor_remembers(rank: RankContext) -> None:
    """DTensor caches by mesh, and these two slices are equal: the group of the first must still be there."""
    slices = []
    for config in (SHARDED["shards and tensor"], SHARDED["copies and tensor"]):
        domains = MeshDomains.build(config, rank.device.type)
        slices.append(domains.for_axes("tp", domain="dense"))
        module = network(rank.device)
        parallelize_module(module, slices[-1], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        loss_of(module, rows(rank.device)).backward()
        domains.close()
    assert slices[0] == slices[1]


@pytest.mark.ranks(4)
@pytest.mark.parametrize("expert_parallel", [1, 2, 4])
def test_experts_lie_on_all_ranks_of_a_stage(rank: RankContext, expert_parallel: int) -> None:
    """Tensor-parallel ones too; copies of an expert are sharded over what is left."""
    config = MeshConfig(data_parallel_shard=2, tensor_parallel=2, expert_parallel=expert_parallel)
    domains = MeshDomains.build(config, rank.device.type)
    weights = torch.arange(4 * 2 * 3, dtype=torch.float64, device=rank.device).reshape(4, 2, 3)
    placed = distribute_tensor(weights, domains.expert["ep_shard"], [Shard(0)])
    assert torch.equal(placed.to_local(), weights.chunk(expert_parallel)[rank.rank % expert_parallel])
    experts = nn.ParameterList([placed])
    fully_shard(experts, mesh=domains.expert["ep_replicate"])
    (sharded,) = experts.parameters()
    assert isinstance(sharded, DTensor)
    assert torch.equal(sharded.full_tensor(), weights)
    domains.close()
