"""A run that goes on has the losses and weights of one that was never interrupted, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from torch import nn
from torch.utils.data import DataLoader

from lightning_d9d import CheckpointConfig, D9DStrategy, StageInfo
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
    "by steps": {"max_epochs": -1, "max_steps": 12},
    "workers that stay": {"num_workers": 1},
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
    callbacks = [
        ModelCheckpoint(folder, "{step}", every_n_train_steps=every, save_top_k=-1),
        ModelCheckpoint(folder, "{step}-validated", monitor="val_loss" if staged else "val", save_top_k=-1),
        ModelCheckpoint(folder, "{step}-ended", every_n_epochs=1, save_on_train_epoch_end=True, save_top_k=-1),
    ]
    options = {"max_epochs": 2, **options}
    workers: dict[str, Any] = {"num_workers": options.pop("num_workers", 0)}
    workers["persistent_workers"] = workers["num_workers"] > 0
    run = trainer(
        strategy,
        devices,
        device,
        callbacks=callbacks if every else [],
        enable_checkpointing=bool(every),
        **options,
    )
    torch.manual_seed(11)
    module = make()
    count = 4 * EPOCH * devices
    data: Any = staged_rows(count) if staged else rows(count)
    run.fit(
        module,
        DataLoader(data, batch_size=4, shuffle=True, **workers),
        DataLoader([data[i] for i in range(8)], batch_size=4),
        ckpt_path=path,
    )
    return module, run


def check(make: Any, folder: Path, options: dict[str, Any], devices: int = 1, device: str = "cpu") -> None:
    whole, run = fit(make, folder, options, 3, None, devices, device)
    saved = sorted(folder.glob("step=*.ckpt"), key=lambda path: int(path.stem.split("=")[1].split("-")[0]))
    assert {path.stem.partition("-")[2] for path in saved} == {"", "validated", "ended"}
    for path in saved:
        if int(path.stem.split("=")[1].split("-")[0]) == run.global_step:
            continue
        resumed, again = fit(make, folder, options, None, path, devices, device)
        assert again.global_step == run.global_step
        left = len(resumed.losses)
        assert left > 0
        assert resumed.losses == whole.losses[-left:], path.name
        for name, weight in resumed.state_dict().items():
            assert_bitwise_equal(name, weight, whole.state_dict()[name])


@pytest.mark.parametrize("options", OPTIONS)
def test_one_process(options: str, tmp_path: Path) -> None:
    check(Dropping, tmp_path, OPTIONS[options])


def test_a_plain_module(tmp_path: Path) -> None:
    check(DroppingPlain, tmp_path, OPTIONS["accumulated"])


def test_a_file_goes_on_under_lightnings_own_strategy(tmp_path: Path) -> None:
    fit(DroppingPlain, tmp_path, {}, 3, None)
    for strategy in ("auto", D9DStrategy()):
        run = trainer(strategy, max_epochs=2)
        run.fit(DroppingPlain(), DataLoader(rows(4 * EPOCH), batch_size=4), ckpt_path=tmp_path / "step=3.ckpt")
        assert run.global_step == 2 * EPOCH


@pytest.mark.parametrize("mode", ["sharded", "consolidated"])
def test_averaged_weights(tmp_path: Path, mode: Any) -> None:
    """A callback that reads and replaces weights in Lightning's hooks."""

    def run(path: Path | None) -> DroppingPlain:
        saving = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=3, save_top_k=-1)
        strategy = D9DStrategy(checkpoint=CheckpointConfig(mode=mode))
        fitted = trainer(strategy, max_epochs=1, callbacks=[WeightAveraging(), saving], enable_checkpointing=True)
        torch.manual_seed(11)
        module = DroppingPlain()
        fitted.fit(module, DataLoader(rows(4 * EPOCH), batch_size=4), ckpt_path=path)
        return module

    expected = run(None)
    path = tmp_path / "step=3.ckpt"
    assert path.is_dir() == (mode == "sharded")
    resumed = run(path)
    for name, weight in resumed.state_dict().items():
        assert_bitwise_equal(name, weight, expected.state_dict()[name])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("make", [Dropping, DroppingPlain])
def test_two_ranks(rank: RankContext, make: Any) -> None:
    check(make, rank.tmp_dir, OPTIONS["accumulated"], 2, str(rank.device))


def test_resumed_at_the_end_of_an_epoch_and_again_in_the_next(tmp_path: Path) -> None:
    """Lightning itself would not count the second epoch as begun, and train one too many after the second time."""
    epochs = {"max_epochs": 3}
    whole, run = fit(Dropping, tmp_path / "0", epochs, EPOCH, None)
    fit(Dropping, tmp_path / "1", epochs, EPOCH + 3, tmp_path / "0" / f"step={EPOCH}.ckpt")
    resumed, again = fit(Dropping, tmp_path / "2", epochs, None, tmp_path / "1" / f"step={EPOCH + 3}.ckpt")
    assert again.global_step == run.global_step
    assert resumed.losses == whole.losses[EPOCH + 3 :]
