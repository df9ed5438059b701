"""Ranks that act at a common point: `Trainer.should_stop` set on some ranks at any moment, and clocks that differ."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_d9d import D9DStrategy, MeshConfig
from tests.harness.ranks import RankContext
from tests.strategy.pipelined import Pipelined, token_rows
from tests.strategy.plain import Plain, loader, trainer

MOMENTS = [
    *("on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_train_batch_end"),
    *("on_before_optimizer_step", "on_validation_start", "on_validation_batch_end", "on_validation_end"),
    *("on_train_epoch_end",),
]


class Stops(L.Callback):
    """Sets `should_stop` on some ranks, when a hook is called for the `at`-th time; counts validations."""

    def __init__(self, moment: str, ranks: set[int], at: int) -> None:
        self.ranks, self.at = ranks, at
        self.num_validations = 0
        self._count = 0
        own: Callable[..., None] = getattr(self, moment)

        def hook(run: L.Trainer, *args: Any) -> None:
            own(run, *args)
            self._count += not run.sanity_checking
            if self._count == self.at and run.global_rank in self.ranks:
                run.should_stop = True

        setattr(self, moment, hook)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.num_validations += not trainer.sanity_checking


def run(rank: RankContext | None, stops: Stops, **options: Any) -> list[int]:
    """How far a fit came: steps, epochs, validations. Without ranks it is one process under Lightning's strategy."""
    L.seed_everything(3, verbose=False)
    where = {} if rank is None else {"devices": rank.world_size, "device": str(rank.device)}
    strategy = SingleDeviceStrategy("cpu") if rank is None else D9DStrategy()
    it = trainer(strategy, max_epochs=4, callbacks=[stops], val_check_interval=2, **where, **options)
    size = 1 if rank is None else 2
    it.fit(Plain(), loader(12 * size), loader(8 * size))
    return [it.global_step, it.current_epoch, stops.num_validations]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("moment", MOMENTS)
def test_all_ranks_at_once_stop_where_one_process_does(rank: RankContext, moment: str) -> None:
    at = 1 if moment in ("on_fit_start", "on_train_start") else 2
    assert run(rank, Stops(moment, {0, 1}, at)) == run(None, Stops(moment, {0}, at))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("which", [0, 1])
def test_one_rank_stops_all_at_the_same_batch(rank: RankContext, moment: str, which: int) -> None:
    """The other may be ahead, but not by more than what it had begun."""
    at = 1 if moment in ("on_fit_start", "on_train_start") else 2
    ends = rank.all_gather_object(run(rank, Stops(moment, {which}, at)))
    earliest = run(None, Stops(moment, {0}, at))
    assert ends[0] == ends[1]
    assert earliest[0] <= ends[0][0] <= earliest[0] + 2 < 12


@pytest.mark.ranks(2)
def test_ranks_that_ask_one_after_the_other(rank: RankContext) -> None:
    stops = Stops("on_train_batch_end", {0, 1}, 2 + rank.rank)
    ends = rank.all_gather_object(run(rank, stops))
    assert ends[0] == ends[1]
    assert 2 <= ends[0][0] <= 4


@pytest.mark.ranks(2)
def test_min_steps_are_trained_first(rank: RankContext) -> None:
    ends = rank.all_gather_object(run(rank, Stops("on_train_batch_end", {1}, 1), min_steps=8))
    assert [steps for steps, *_ in ends] == [8, 8]


@pytest.mark.ranks(2)
def test_a_trainer_can_fit_again_after_it(rank: RankContext) -> None:
    stops = Stops("on_train_batch_end", {1}, 2)
    it = trainer(D9DStrategy(), rank.world_size, str(rank.device), max_epochs=2, callbacks=[stops])
    it.fit(Plain(), loader(24))
    first = rank.all_gather_object(it.global_step)
    it.fit_loop.max_epochs = 4
    it.fit(Plain(), loader(24))
    assert first[0] == first[1] < 6
    assert it.current_epoch == 4


@pytest.mark.ranks(2)
def test_ranks_of_a_pipeline_stop_together(rank: RankContext) -> None:
    mesh = MeshConfig(pipeline_parallel=2)
    stops = Stops("on_train_batch_end", {1}, 2)
    it = trainer(D9DStrategy(mesh=mesh), 2, str(rank.device), max_epochs=4, callbacks=[stops], precision="64-true")
    it.fit(Pipelined(), DataLoader(token_rows(12), batch_size=2))  # type: ignore[arg-type]
    ends = rank.all_gather_object(it.global_step)
    assert ends[0] == ends[1]
    assert 2 <= ends[0] <= 4


@pytest.mark.ranks(2)
def test_a_learning_rate_finder_stops_all_ranks_by_its_loss(rank: RankContext) -> None:
    """The finder stops where one rank's loss diverges. The real training begins with the flag reset."""

    class Diverging(Plain):
        learning_rate = 0.1

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss * 1000 ** (batch_idx * self.global_rank)

    finder = LearningRateFinder(num_training_steps=6, early_stop_threshold=2, update_attr=False)
    it = trainer(D9DStrategy(), rank.world_size, str(rank.device), max_epochs=1, callbacks=[finder])
    it.fit(Diverging(), loader(48))
    assert rank.all_gather_object(it.global_step) == [6, 6]


class Late(L.Callback):
    """The clock of one rank says that the time between validations is over; notes the steps of validations."""

    def __init__(self, late: dict[int, int]) -> None:
        self.late = late
        self.validated: list[int] = []

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        if self.late.get(trainer.global_step) == trainer.global_rank:
            trainer._last_val_time -= timedelta(days=2).total_seconds()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.validated.append(trainer.global_step)


@pytest.mark.ranks(2)
def test_clocks_that_differ_validate_after_the_same_batch(rank: RankContext) -> None:
    late = Late({2: 1, 6: 0, 7: 1})
    options: dict[str, Any] = {"callbacks": [late], "val_check_interval": timedelta(days=1), "num_sanity_val_steps": 0}
    it = trainer(D9DStrategy(), rank.world_size, str(rank.device), max_epochs=4, **options)
    it.fit(Plain(), loader(24), loader(8))
    first, second = rank.all_gather_object(late.validated)
    assert first == second
    assert it.global_step == 12
    assert 3 <= first[0] <= 6
    assert 7 <= first[1] <= 9
    assert len(first) in (2, 3)  # the last two may fall on one point
