"""Products of plain tensors with weights that are DTensors."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from lightning_d9d.mesh import MeshConfig, MeshDomains
from lightning_d9d.ops import WeightGradients, defer, grouped_gemm, linear
from tests.harness.compare import assert_bitwise_equal
from tests.harness.ranks import RankContext

SIZES = [3, 0, 4, 2]
"""Rows of each group; each of two ranks has two groups."""


def random(*shape: int, seed: int, device: torch.device) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(device)


def parameter(tensor: Tensor, *args: object) -> nn.Parameter:
    return nn.Parameter(distribute_tensor(tensor, *args, src_data_rank=None))


def run(forward: Callable[..., Tensor], x: Tensor, *weights: nn.Parameter, split: bool) -> list[Tensor]:
    """The gradients after two forwards and backwards, the second of twice the loss."""
    x = x.detach().requires_grad_()
    for factor in (1, 2):
        gradients = WeightGradients()
        if split:
            before = [weight.grad for weight in weights]
            with defer(gradients):
                y = forward(x, *weights)
            gradients.backward((y.square() * factor).sum())
            assert all(weight.grad is grad for weight, grad in zip(weights, before, strict=True))
            gradients.accumulate()
        else:
            (forward(x, *weights).square() * factor).sum().backward()
    gradients = [x.grad, *(weight.grad for weight in weights)]
    for weight in weights:
        weight.grad = None
    return gradients


def check_placed(gradient: Tensor, weight: Tensor, placements: tuple[Placement, ...]) -> None:
    assert isinstance(gradient, DTensor)
    assert gradient.device_mesh is weight.device_mesh
    assert gradient.placements == placements
    assert gradient.shape == weight.shape


@pytest.mark.ranks(4)
@pytest.mark.parametrize("split", [False, True], ids=["full backward", "split backward"])
def test_groups_of_this_rank(rank: RankContext, split: bool) -> None:
    """Two copies of the weights, each on two ranks: a gradient is what its own rank has added."""
    domains = MeshDomains.build(MeshConfig(data_parallel_shard=4, expert_parallel=2), rank.device.type)
    placements = (Replicate(), Shard(0))
    whole = random(4, 5, 6, seed=0, device=rank.device)
    weight = parameter(whole, domains.for_axes("ep_replicate", "ep_shard"), placements)
    part = slice(0, 2) if rank.rank % 2 == 0 else slice(2, 4)
    offsets = torch.tensor(SIZES[part], device=rank.device).cumsum(0).to(torch.int32)
    x = random(sum(SIZES[part]), 6, seed=1 + rank.rank, device=rank.device)  # of this rank alone
    expected = run(lambda x, weight: grouped_gemm(x, weight, offsets), x, nn.Parameter(whole[part]), split=False)
    dx, dw = run(lambda x, weight: grouped_gemm(x, weight, offsets), x, weight, split=split)
    check_placed(dw, weight, placements)
    assert_bitwise_equal("dx", dx, expected[0])
    assert_bitwise_equal("dweight", dw.to_local(), expected[1])
    domains.close()


@pytest.mark.ranks(2)
def test_groups_of_this_rank_under_autocast(rank: RankContext) -> None:
    whole = random(4, 16, 8, seed=0, device=rank.device).float()
    weight = parameter(whole, init_device_mesh(rank.device.type, (2,)), [Shard(0)])
    offsets = torch.tensor([3, 5], dtype=torch.int32, device=rank.device)
    x = random(5, 8, seed=rank.rank, device=rank.device).float()
    forward = torch.autocast(rank.device.type, torch.bfloat16)(lambda x, weight: grouped_gemm(x, weight, offsets))
    expected = run(forward, x, nn.Parameter(whole.chunk(2)[rank.rank]), split=False)
    for split in (False, True):
        _, dw = run(forward, x, weight, split=split)
        assert dw.dtype == torch.float32
        assert_bitwise_equal("dweight", dw.to_local(), expected[1])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("split", [False, True], ids=["full backward", "split backward"])
def test_linear_with_a_replicated_weight(rank: RankContext, split: bool) -> None:
    mesh = init_device_mesh(rank.device.type, (2,))
    tensors = random(5, 6, seed=0, device=rank.device), random(5, seed=1, device=rank.device)
    weights = [parameter(tensor, mesh, [Replicate()]) for tensor in tensors]
    x = random(3, 6, seed=2 + rank.rank, device=rank.device)  # of this rank alone
    expected = run(F.linear, x, *map(nn.Parameter, tensors), split=False)
    actual = run(linear, x, *weights, split=split)
    for gradient, weight in zip(actual[1:], weights, strict=True):
        check_placed(gradient, weight, (Replicate(),))
    for name, ours, theirs in zip(("dx", "dweight", "dbias"), actual, expected, strict=True):
        assert_bitwise_equal(name, ours.to_local() if isinstance(ours, DTensor) else ours, theirs)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("split", [False, True], ids=["full backward", "split backward"])
def test_linear_with_a_weight_that_is_cut_is_refused(rank: RankContext, split: bool) -> None:
    """An example is a weight that is fully sharded and not gathered: half of the result would pass for the whole."""
    weight = parameter(random(4, 6, seed=0, device=rank.device), init_device_mesh(rank.device.type, (2,)), [Shard(0)])
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        run(linear, random(3, 6, seed=1, device=rank.device), weight, split=split)
