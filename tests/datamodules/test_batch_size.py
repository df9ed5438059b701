"""The rows of a rank's batch follow from those of an optimizer step on all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from lightning_d9d import D9DStrategy
from lightning_d9d.datamodules import ByteTextDataModule
from lightning_d9d.datamodules.batch_size import rows_of_rank
from lightning_d9d.errors import ConfigError
from tests.harness.ranks import RankContext
from tests.strategy.plain import Plain, trainer


class Counting(Plain):
    """Counts the rows that this rank reads for each optimizer step."""

    def __init__(self) -> None:
        super().__init__(batch_norm=False)
        self.rows: dict[int, int] = {}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        ids = batch["input_ids"]
        self.rows[self.global_step] = self.rows.get(self.global_step, 0) + len(ids)
        return self.net(ids.float()).sum()


def text(folder: Path) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "some.py").write_text("abcdefghi\n" * 500)
    return str(folder)


@pytest.mark.ranks(2)
def test_a_step_has_so_many_rows(rank: RankContext) -> None:
    module, run = Counting(), trainer(D9DStrategy(), 2, max_steps=2, accumulate_grad_batches=3, limit_val_batches=0)
    folder = rank.from_first_rank(text, rank.tmp_dir / "text")
    run.fit(module, datamodule=ByteTextDataModule(folder, sequence_length=8, global_batch_size=24))
    assert [sum(rows) for rows in zip(*rank.all_gather_object(list(module.rows.values())), strict=True)] == [24, 24]
    assert set(module.rows.values()) == {12}


@pytest.mark.parametrize(
    ("options", "size", "rows"),
    [
        ({}, 7, 7),
        ({"microbatch_size": 4}, 24, 12),
        ({"num_microbatches": 3}, 24, 12),
    ],
)
def test_rows_of_one_rank(options: dict[str, int], size: int, rows: int) -> None:
    accumulated = 2 if options else 1
    run = trainer(D9DStrategy(**options), accumulate_grad_batches=accumulated)  # type: ignore[arg-type]
    assert rows_of_rank(size, run) == rows
    assert ByteTextDataModule(global_batch_size=size).rows_of_rank == size  # without a Trainer


@pytest.mark.parametrize(
    ("options", "size", "message"),
    [
        (
            {"microbatch_size": 4},
            20,
            r"=20 does not divide by 8 \(2 accumulated batches x 4 rows of a microbatch\); the nearest that fit: "
            "16 and 24",
        ),
        ({"num_microbatches": 3}, 5, r"5 does not divide by 6 \(2 accumulated batches x 3 microbatches\).*fit: 6$"),
    ],
)
def test_what_does_not_divide(options: dict[str, int], size: int, message: str) -> None:
    run = trainer(D9DStrategy(**options), accumulate_grad_batches=2)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message):
        rows_of_rank(size, run)


def test_what_contradicts() -> None:
    with pytest.raises(ConfigError, match="batch_size=4 and global_batch_size=8 of ByteTextDataModule both"):
        ByteTextDataModule(batch_size=4, global_batch_size=8)
    with pytest.raises(ConfigError, match="global_batch_size=0 of ByteTextDataModule must be at least 1"):
        ByteTextDataModule(global_batch_size=0)
    run = trainer(D9DStrategy(), callbacks=[GradientAccumulationScheduler({0: 1, 1: 2})])
    with pytest.raises(
        ConfigError, match="global_batch_size=8 cannot be kept, because a GradientAccumulationScheduler"
    ):
        rows_of_rank(8, run)
