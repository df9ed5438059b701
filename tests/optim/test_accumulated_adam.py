"""Adam with accumulated moments: the published update, torch's own with one step, and on shards."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lightning_d9d.errors import ConfigError
from lightning_d9d.mesh import MeshConfig, MeshDomains
from lightning_d9d.optim import AccumAdam, AccumAdamW
from tests.harness.ranks import RankContext

BOTH = pytest.mark.parametrize("cls", [AccumAdam, AccumAdamW])


def gradient_of(step: int, shape: tuple[int, ...] = (5, 3)) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def published(cls: type, steps: int, size: int, lr: float, betas: tuple[float, float], eps: float, decay: float) -> Any:
    """The formulas, in numpy."""
    weight = gradient_of(999).numpy()
    m, v, s = (np.zeros_like(weight) for _ in range(3))
    for t in range(1, steps + 1):
        g, tau = gradient_of(t).numpy(), int(np.ceil(t / size))
        if cls is AccumAdamW:
            weight = weight * (1 - lr * decay)
        else:
            g = g + decay * weight
        s = s + g / size
        fresh, square = m + (1 - betas[0]) * g, v + (1 - betas[1]) * g**2
        step = lr / (1 - betas[0] ** tau)
        weight = weight - step * fresh / (np.sqrt(square) / np.sqrt(1 - betas[1] ** tau) + eps)
        if t % size == 0:
            m, v, s = betas[0] * (m + (1 - betas[0]) * s), betas[1] * (v + (1 - betas[1]) * s**2), 0 * s
    return weight


@BOTH
@pytest.mark.parametrize("size", [1, 3, 4])
def test_equals_the_published_update(cls: type[AccumAdam], size: int) -> None:
    weight = nn.Parameter(gradient_of(999))
    optimizer = cls([weight], 0.01, (0.9, 0.98), 1e-6, 0.1, accum_iter=size)
    for step in range(1, 11):
        weight.grad = gradient_of(step)
        optimizer.step()
    expected = published(cls, 10, size, 0.01, (0.9, 0.98), 1e-6, 0.1)
    np.testing.assert_allclose(weight.detach().numpy(), expected, atol=1e-13)


@BOTH
def test_one_step_for_each_of_the_moments_is_torch(cls: type[AccumAdam]) -> None:
    ours, theirs = nn.Parameter(gradient_of(999)), nn.Parameter(gradient_of(999))
    options: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}
    stock = torch.optim.AdamW if cls is AccumAdamW else torch.optim.Adam
    optimizers = cls([ours], accum_iter=1, **options), stock([theirs], **options)
    for step in range(8):
        for optimizer, weight in zip(optimizers, (ours, theirs), strict=True):
            weight.grad = gradient_of(step)
            optimizer.step()
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)


@BOTH
def test_a_loaded_state_goes_on_inside_of_a_round(cls: type[AccumAdam]) -> None:
    whole, parts = nn.Parameter(gradient_of(999)), nn.Parameter(gradient_of(999))
    first, second = cls([whole]), cls([parts])
    for step in range(10):
        if step == 6:
            state = copy.deepcopy(second.state_dict())
            second = cls([parts])
            second.load_state_dict(state)
        for optimizer, weight in ((first, whole), (second, parts)):
            weight.grad = gradient_of(step)
            optimizer.step()
    assert torch.equal(whole, parts)


@pytest.mark.ranks(2)
def test_shards_equal_the_whole(rank: RankContext) -> None:
    mesh = MeshDomains.build(MeshConfig(data_parallel_shard=2), rank.device.type).for_axes("dp_shard")

    def placed(tensor: torch.Tensor) -> DTensor:
        return distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None)

    whole, shard = nn.Parameter(gradient_of(999)), nn.Parameter(placed(gradient_of(999)))
    optimizers = AccumAdamW([whole]), AccumAdamW([shard])
    for step in range(6):
        whole.grad, shard.grad = gradient_of(step), placed(gradient_of(step))
        for optimizer in optimizers:
            optimizer.step()
    assert isinstance(shard.data, DTensor)
    torch.testing.assert_close(shard.data.full_tensor(), whole.data, atol=1e-14, rtol=0)


@BOTH
@pytest.mark.parametrize(
    "wrong", [{"lr": -1.0}, {"betas": (1.0, 0.9)}, {"eps": -1.0}, {"weight_decay": -1.0}, {"accum_iter": 0}], ids=str
)
def test_values_out_of_range_are_refused(cls: type[AccumAdam], wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{cls.__name__}: {next(iter(wrong))}="):
        cls([nn.Parameter(torch.zeros(2))], **wrong)
