"""What the ranks of `test_display.py` and `test_interrupt.py` run: small fits that somebody looks at."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import (
    ModelCheckpoint,
    ModelSummary,
    RichModelSummary,
    RichProgressBar,
    TQDMProgressBar,
)
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_d9d import D9DStrategy, MeshConfig
from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoePretraining

NUM_ROWS = 80
CONFIG = Qwen3MoeConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=16,
    moe_intermediate_size=8,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=8,
    num_experts=2,
    num_experts_per_tok=1,
    norm_topk_prob=True,
    max_position_embeddings=64,
)
DISPLAYS: dict[str, Any] = {
    "tqdm": lambda: [TQDMProgressBar(), ModelSummary()],
    "rich": lambda: [RichProgressBar(), RichModelSummary()],
    "none": list,
}


@dataclass(frozen=True)
class Job:
    """One fit, on as many ranks as the job has."""

    display: str = "none"
    num_ranks: int = 1
    mesh: dict[str, int] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    saving: dict[str, Any] | None = field(default_factory=lambda: {"save_last": True, "every_n_train_steps": 3})
    """The arguments of `ModelCheckpoint`; None for no checkpoints."""
    resumes: bool = False
    validates: bool = False
    num_workers: int = 0
    frozen: str | None = None
    """The name of a parameter that is not trained."""
    interrupts: tuple[int, int, int] | None = None
    """Rank, batch and number of signals; with 0 the rank fails."""
    stop_signal: int = signal.SIGINT


class Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = torch.randint(32, (9,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": row[:-1], "labels": row[1:]}


class Module(Qwen3MoePretraining):
    """Frozen in part, and interrupted in the middle of a batch."""

    def __init__(self, job: Job) -> None:
        super().__init__(config=CONFIG, warmup_steps=3)
        self.job, self.interrupts = job, job.interrupts

    def on_stages_built(self) -> None:
        super().on_stages_built()
        for name, value in self.state_dict(keep_vars=True).items():
            if name == self.job.frozen:
                value.requires_grad_(False)

    def microbatch_weight(self, microbatch: Any) -> Tensor:
        if self.interrupts is not None and self.trainer.training:
            rank, batch, number = self.interrupts
            if self.trainer.global_rank == rank and self.trainer.fit_loop.epoch_loop.batch_idx == batch:
                self.interrupts = None
                if number == 0:
                    raise ValueError(f"bad row on rank {rank}")
                for process in multiprocessing.active_children():  # as a terminal would do
                    os.kill(process.pid or 0, signal.SIGINT)
                for _ in range(number):
                    os.kill(os.getpid(), self.job.stop_signal)
        return super().microbatch_weight(microbatch)


class Recorder(L.Callback):
    """Appends losses to a file, and at the end of training its first and last moment."""

    def __init__(self) -> None:
        self.began = self.ended = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.began = time.monotonic()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.ended = time.monotonic()
        self._write("loss", trainer, [batch_idx, outputs["loss"].item()])

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._write("seconds", trainer, self.ended - self.began)

    def _write(self, kind: str, trainer: L.Trainer, value: Any) -> None:
        with open(f"{kind}_{trainer.global_rank}.jsonl", "a") as file:
            file.write(json.dumps(value) + "\n")


def read(folder: Path, kind: str, rank: int = 0) -> list[Any]:
    """What a rank recorded."""
    path = folder / f"{kind}_{rank}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def fit(*jobs: Job) -> None:
    """Runs the jobs one after the other, each with a Trainer of its own."""
    for job in jobs:
        L.seed_everything(0, verbose=False)
        saving = [] if job.saving is None else [ModelCheckpoint("saved", **job.saving)]
        trainer = L.Trainer(
            accelerator="cpu",
            devices=job.num_ranks,
            strategy=D9DStrategy(mesh=MeshConfig(**job.mesh) if job.mesh else None),
            callbacks=[*DISPLAYS[job.display](), *saving, Recorder()],
            logger=False,
            enable_checkpointing=job.saving is not None,
            enable_progress_bar=job.display != "none",
            enable_model_summary=job.display != "none",
            num_sanity_val_steps=0,
            **{"log_every_n_steps": 2, **job.trainer},
        )
        trainer.fit(
            Module(job),
            DataLoader(Rows(), batch_size=2, shuffle=True, num_workers=job.num_workers),
            DataLoader(Rows(), batch_size=16) if job.validates else None,
            ckpt_path="saved/last.ckpt" if job.resumes else None,
        )
