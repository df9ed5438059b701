"""Layers whose ops run on their kernels: the same as on torch's, recomputed and in split backwards, too."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from lightning_d9d.modules import GroupedExperts, GroupedQueryAttention, RMSNorm, SwiGLU, rope_tables
from lightning_d9d.ops import WeightGradients, defer, rms_norm, swiglu
from lightning_d9d.ops.backend import Kernels, using_kernels
from tests.harness.compare import assert_close_named, assert_tensors_close
from tests.harness.ranks import RankContext
from tests.ops.grid import DEVICES

SEQ, HIDDEN = 6, 16


class Layer(nn.Module):
    """Attention, then a dense MLP and, beside it, experts that have a third of the rows each."""

    def __init__(self) -> None:
        super().__init__()
        self.first_norm = RMSNorm(HIDDEN, 1e-6)
        self.attention = GroupedQueryAttention(HIDDEN, 4, 2, 8, norm_eps=1e-6, initializer_range=0.3)
        self.second_norm = RMSNorm(HIDDEN, 1e-6)
        self.mlp = SwiGLU(HIDDEN, 24, initializer_range=0.3)
        self.experts = GroupedExperts(3, HIDDEN, 8, initializer_range=0.3)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        tables = rope_tables(torch.arange(SEQ, device=x.device).unsqueeze(0), 8, 100.0, x.dtype)
        normed, x = self.second_norm(self.attention(self.first_norm(x), tables), residual=x)
        rows = normed.flatten(0, 1)
        offsets = torch.tensor([4, 8, 12], dtype=torch.int32, device=x.device)
        return x + self.mlp(normed) + self.experts(rows, weights, offsets).view_as(x)


def results(
    kernels: Kernels, device: str, *, recomputes: bool = False, splits: bool = False
) -> dict[str, Tensor | None]:
    """The layer's result and all gradients."""
    torch.manual_seed(0)
    layer = Layer()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    x, weights, dy = torch.randn(2, SEQ, HIDDEN), torch.rand(2 * SEQ), torch.randn(2, SEQ, HIDDEN)
    layer.to(device)
    x, weights, dy = x.to(device).requires_grad_(), weights.to(device).requires_grad_(), dy.to(device)
    later = WeightGradients()
    with using_kernels(kernels):
        with defer(later) if splits else nullcontext():
            y = checkpoint(layer, x, weights, use_reentrant=False) if recomputes else layer(x, weights)
        if splits:
            later.backward(y, dy)
            later.accumulate()
        else:
            y.backward(dy)
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {"y": y.detach(), "x": x.grad, "weights": weights.grad, **gradients}


@DEVICES
def test_kernels_equal_torch(device):
    assert_tensors_close(results("triton", device), results("torch", device))


@DEVICES
@pytest.mark.parametrize(("recomputes", "splits"), [(True, False), (False, True), (True, True)])
def test_recomputed_and_split(device, recomputes, splits):
    actual = results("triton", device, recomputes=recomputes, splits=splits)
    assert_tensors_close(actual, results("triton", device))


@pytest.mark.ranks(2)
def test_dtensors_run_on_torch(rank: RankContext) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(4, 8, device=rank.device), torch.randn(8, device=rank.device)
    mesh = init_device_mesh(rank.device.type, (2,))
    rows = distribute_tensor(x, mesh, [Shard(0)], src_data_rank=None)
    shared = distribute_tensor(weight, mesh, [Replicate()], src_data_rank=None)
    with using_kernels("triton"):
        assert_close_named("norm", rms_norm(rows, shared, 1e-6), rms_norm(x.double(), weight.double(), 1e-6).float())
        assert_close_named("swiglu", swiglu((rows, rows)), swiglu((x.double(), x.double())).float())
