"""Mixtures of experts whose router and copies run on kernels: the same as on torch's operators, recomputed, too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_d9d import ParallelConfig
from lightning_d9d.modules import AllToAllDispatch, BalanceConfig, SparseMoE
from lightning_d9d.ops.backend import Kernels, using_kernels
from lightning_d9d.parallel import recompute_activations
from tests.harness.compare import assert_bitwise_equal, assert_tensors_close
from tests.harness.ranks import RankContext
from tests.ops.grid import DEVICES

HIDDEN, NUM_EXPERTS, TOP_K = 16, 6, 2
BALANCES = {
    "none": None,
    "losses": BalanceConfig(bias_rate=0.1, sequence_loss=0.3, global_batch_loss=0.7, z_loss=0.05),
    "forced": BalanceConfig(forced=True, sequence_loss=0.3),
}


class Block(nn.Module):
    def __init__(self, balance: str, normalize: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.moe = SparseMoE(
            HIDDEN, 8, NUM_EXPERTS, TOP_K, normalize=normalize, initializer_range=0.3, balance=BALANCES[balance]
        )

    def forward(self, x: Tensor) -> Tensor:
        result = self.moe(x)
        y, loss = result if isinstance(result, tuple) else (result, 0)
        return y + loss


def results(
    kernels: Kernels, device: str, balance: str, *, normalize: bool = True, recompute: str = "none"
) -> dict[str, Tensor]:
    block = Block(balance, normalize).to(device)
    recompute_activations(block, ParallelConfig(recompute=recompute), [block])
    x = torch.randn(2, 5, HIDDEN, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()
    with using_kernels(kernels):
        y = block(x)
        y.square().sum().backward()
    counted = {} if balance == "none" else {"counts": block.moe.gate.balance.tokens_per_expert.double()}
    return {"y": y.detach(), "x": x.grad, **{name: p.grad for name, p in block.named_parameters()}, **counted}


@DEVICES
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("balance", BALANCES)
def test_kernels_equal_torch(device: str, balance: str, normalize: bool) -> None:
    expected = results("torch", device, balance, normalize=normalize)
    assert_tensors_close(results("triton", device, balance, normalize=normalize), expected)


@DEVICES
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputation(device: str, recompute: str) -> None:
    expected = results("triton", device, "losses")
    for name, actual in results("triton", device, "losses", recompute=recompute).items():
        assert_bitwise_equal(name, actual, expected[name])


@pytest.mark.ranks(2)
def test_experts_on_two_ranks(rank: RankContext) -> None:
    """Copies and sums are the same on both; ranks have different numbers of tokens."""
    dispatch = AllToAllDispatch(NUM_EXPERTS, rank.group)
    generator = torch.Generator().manual_seed(rank.rank)
    num_tokens = 3 + 4 * rank.rank
    indices = torch.rand(num_tokens, NUM_EXPERTS, generator=generator).argsort(1)[:, :TOP_K].to(rank.device)
    values = [torch.randn(num_tokens, width, generator=generator).to(rank.device) for width in (HIDDEN, TOP_K, HIDDEN)]
    of = {}
    for kernels in ("torch", "triton"):
        x, weights = (each.clone().requires_grad_() for each in values[:2])
        with using_kernels(kernels):
            tokens = dispatch.dispatch(x, indices, weights)
            y = dispatch.combine(tokens.x * tokens.weights.unsqueeze(1), tokens)
            y.backward(values[2])
        of[kernels] = {
            "rows": tokens.x,
            "offsets": tokens.offsets.double(),
            "y": y,
            "x": x.grad,
            "weights": weights.grad,
        }
    assert_tensors_close(of["triton"], of["torch"])
    assert_bitwise_equal("rows", of["triton"]["rows"], of["torch"]["rows"])
