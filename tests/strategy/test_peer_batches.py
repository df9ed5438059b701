"""Batches whose tokens have no room in the memory of experts' ranks are computed again."""

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_d9d import ConfigError, D9DStrategy, MeshConfig, ParallelConfig
from lightning_d9d.modules import BalanceConfig
from lightning_d9d.strategy.peer_batches import PeerBatches
from tests.harness.compare import assert_tensors_close
from tests.harness.ranks import RankContext
from tests.meshes.equality import CONFIG, Watched
from tests.strategy.plain import trainer

STEPS = 3
MESH = MeshConfig(data_parallel_replicate=2, expert_parallel=2)
BALANCE = BalanceConfig(bias_rate=0.5)
"""Biases move so fast that experts' loads differ."""


def fit(rank: RankContext, parallel: ParallelConfig, **options: Any) -> tuple[dict[str, Tensor], list[bool]]:
    """Weights, biases, losses and norms after a fit, and which batches had tokens without room."""
    L.seed_everything(1, verbose=False)
    accumulated = options.get("accumulate_grad_batches", 1)
    module, overflows = Watched(CONFIG, STEPS * accumulated), []
    module.balance = BALANCE
    overflowed = PeerBatches.overflowed

    def noted(peers: PeerBatches) -> bool:
        overflows.append(overflowed(peers))
        return overflows[-1]

    strategy_options = {"mesh": MESH, "parallel": parallel} | {
        name: options.pop(name) for name in ("step_in_backward",) if name in options
    }
    run = trainer(
        D9DStrategy(**strategy_options),
        2,
        rank.device.type,
        precision="64-true",
        max_epochs=1,
        use_distributed_sampler=False,
        **{"gradient_clip_val": 1.0, **options},
    )
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(PeerBatches, "overflowed", noted)
        run.fit(module)
    results = {name: buffer.clone() for name, buffer in module.named_buffers() if name.endswith("bias")}
    for step in range(STEPS):
        results |= {f"{name} after step {step}": value for name, value in module.seen.weights[step].items()}
        results |= {f"loss {step}": module.seen.losses[step], f"norm {step}": module.seen.norms[step]}
    return results, overflows


@pytest.mark.ranks(2)
def test_no_token_is_lost(rank: RankContext) -> None:
    """Weights, losses, norms and biases are those of all-to-all; tokens of experts count once."""
    expected, none = fit(rank, ParallelConfig(expert_dispatch="all_to_all"))
    assert none == []
    assert any(name.endswith("bias") for name in expected)
    actual, overflows = fit(rank, ParallelConfig(expert_dispatch="peer", expert_capacity=1.0))
    assert len(overflows) == STEPS
    assert True in overflows
    assert_tensors_close(actual, expected)
    spacious, overflows = fit(rank, ParallelConfig(expert_dispatch="peer", expert_capacity=4.0))
    assert overflows == [False] * STEPS
    assert_tensors_close(spacious, expected)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accumulate_grad_batches": 2}, "expert_dispatch='peer' with accumulate_grad_batches=2: .*microbatch_size"),
        ({"step_in_backward": True, "gradient_clip_val": None}, "expert_dispatch='peer' with step_in_backward=True"),
    ],
)
def test_what_cannot_be_computed_again_is_refused(rank: RankContext, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fit(rank, ParallelConfig(expert_dispatch="peer"), **options)


@pytest.mark.parametrize("capacity", [0.5, float("nan"), float("inf")])
def test_a_capacity_without_room_for_equal_loads_is_refused(capacity: float) -> None:
    with pytest.raises(ConfigError, match=f"ParallelConfig.expert_capacity={capacity} must be a number of at least 1"):
        ParallelConfig(expert_dispatch="peer", expert_capacity=capacity)
    assert torch.isfinite(torch.tensor(ParallelConfig().expert_capacity))
