"""`D9DStrategy(replicate_sync=...)`: replicas that mix their weights, against dense matrices in one process."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from lightning_d9d import D9DStrategy
from lightning_d9d.mixing.rounds import Rounds
from tests.harness.ranks import RankContext
from tests.strategy.mixed import mixed_training
from tests.strategy.plain import Plain, trainer

STEPS, ROWS = 6, 4


class Kept(Plain):
    """Keeps the weights after each step."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(optimizer, batch_norm=False)
        self.double()
        self.history: list[dict[str, Tensor]] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss([batch[0].double(), batch[1]])

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.validated = {name: p.detach().clone() for name, p in self.named_parameters()}
        self.log("val", self.loss([batch[0].double(), batch[1]]), sync_dist=True)

    def on_train_batch_end(self, *args: Any) -> None:
        self.history.append({name: p.detach().clone() for name, p in self.named_parameters()})


def rows_of(num: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(8, generator=generator), torch.tensor(index % 4)) for index in range(num)]


def batches_of(num_replicas: int, steps: int = STEPS) -> list[list[list[Tensor]]]:
    """As the sampler deals rows out: one after the other."""
    rows = rows_of(num_replicas * steps * ROWS)
    of_replicas = [rows[replica::num_replicas] for replica in range(num_replicas)]
    windows = []
    for step in range(steps):
        of_step = [own[step * ROWS : (step + 1) * ROWS] for own in of_replicas]
        windows.append(
            [[torch.stack([x for x, _ in own]).double(), torch.stack([y for _, y in own])] for own in of_step]
        )
    return windows


def fit(
    rank: RankContext,
    module: L.LightningModule,
    sync: Any,
    steps: int = STEPS,
    with_loaders: Any = None,
    **options: Any,
) -> L.Trainer:
    with_loaders = with_loaders or {}
    run = trainer(
        D9DStrategy(replicate_sync=sync),
        rank.world_size,
        rank.device.type,
        **{"max_epochs": 1, "precision": "64-true", **options},
    )
    rows: Any = rows_of(rank.world_size * steps * ROWS)
    dealt = DistributedSampler(rows, rank.world_size, rank.rank, shuffle=False)
    run.fit(module, DataLoader(rows, ROWS, sampler=dealt), **with_loaders)
    return run


def fresh(optimizer: str = "sgd") -> Kept:
    L.seed_everything(7, verbose=False)
    return Kept(optimizer)


def check(rank: RankContext, sync: str, optimizer: str = "sgd", **options: Any) -> None:
    module = fresh(optimizer)
    initial = fresh(optimizer)
    fit(rank, module, sync, **options)
    rounds = Rounds(sync, rank.world_size)
    expected = mixed_training(
        initial,
        rounds,
        batches_of(rank.world_size),
        lambda each, batch: each.loss(batch),
        lambda each: each.configure_optimizers(),
        clip=options.get("gradient_clip_val"),
    )
    assert len(module.history) == STEPS
    for step, of_step in enumerate(expected[:-1]):  # in the last one all get the mean at the end of the fit
        for name, value in of_step[rank.rank].items():
            torch.testing.assert_close(module.history[step][name], value, atol=1e-12, rtol=0)
    for name, parameter in module.named_parameters():
        mean = torch.stack([own[name] for own in expected[-1]]).mean(0)
        torch.testing.assert_close(parameter.detach(), mean, atol=1e-12, rtol=0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("sync", ["complete", "ring", "one_peer_exp", "alternating_exp_ring"])
def test_two_replicas_equal_the_matrices(rank: RankContext, sync: str, optimizer: str) -> None:
    check(rank, sync, optimizer)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("sync", ["ring", "one_peer_exp", "alternating_exp_ring"])
def test_four_replicas_equal_the_matrices(rank: RankContext, sync: str) -> None:
    check(rank, sync, gradient_clip_val=0.05)
