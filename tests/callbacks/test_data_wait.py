"""The share of time that is spent in waiting for batches, by a clock that stands still but for what a test does."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_d9d import D9DStrategy
from lightning_d9d.callbacks import DataWait
from tests.harness.ranks import RankContext
from tests.strategy.plain import Plain, trainer


class Clock:
    now = 0.0


class Slow(Dataset):
    """Takes so many seconds a batch."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self.clock, self.seconds = clock, seconds

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.clock.now += self.seconds
        return torch.zeros(8), torch.tensor(0)


class Stream(IterableDataset):
    """The same without a length."""

    def __init__(self, data: Slow) -> None:
        self.data = data

    def __iter__(self):
        return (self.data[index] for index in range(len(self.data)))


class Ticking(Plain):
    """Takes three seconds a step."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(batch_norm=False)
        self.clock = clock

    def on_after_backward(self) -> None:
        self.clock.now += 3.0


class Seeing(Callback):
    def __init__(self) -> None:
        self.shares: list[float] = []

    def on_train_batch_end(self, run, module, outputs, batch, batch_idx) -> None:
        if (batch_idx + 1) % 4 == 0:
            self.shares.append(round(float(run.callback_metrics["data_wait"]), 6))


def shares(clock: Clock, seconds: float, devices: int = 1, streams: bool = False) -> list[float]:
    seeing, data = Seeing(), Slow(clock, seconds)
    callbacks = [DataWait(), seeing]
    run = trainer(
        D9DStrategy(), devices, callbacks=callbacks, max_epochs=2, log_every_n_steps=4, use_distributed_sampler=False
    )
    with pytest.MonkeyPatch.context() as monkeypatch:
        for module in ("callbacks.data_wait", "loop.uneven"):
            monkeypatch.setattr(f"lightning_d9d.{module}.perf_counter", lambda: clock.now)
        run.fit(Ticking(clock), DataLoader(Stream(data) if streams else data))
    return seeing.shares


@pytest.mark.parametrize(("streams", "share"), [(False, 1 / 4), (True, 3 / 15)])
def test_the_wait_is_that_of_the_loader(streams: bool, share: float) -> None:
    """A batch takes one second, and a step three. A stream's batch was read ahead, before the interval."""
    assert shares(Clock(), 0.0, streams=streams) == [0.0] * 4
    found = shares(Clock(), 1.0, streams=streams)
    assert len(found) == 4
    assert found[1] == share


@pytest.mark.ranks(2)
def test_the_slowest_rank_is_logged(rank: RankContext) -> None:
    found = shares(Clock(), float(rank.rank), devices=2)
    assert found == rank.from_first_rank(lambda: found)
    assert found[1] == 0.25, found
