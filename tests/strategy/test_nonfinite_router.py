"""`skip_nonfinite` where a router's logits are not finite on one rank: no rank steps, raises or waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_d9d import D9DStrategy, MeshConfig, ParallelConfig
from lightning_d9d.mesh.sharding import local
from lightning_d9d.models.qwen3_moe import Qwen3MoePretraining
from lightning_d9d.modules import BalanceConfig
from lightning_d9d.optim import StochasticAdamW, parameter_groups
from tests.harness.compare import assert_bitwise_equal
from tests.harness.ranks import RankContext
from tests.meshes.cases import IN_HALVES, PEER
from tests.models.test_qwen3_moe_balance import CONFIG, rows
from tests.strategy.plain import trainer

BAD_BATCH = 1
OPTIMIZERS = {
    "reads found_inf": lambda module: StochasticAdamW(parameter_groups(module, 0.0), lr=0.01),
    "asks the host": lambda module: torch.optim.SGD(module.parameters(), lr=0.1),
}


class Spoiled(Qwen3MoePretraining):
    """A module whose last router gets a value that is not finite, in one batch on the last rank."""

    def __init__(self, optimizer: str, value: float) -> None:
        super().__init__(CONFIG, balance=BalanceConfig(bias_rate=0.1))
        self.choice, self.value = optimizer, value
        self.states: list[dict[str, Tensor]] = []
        self.skipped: list[float] = []

    def on_train_start(self) -> None:
        self.get_submodule("stages.0.model.layers.3.mlp.gate").register_forward_pre_hook(self.spoil)

    def spoil(self, gate: Any, inputs: tuple[Tensor]) -> tuple[Tensor]:
        is_bad = self.trainer.fit_loop.epoch_loop.batch_idx == BAD_BATCH
        return (inputs[0] * self.value,) if is_bad and self.global_rank == self.trainer.world_size - 1 else inputs

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.states.append({name: local(value).clone() for name, value in self.state_dict().items()})
        self.skipped.append(float(self.trainer.callback_metrics["skipped_steps"]))

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.choice](self)


def check(optimizer: str, value: float, devices: int, device: str, **options: Any) -> None:
    torch.manual_seed(3)
    module = Spoiled(optimizer, value)
    strategy = D9DStrategy(skip_nonfinite=True, **options)
    run = trainer(strategy, devices, device, max_epochs=1, use_distributed_sampler=False, gradient_clip_val=1.0)
    run.fit(module, DataLoader(rows(8), batch_size=2))  # type: ignore[arg-type]
    assert module.skipped == [0, 1, 1, 1]
    assert strategy.num_skipped_steps == 1
    before, spoiled, after, _ = module.states
    for name, tensor in spoiled.items():
        assert_bitwise_equal(name, tensor, before[name])
    assert all(not torch.equal(after[name], tensor) for name, tensor in spoiled.items() if "experts" in name)
    assert all(tensor.isfinite().all() for tensor in module.states[-1].values())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_in_one_process(optimizer: str, value: float) -> None:
    check(optimizer, value, 1, "cpu")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("degree", ["data_parallel_replicate", "data_parallel_shard"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_with_experts_on_two_ranks(rank: RankContext, optimizer: str, degree: str) -> None:
    mesh = MeshConfig(expert_parallel=2, **{degree: 2})
    check(optimizer, float("nan"), 2, rank.device.type, mesh=mesh)


@pytest.mark.ranks(2)
@pytest.mark.meshes
@pytest.mark.parametrize("parallel", [PEER, IN_HALVES], ids=["peer", "halves"])
def test_with_other_dispatches(rank: RankContext, parallel: ParallelConfig) -> None:
    mesh = MeshConfig(data_parallel_replicate=2, expert_parallel=2)
    check("reads found_inf", float("nan"), 2, rank.device.type, mesh=mesh, parallel=parallel)
