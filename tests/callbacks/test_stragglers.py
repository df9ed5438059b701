"""`Stragglers` in a real fit: which rank it names, and for what."""

from __future__ import annotations

import time
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_d9d import ConfigError, D9DStrategy
from lightning_d9d.callbacks import Stragglers
from lightning_d9d.waits import observed_by
from tests.harness.ranks import RankContext
from tests.strategy.plain import Plain, loader, rows, trainer

NUM_STEPS = 98  # times begin with the second batch, and the last report is read a batch later at most
EXTRA_SECONDS = 0.005


def work(seconds: float) -> None:
    """Use the processor for so long, whatever else runs."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class SlowStep(Plain):
    def __init__(self, is_slow: bool) -> None:
        super().__init__()
        self.is_slow = is_slow

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        work(EXTRA_SECONDS * self.is_slow)
        return super().training_step(batch, batch_idx)


class Rows(Dataset[Tensor]):
    def __init__(self, rows: Any, is_slow: bool) -> None:
        self.rows, self.is_slow = rows, is_slow

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        work(EXTRA_SECONDS * self.is_slow)
        return self.rows[index]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("part", ["compute", "data"])
def test_the_slow_rank_and_its_part_are_named(rank: RankContext, part: str) -> None:
    torch.manual_seed(0)
    is_slow = rank.rank == 1
    stragglers = Stragglers(every_n_steps=48, path=rank.tmp_dir / "pictures" / "ranks.png")
    run = trainer(D9DStrategy(), 2, str(rank.device), max_epochs=1, callbacks=[stragglers])
    data = Rows(rows(4 * NUM_STEPS), is_slow and part == "data")
    run.fit(SlowStep(is_slow and part == "compute"), DataLoader(data, batch_size=2))
    if rank.rank == 0:
        assert len(stragglers.reports) == 2
        first, second = stragglers.found
        assert first == []
        assert [(each.rank, each.part) for each in second] == [(1, part)]
        waited = [sum(times.mean("link") for times in report) for report in zip(*stragglers.reports, strict=True)]
        assert waited[0] > waited[1]
        assert stragglers.path is not None
        assert stragglers.path.read_bytes().startswith(b"\x89PNG")
    else:
        assert stragglers.reports == []


class Counting(L.Callback):
    """Counts the waits of what Lightning and callbacks call on a strategy."""

    num_begun = num_ended = 0

    def begin_wait(self) -> None:
        self.num_begun += 1

    def end_wait(self) -> None:
        self.num_ended += 1

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        with observed_by(self):
            trainer.strategy.barrier()
            trainer.strategy.broadcast(1)
            trainer.strategy.reduce(torch.ones(1))


@pytest.mark.ranks(2)
def test_collectives_of_the_strategy_are_waits_for_others(rank: RankContext) -> None:
    """`Trainer(max_time=...)` broadcasts in each batch: such a wait once counted as a rank's own."""
    counting = Counting()
    trainer(D9DStrategy(), 2, str(rank.device), max_steps=2, callbacks=[counting]).fit(Plain(), loader(8, 2))
    assert counting.num_begun == counting.num_ended == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every_n_steps": 25}, "every_n_steps=25. must be a multiple of 48"),
        ({"every_n_steps": 0}, "every_n_steps=0. must be a multiple of 48"),
        ({"threshold": 0}, "threshold=0. must be greater than 0"),
        ({"path": "ranks.gif"}, "must end in .png, .svg or .html"),
    ],
)
def test_settings_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Stragglers(**options)


def test_one_process_has_nothing_to_compare() -> None:
    run = trainer(D9DStrategy(), max_steps=1, callbacks=[Stragglers()])
    with pytest.raises(ConfigError, match="but this run has none: leave the callback out"):
        run.fit(Plain(), DataLoader(rows(2)))
