"""Plain LightningModules that exercise one Lightning feature each, and a Trainer for them."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Plain(L.LightningModule):
    """A small classifier with batch norm (buffers), logging and a choice of optimizer."""

    def __init__(self, optimizer: str = "sgd", scheduler: str | None = None, batch_norm: bool = True) -> None:
        super().__init__()
        self.optimizer, self.scheduler = optimizer, scheduler
        norm = nn.BatchNorm1d(16) if batch_norm else nn.LayerNorm(16)
        self.net = nn.Sequential(nn.Linear(8, 16), norm, nn.Tanh(), nn.Linear(16, 4))

    def loss(self, batch: list[Tensor]) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x.to(self.net[0].weight.dtype)), y)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = {
            "sgd": lambda: torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9),
            "adamw": lambda: torch.optim.AdamW(self.parameters(), lr=0.01),
        }[self.optimizer]()
        if self.scheduler is None:
            return optimizer
        if self.scheduler == "plateau":
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.1, threshold=1e9)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val"}}
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Unused(Plain):
    """A module with three branches: odd ranks use one of them, and nobody uses another."""

    def __init__(self) -> None:
        super().__init__(batch_norm=False)
        self.odd, self.never = nn.Linear(8, 4), nn.Linear(8, 4)
        self.gradient_is_none: dict[str, bool] = {}

    def loss(self, batch: list[Tensor]) -> Tensor:
        x, y = batch
        out = self.net(x)
        if self.global_rank % 2 == 1:
            out = out + self.odd(x)
        return nn.functional.cross_entropy(out, y)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradient_is_none = {name: p.grad is None for name, p in self.named_parameters()}


class TwoOptimizers(Plain):
    """Manual optimization: two players with an optimizer each, one toggled at a time."""

    def __init__(self) -> None:
        super().__init__(batch_norm=False)
        self.automatic_optimization = False
        self.critic = nn.Linear(4, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        first, second = self.optimizers()  # type: ignore[misc]
        self.toggle_optimizer(first)
        loss = self.loss(batch) - self.critic(self.net(batch[0])).mean()
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        critic_loss = (self.critic(self.net(batch[0]).detach()) ** 2).mean()
        second.zero_grad()
        self.manual_backward(critic_loss)
        self.clip_gradients(second, 0.5, "value")
        second.step()
        self.untoggle_optimizer(second)
        self.log("loss", loss.detach(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.1), torch.optim.AdamW(self.critic.parameters(), lr=0.01)


class Frozen(Plain):
    """The first layer is frozen for two batches, then trained: gradients must be summed from then on."""

    def __init__(self) -> None:
        super().__init__(batch_norm=False)
        self.net[0].requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.net[0].requires_grad_(True)


class FrozenInsideWindow(Plain):
    """A module for windows of two batches. From the second batch on the first layer is frozen and the last is
    trained."""

    def __init__(self) -> None:
        super().__init__(batch_norm=False)
        self.net[3].requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.net[0].requires_grad_(False)
            self.net[3].requires_grad_(True)


class AssignedBuffer(Plain):
    """A running mean that each step assigns again, as `self.mean = ...`."""

    def __init__(self) -> None:
        super().__init__(batch_norm=False)
        self.register_buffer("mean", torch.zeros(8))

    def loss(self, batch: list[Tensor]) -> Tensor:
        x, y = batch
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * x.mean(0)
        return super().loss([x - self.mean, y])


def rows(count: int, dtype: torch.dtype = torch.float32) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(
        torch.randn(count, 8, generator=generator, dtype=dtype), torch.randint(0, 4, (count,), generator=generator)
    )


def loader(count: int, batch_size: int = 4, dtype: torch.dtype = torch.float32) -> DataLoader:
    return DataLoader(rows(count, dtype), batch_size=batch_size)


def trainer(strategy: Any, devices: int = 1, device: str = "cpu", **kwargs: Any) -> L.Trainer:
    quiet = dict(
        accelerator="cpu" if device == "cpu" else "gpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=False,
        num_sanity_val_steps=0,
        max_epochs=2,
        log_every_n_steps=1,
    )
    return L.Trainer(strategy=strategy, devices=devices, **(quiet | kwargs))
