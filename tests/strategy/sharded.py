"""A plain module that shards itself as far as the mesh has ranks for it, and its training."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from lightning_d9d import CheckpointConfig, D9DStrategy, MeshConfig
from tests.strategy.plain import rows, trainer

ROWS, BATCH = 48, 8
"""Six steps an epoch."""


class Sharded(L.LightningModule):
    """One block of two matrices, tensor-parallel and fully sharded, with dropout."""

    def __init__(self, dropout: float = 0.0, optimizer: str = "sgd", num_workers: int = 0) -> None:
        super().__init__()
        self.num_workers = num_workers
        self.optimizer = optimizer
        self.net = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Dropout(dropout), nn.Linear(12, 5)).double()
        generator = torch.Generator().manual_seed(5)
        for parameter in self.parameters():
            nn.init.normal_(parameter, generator=generator)
        self.register_buffer("num_steps", torch.zeros((), dtype=torch.float64))
        self.losses: list[float] = []
        self.rows: list[list[float]] = []

    def configure_model(self) -> None:
        strategy: Any = self.trainer.strategy
        if strategy.world_size == 1 or isinstance(self.net[0].weight, DTensor):
            return
        sizes = strategy.mesh.sizes
        if sizes["tp"] > 1:
            plan = {"0": ColwiseParallel(), "3": RowwiseParallel()}
            parallelize_module(self.net, strategy.mesh.for_axes("tp", domain="dense"), plan)
        if sizes["dp_shard"] > 1:
            axes = ("dp_replicate", "dp_cp_shard") if sizes["dp_replicate"] > 1 else ("dp_cp_shard",)
            fully_shard(self.net, mesh=strategy.mesh.for_axes(*axes))

    def train_dataloader(self) -> DataLoader:
        """Batches of the same rows on any mesh, in an order of each epoch."""
        data = rows(ROWS, torch.float64)
        ranks = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        sampler = DistributedSampler(data, **ranks)
        return DataLoader(
            data, batch_size=BATCH // ranks["num_replicas"], sampler=sampler, num_workers=self.num_workers
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        self.rows.append(x[:, 0].tolist())
        self.num_steps += 1
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.losses.append(float(self.trainer.strategy.reduce(loss.detach().clone())))
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val", self.net(batch[0]).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        if self.optimizer == "sgd":
            optimizer: Any = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        else:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9), "interval": "step"}]

    def whole(self) -> dict[str, Tensor]:
        """The weights, gathered. Collective."""
        return {
            name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().cpu().clone()
            for name, value in self.state_dict().items()
        }


class WholeWeights(Callback):
    """Gathers them while the ranks are still together."""

    weights: dict[str, Tensor]

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.weights = module.whole()


def fit(
    module: Sharded,
    mesh: MeshConfig | None = None,
    devices: int = 1,
    device: str = "cpu",
    mode: Any = "auto",
    path: Any = None,
    **options: Any,
) -> tuple[L.Trainer, dict[str, Tensor]]:
    """The Trainer after the fit, and all weights whole."""
    strategy = D9DStrategy(mesh=mesh, checkpoint=CheckpointConfig(mode=mode))
    whole = WholeWeights()
    callbacks = [whole, *options.pop("callbacks", [])]
    run = trainer(strategy, devices, device, callbacks=callbacks, gradient_clip_val=0.5, **options)
    run.fit(module, ckpt_path=path)
    return run, whole.weights


def train_on_two(number: int, port: int, folder: Path, path: Path | None) -> None:
    """One of two ranks, in a process of its own; as a launcher that Lightning knows would start it."""
    os.environ.update(LOCAL_RANK=str(number), NODE_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=3, save_top_k=-1)
    keep: dict[str, Any] = {"enable_checkpointing": True, "callbacks": [saving]}
    fit(Sharded(optimizer="adamw"), MeshConfig(data_parallel_shard=2), 2, max_epochs=1, path=path, **keep)
