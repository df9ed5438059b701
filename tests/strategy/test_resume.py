"""A run that goes on has the losses and weights of one that was never interrupted, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from lightning_d9d import D9DStrategy, StageInfo
from tests.harness.compare import assert_bitwise_equal
from tests.harness.ranks import RankContext
from tests.strategy.plain import Plain, rows, trainer
from tests.strategy.staged import Staged, staged_rows

EPOCH = 8
"""Batches of a rank in an epoch."""


class Dropping(Staged):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_stage(self, stage: StageInfo) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 4))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01, fused=True)
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20), "interval": "step"}
        ]


class DroppingPlain(Plain):
    def __init__(self) -> None:
        super().__init__("adamw", scheduler="step")
        self.net.insert(2, nn.Dropout(0.5))
        self.losses: list[float] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))


OPTIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "accumulated": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    "short last window": {"accumulate_grad_batches": 3},
    "limited": {"limit_train_batches": 5},
    "validation within": {"val_check_interval": 4},
}


def fit(
    make: Any,
    folder: Path,
    options: dict[str, Any],
    every: int | None,
    path: Any,
    devices: int = 1,
    device: str = "cpu",
) -> tuple[L.LightningModule, L.Trainer]:
    staged = make is Dropping
    strategy = D9DStrategy(microbatch_size=2 if staged else None)
    callbacks = [ModelCheckpoint(folder, "{step}", every_n_train_steps=every, save_top_k=-1)] if every else []
    run = trainer(
        strategy, devices, device, max_epochs=3, callbacks=callbacks, enable_checkpointing=bool(every), **options
    )
    torch.manual_seed(11)
    module = make()
    count = 4 * EPOCH * devices
    data: Any = staged_rows(count) if staged else rows(count)
    run.fit(
        module,
        DataLoader(data, batch_size=4, shuffle=True),
        DataLoader([data[i] for i in range(8)], batch_size=4),
        ckpt_path=path,
    )
    return module, run


def check(make: Any, folder: Path, options: dict[str, Any], devices: int = 1, device: str = "cpu") -> None:
    whole, run = fit(make, folder, options, 2, None, devices, device)
    saved = sorted(folder.glob("step=*.ckpt"), key=lambda path: int(path.stem.partition("=")[2]))
    assert len(saved) >= 3
    for path in saved[:-1]:
        resumed, again = fit(make, folder, options, None, path, devices, device)
        assert again.global_step == run.global_step
        left = len(resumed.losses)
        assert left > 0
        assert resumed.losses == whole.losses[-left:], path.name
        for name, weight in resumed.state_dict().items():
            assert_bitwise_equal(name, weight, whole.state_dict()[name])


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("make", [Dropping, DroppingPlain])
def test_one_process(make: Any, options: str, tmp_path: Path) -> None:
    check(make, tmp_path, OPTIONS[options])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("make", [Dropping, DroppingPlain])
def test_two_ranks(rank: RankContext, make: Any) -> None:
    check(make, rank.tmp_dir, OPTIONS["accumulated"], 2, str(rank.device))
