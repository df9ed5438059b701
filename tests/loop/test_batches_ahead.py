"""A batch is read ahead and its copy begins before the step in front of it; places and ends stay what they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_d9d import D9DStrategy
from tests.harness.ranks import RankContext
from tests.strategy.plain import Plain, trainer
from tests.strategy.staged import Staged, staged_rows

BATCHES = 6


def numbers(num_batches: int) -> TensorDataset:
    """Two rows a batch, which have their own number."""
    x = torch.arange(2.0 * num_batches)[:, None].repeat(1, 8)
    return TensorDataset(x, torch.zeros(2 * num_batches, dtype=torch.int64))


class Stream(IterableDataset):
    def __init__(self, data: Any) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        return iter([self.data[index] for index in range(len(self.data))])


def by_workers(kind: Callable[..., DataLoader], data: Any, **options: Any) -> DataLoader:
    made = kind(data, batch_size=2, num_workers=1, **options)
    made.pin_memory = True  # which needs no GPU to be asked for
    return made


LOADERS: dict[str, Callable[[Any], DataLoader]] = {
    "map-style": lambda data: by_workers(DataLoader, data, shuffle=True),
    "stateful": lambda data: by_workers(StatefulDataLoader, data, shuffle=True),
    "without workers": lambda data: DataLoader(data, batch_size=2, shuffle=True),
    "stream": lambda data: DataLoader(Stream(data), batch_size=2),
    "stateful stream": lambda data: StatefulDataLoader(Stream(data), batch_size=2),
}


class Watched(D9DStrategy):
    """Takes a GPU for granted, and writes down which batches begin to be copied, in order with steps."""

    def __init__(self, copies: bool = True) -> None:
        super().__init__()
        self.events: list[tuple[str, float]] = []
        self._copies_ahead = copies

    def copier_ahead(self) -> Any:
        return (lambda batch: self.see("copy", batch)) if self._copies_ahead else None

    def see(self, what: str, batch: Any) -> None:
        x = batch["x"] if isinstance(batch, dict) else batch[0]
        self.events.append((what, x[0, 0].item()))

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.see("step", args[0])
        return super().training_step(*args, **kwargs)

    def of(self, what: str) -> list[float]:
        return [number for kind, number in self.events if kind == what]


class StopAfter(L.Callback):
    """Stops, or saves, after a batch of an epoch."""

    def __init__(self, batch: int, path: Path | None = None, epoch: int = 0) -> None:
        self.batch, self.path, self.epoch = batch, path, epoch

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.current_epoch, batch_idx) != (self.epoch, self.batch):
            return
        if self.path is None:
            trainer.should_stop = True
        else:
            trainer.save_checkpoint(self.path)


def fit(loader: str, *callbacks: L.Callback, copies: bool = True, path: Any = None, **options: Any) -> Watched:
    torch.manual_seed(1)
    strategy = Watched(copies)
    run = trainer(strategy, callbacks=[*callbacks], **{"max_epochs": 2, **options})
    run.fit(Plain(batch_norm=False), LOADERS[loader](numbers(BATCHES)), ckpt_path=path)
    return strategy


@pytest.mark.parametrize("limit", [1.0, 4])
@pytest.mark.parametrize("loader", ["map-style", "stateful"])
def test_the_next_batch_is_copied_before_the_step(loader: str, limit: float) -> None:
    """The first of an epoch is copied when it is taken."""
    seen = fit(loader, limit_train_batches=limit)
    steps = fit(loader, copies=False, limit_train_batches=limit).of("step")
    assert len(steps) == 2 * (BATCHES if limit == 1.0 else limit)
    expected = []
    for epoch in (steps[: len(steps) // 2], steps[len(steps) // 2 :]):
        for now, after in pairwise(epoch):
            expected += [("copy", after), ("step", now)]
        expected.append(("step", epoch[-1]))
    assert seen.events == expected


@pytest.mark.parametrize("loader", ["stream", "stateful stream"])
def test_batches_that_lightning_reads_ahead_are_copied_then(loader: str) -> None:
    batches = [2.0 * place for place in range(BATCHES)]
    expected = [("copy", 0.0), ("copy", 2.0)]
    for now, after in zip(batches, [*batches[2:], None, None], strict=True):
        expected += [("step", now)] if after is None else [("step", now), ("copy", after)]
    assert fit(loader).events == 2 * expected


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("saved_after", [2, BATCHES - 2, BATCHES - 1])
def test_a_run_goes_on_behind_what_was_trained_on(loader: str, saved_after: int, tmp_path: Path) -> None:
    """A run that does not read ahead also resumes correctly from a checkpoint of a run that does."""
    path = tmp_path / "saved.ckpt"
    whole = fit(loader, StopAfter(saved_after, path), max_epochs=3)
    assert len(whole.of("step")) == 3 * BATCHES
    for copies in (True, False):
        resumed = fit(loader, copies=copies, path=path, max_epochs=3)
        assert resumed.of("step") == whole.of("step")[saved_after + 1 :]


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize(("saved_after", "goes_on_at"), [(1, 4), (3, 4), (4, BATCHES)])
def test_a_run_that_accumulates_goes_on_behind_its_window(
    loader: str, saved_after: int, goes_on_at: int, tmp_path: Path
) -> None:
    """The window has four batches, and two at the end of an epoch. A save inside a window is made at its end."""
    path, options = tmp_path / "saved.ckpt", {"accumulate_grad_batches": 4}
    whole = fit(loader, StopAfter(saved_after, path, epoch=1), max_epochs=3, **options)
    assert len(whole.of("step")) == 3 * BATCHES
    for copies in (True, False):
        resumed = fit(loader, copies=copies, path=path, max_epochs=3, **options)
        assert resumed.of("step") == whole.of("step")[BATCHES + goes_on_at :]


@pytest.mark.parametrize("loader", ["map-style", "stateful"])
def test_a_run_that_stops_early_leaves_what_one_without_reading_ahead_does(loader: str, tmp_path: Path) -> None:
    steps = []
    for copies in (True, False):
        torch.manual_seed(1)
        strategy, path = Watched(copies), tmp_path / f"{copies}.ckpt"
        run = trainer(strategy, callbacks=[StopAfter(2)], max_epochs=3)
        run.fit(Plain(batch_norm=False), LOADERS[loader](numbers(BATCHES)))
        run.save_checkpoint(path)
        steps.append([strategy.of("step"), fit(loader, copies=copies, path=path, max_epochs=3).of("step")])
        assert [len(each) for each in steps[-1]] == [3, BATCHES - 3 + BATCHES]  # Lightning counts the epoch
    assert steps[0] == steps[1]


class Broken(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        if index == 6:
            raise ValueError("row 6 is broken")
        return super().__getitem__(index)


def test_what_fails_is_raised_when_it_is_its_turn() -> None:
    strategy = Watched()
    with pytest.raises(ValueError, match="row 6 is broken"):
        trainer(strategy).fit(Plain(batch_norm=False), by_workers(DataLoader, Broken(*numbers(BATCHES).tensors)))
    assert strategy.of("step") == [0.0, 2.0, 4.0]


def test_loaders_without_workers_are_read_as_before() -> None:
    """Reading ahead would take random numbers of this process before their time."""
    assert not fit("without workers").of("copy")


@pytest.mark.ranks(2)
def test_uneven_ranks_copy_ahead(rank: RankContext) -> None:
    """Each its own batches, and none for dummies."""
    num_batches = 3 + 2 * rank.rank
    strategy = Watched()
    run = trainer(strategy, rank.world_size, str(rank.device), max_epochs=1, use_distributed_sampler=False)
    data: Any = staged_rows(4 * num_batches)
    run.fit(Staged(), DataLoader(data, batch_size=4))
    assert run.global_step == 5
    assert len(strategy.of("copy")) == num_batches
    assert [kind for kind, _ in strategy.events][:4] == ["copy", "copy", "step", "copy"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("accumulated", "saved_after", "goes_on_at"), [(1, 1, 2), (1, 3, 4), (2, 2, 4)])
def test_uneven_ranks_go_on_behind_what_was_trained_on(
    rank: RankContext, accumulated: int, saved_after: int, goes_on_at: int
) -> None:
    """Both ranks have batches left, or one has only dummies. There is a worker, and batches are read ahead or not."""
    num_batches, path = 3 + 2 * rank.rank, rank.tmp_dir / "saved.ckpt"

    def steps(*callbacks: L.Callback, copies: bool = True, path: Any = None) -> list[float]:
        torch.manual_seed(rank.rank)
        strategy, options = Watched(copies), {"max_epochs": 2, "accumulate_grad_batches": accumulated}
        options |= {"use_distributed_sampler": False, "callbacks": list(callbacks)}
        data: Any = staged_rows(4 * num_batches)
        loader = DataLoader(data, batch_size=4, shuffle=True, num_workers=1)
        loader.pin_memory = True
        run = trainer(strategy, rank.world_size, str(rank.device), **options)
        run.fit(Staged(), loader, ckpt_path=path)
        return strategy.of("step")

    whole = steps(StopAfter(saved_after, path))
    assert len(whole) == 2 * 5
    for copies in (True, False):
        resumed = steps(copies=copies, path=path)
        assert resumed[-5:] == whole[-5:]
        left = max(num_batches - goes_on_at, 0)
        assert resumed[:left] == whole[goes_on_at:num_batches]
        assert len(resumed) == len(whole) - goes_on_at
