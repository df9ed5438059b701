"""A job that trains on tokens or chats and writes down which rows each step has read."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_d9d import D9DStrategy
from lightning_d9d.datamodules import ChatDataModule, TokenDataModule
from tests.data.chats import make_tokenizer
from tests.strategy.plain import trainer

SEQUENCE_LENGTH, GLOBAL_BATCH = 8, 8


class Reader(L.LightningModule):
    """Trains one number, and appends the rows of each step to a file of its rank."""

    def __init__(self, output: Path, killed_at: int | None = None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.output = output
        self.killed_at = killed_at

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        rows = [
            list(zip(*(values.tolist() for values in row), strict=True)) for row in zip(*batch.values(), strict=True)
        ]
        with open(self.output / f"rows-{self.global_rank}.jsonl", "a") as file:
            file.write(json.dumps([self.global_step, rows]) + "\n")
        if self.global_step == self.killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.weight * 1.0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def tokens(files: dict[str, float], num_workers: int, **options: Any) -> TokenDataModule:
    """Rows of files of tokens, or of texts, for `train`."""
    options = {"global_batch_size": GLOBAL_BATCH, "seed": 3, "validation_fraction": 0.1, **options}
    return TokenDataModule(files, SEQUENCE_LENGTH, num_workers=num_workers, **options)


def chats(path: str, packing: bool, num_workers: int) -> ChatDataModule:
    """Rows of chats, for `train`."""
    options = {"sequence_length": 96, "global_batch_size": GLOBAL_BATCH, "seed": 3, "packing": packing}
    return ChatDataModule(path, make_tokenizer("chatml"), num_workers=num_workers, **options)


def train(output: Path, data: Callable[[], L.LightningDataModule], num_ranks: int, options: dict[str, Any]) -> None:
    """One rank of the job.

    Args:
        output: Gets rows and checkpoints.
        data: Makes the data module.
        num_ranks: Data ranks.
        options: `max_steps`, `resumed` (a checkpoint), `killed_at` (a step) and `accumulated` batches.
    """
    saving = ModelCheckpoint(output, "{step}", every_n_train_steps=3, save_top_k=-1)
    run = trainer(
        D9DStrategy(),
        num_ranks,
        callbacks=[saving],
        enable_checkpointing=True,
        max_steps=options.get("max_steps", 30),
        max_epochs=-1,
        limit_val_batches=0,
        accumulate_grad_batches=options.get("accumulated", 1),
    )
    run.fit(Reader(output, options.get("killed_at")), datamodule=data(), ckpt_path=options.get("resumed"))


def rows_of_steps(output: Path) -> list[list[Any]]:
    """The rows of each optimizer step on all ranks, in an order of their own; each row is a list of its tokens."""
    steps: dict[int, list[Any]] = {}
    for path in output.glob("rows-*.jsonl"):
        for line in path.read_text().splitlines():
            step, rows = json.loads(line)
            steps.setdefault(step, []).extend(rows)
    return [sorted(steps[step]) for step in sorted(steps)]
