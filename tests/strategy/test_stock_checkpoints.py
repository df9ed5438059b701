"""Lightning's own files under this strategy, and consolidated ones of this strategy under Lightning's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_d9d import CheckpointConfig, D9DStrategy, MeshConfig
from lightning_d9d.optim import parameter_groups
from tests.harness.compare import assert_tensors_close
from tests.harness.ranks import RankContext
from tests.strategy.plain import trainer
from tests.strategy.sharded import Sharded, WholeWeights
from tests.strategy.staged import Staged, staged_rows


class Stagewise(Staged):
    """A D9DModule, which Lightning's own strategies train too."""

    def __init__(self) -> None:
        super().__init__(optimizer="adamw")

    def configure_stage(self, stage: Any) -> Any:
        built = super().configure_stage(stage)
        for parameter in built.parameters():
            parameter.data.normal_()
        return built

    def train_dataloader(self) -> DataLoader:
        size = getattr(self.trainer, "world_size", 1)
        return DataLoader(staged_rows(48, ignored_every=None), 8 // size)  # type: ignore[arg-type]

    def whole(self) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in self.state_dict().items()}


class Plainly(Sharded):
    """Shards itself under this strategy alone."""

    def __init__(self) -> None:
        super().__init__(optimizer="adamw")

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, D9DStrategy):
            super().configure_model()


class Partly(Plainly):
    """A module that has one more group where it shards itself, for replicated parameters."""

    def configure_model(self) -> None:
        strategy: Any = self.trainer.strategy
        if isinstance(strategy, D9DStrategy) and not isinstance(self.net[0].weight, DTensor):
            fully_shard(self.net[0], mesh=strategy.mesh.for_axes("dp_cp_shard"))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(parameter_groups(self, 0.3), lr=0.01)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9), "interval": "step"}]


def ours(mode: Any = "consolidated", **mesh: int) -> D9DStrategy:
    return D9DStrategy(mesh=MeshConfig(**mesh) if mesh else None, checkpoint=CheckpointConfig(mode=mode))


def fit(
    kind: type, strategy: Any, devices: int, device: str, *callbacks: Any, path: Path | None = None
) -> tuple[L.Trainer, dict[str, torch.Tensor]]:
    whole = WholeWeights()
    run = trainer(
        strategy,
        devices,
        device,
        callbacks=[whole, *callbacks],
        enable_checkpointing=bool(callbacks),
        max_epochs=2,
        precision="64-true",
    )
    run.fit(kind(), ckpt_path=path)
    return run, whole.weights


def check(kind: type, saves: Any, loads: Any, devices: int, folder: Path, device: str) -> None:
    """Check that one strategy resumes what another one saved, between the two epochs."""
    saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=6, save_top_k=-1)
    _, expected = fit(kind, saves, devices, device, saving)
    path = folder / "step=6.ckpt"
    assert path.is_file()
    run, weights = fit(kind, loads, devices, device, path=path)
    assert run.global_step == 12
    assert_tensors_close(weights, expected)


@pytest.mark.parametrize("kind", [Plainly, Stagewise])
@pytest.mark.parametrize("to_stock", [True, False])
def test_one_device(kind: type, to_stock: bool, tmp_path: Path) -> None:
    check(kind, *((ours(), "auto") if to_stock else ("auto", ours("auto"))), 1, tmp_path, "cpu")


CASES: dict[str, tuple[type, dict[str, int]]] = {
    "replicas": (Plainly, {"data_parallel_replicate": 2}),
    "shards": (Plainly, {"data_parallel_shard": 2}),
    "tensors": (Plainly, {"tensor_parallel": 2}),
    "shards beside replicas": (Partly, {"data_parallel_shard": 2}),
    "stages of data ranks": (Stagewise, {"data_parallel_shard": 2}),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("to_stock", [True, False])
def test_ddp(rank: RankContext, case: str, to_stock: bool) -> None:
    kind, mesh = CASES[case]
    saves, loads = (ours(**mesh), DDPStrategy()) if to_stock else (DDPStrategy(), ours("auto", **mesh))
    check(kind, saves, loads, 2, rank.tmp_dir, str(rank.device))
