"""What is killed: a fully sharded run of two ranks that saves after most of its steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from lightning_d9d import CheckpointConfig, D9DStrategy, MeshConfig, StageInfo, TimeoutConfig
from lightning_d9d.checkpoint import open_directory
from lightning_d9d.optim import StochasticAdamW
from tests.strategy.plain import trainer
from tests.strategy.staged import Staged, staged_rows

NUM_RANKS = 2
BATCHES, EPOCHS = 8, 3
NUM_STEPS = BATCHES * EPOCHS
FINISHED = "finished.ckpt"
WRITER = "writer"
"""Names the number of the job that saved a checkpoint, among its values and among its tensors."""


class Signed(nn.Sequential):
    """Layers, and the number of the job that trains them."""

    writer: torch.Tensor

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.register_buffer(WRITER, torch.zeros((), dtype=torch.long))


class Job(Staged):
    """Dropout, and bfloat16 weights whose updates are rounded stochastically."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def configure_stage(self, stage: StageInfo) -> nn.Module:
        return Signed(nn.Linear(8, 256), nn.Tanh(), nn.Dropout(0.5), nn.Linear(256, 4))

    def on_train_start(self) -> None:
        for module in self.modules():
            if isinstance(module, Signed):
                module.writer.fill_(self.number)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[WRITER] = self.number

    def configure_optimizers(self) -> Any:
        optimizer = StochasticAdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, NUM_STEPS)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Announcing(L.Callback):
    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.file.touch()


def started(folder: Path, number: int) -> Path:
    """The file that a job makes when it begins to train."""
    return folder / f"started-{number}"


def train(folder: Path, asynchronous: bool, number: int) -> None:
    """One rank's part; it goes on from the last checkpoint, if there is one, and saves FOLDER/finished.ckpt in the end.

    Args:
        folder: The job's, or of several jobs.
        asynchronous: How it saves.
        number: Another one for each job.
    """
    L.seed_everything(1, verbose=False)
    strategy = D9DStrategy(
        mesh=MeshConfig(data_parallel_shard=NUM_RANKS),
        microbatch_size=2,
        checkpoint=CheckpointConfig(asynchronous=asynchronous),
        timeouts=TimeoutConfig(shutdown_seconds=1),
    )
    saved = folder / "checkpoints"
    two = ModelCheckpoint(
        saved, "{step}", monitor="step", mode="max", save_top_k=2, every_n_train_steps=1, save_last=True
    )
    every = ModelCheckpoint(saved, "kept-{step}", every_n_train_steps=10, save_top_k=-1)
    run = trainer(
        strategy,
        NUM_RANKS,
        callbacks=[two, every, Announcing(started(folder, number))],
        enable_checkpointing=True,
        precision="bf16-true",
        max_epochs=EPOCHS,
    )
    run.fit(Job(number), DataLoader(staged_rows(BATCHES * 4 * NUM_RANKS), batch_size=4, shuffle=True), ckpt_path="last")
    run.save_checkpoint(folder / FINISHED, weights_only=True)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a job that has finished."""
    tensors = open_directory(folder / FINISHED, alone=True).read()
    return {name: tensor for name, tensor in tensors.items() if not name.endswith(WRITER)}
