"""Going on in the middle of an epoch with loaders of every kind, on as many data ranks or others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_d9d import D9DStrategy
from tests.strategy.plain import Plain, rows, trainer
from tests.strategy.staged import Staged, staged_rows

BATCHES = 8


class Stream(IterableDataset):
    """Rows without a length; worker processes take turns, and shuffle with the numbers that they draw."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        if worker is None:
            return iter([self.data[index] for index in range(len(self.data))])
        own = torch.arange(worker.id, len(self.data), worker.num_workers)
        return iter([self.data[int(own[place])] for place in torch.randperm(len(own))])


LOADERS: dict[str, Callable[[Any], Any]] = {
    "map-style": lambda data: DataLoader(data, batch_size=4, shuffle=True),
    "stateful": lambda data: StatefulDataLoader(data, batch_size=4, shuffle=True),
    "stateful, workers": lambda data: StatefulDataLoader(data, batch_size=4, shuffle=True, num_workers=2),
    "stateful stream": lambda data: StatefulDataLoader(Stream(data), batch_size=4),
    "stream": lambda data: DataLoader(Stream(data), batch_size=4),
    "stream, workers": lambda data: DataLoader(Stream(data), batch_size=4, num_workers=2),
}


class Seeing(Callback):
    """Keeps the batches."""

    def __init__(self) -> None:
        self.batches: list[list[float]] = []
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        x = batch["x"] if isinstance(batch, dict) else batch[0]
        self.batches.append(x[:, 0].tolist())
        self.losses.append(float(outputs["loss"]))


class Saving(Callback):
    """Asks for a checkpoint after a batch."""

    def __init__(self, batch: int, path: Path) -> None:
        self.batch, self.path, self.at_once = batch, path, True

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batch and trainer.current_epoch == 1:
            trainer.save_checkpoint(self.path)
            self.at_once = self.path.exists()


def fit(kind: type, loader: str, *callbacks: Callback, path: Any = None, **options: Any) -> Seeing:
    torch.manual_seed(1)
    seeing = Seeing()
    data: Any = staged_rows(4 * BATCHES) if kind is Staged else rows(4 * BATCHES)
    run = trainer(D9DStrategy(), callbacks=[seeing, *callbacks], **{"max_epochs": 3, **options})
    run.fit(kind(optimizer="adamw"), LOADERS[loader](data), ckpt_path=path)
    return seeing


@pytest.mark.parametrize("kind", [Plain, Staged])
@pytest.mark.parametrize("loader", LOADERS)
def test_every_loader_goes_on_exactly(loader: str, kind: type, tmp_path: Path) -> None:
    path = tmp_path / "middle.ckpt"
    whole = fit(kind, loader, Saving(2, path))
    assert len(whole.batches) == 3 * BATCHES
    resumed = fit(kind, loader, path=path)
    assert resumed.batches == whole.batches[BATCHES + 3 :]
    assert resumed.losses == whole.losses[BATCHES + 3 :]


@pytest.mark.parametrize("loader", LOADERS)
def test_an_epoch_that_a_limit_ends_is_over(loader: str, tmp_path: Path) -> None:
    """Saved in the last batch that counts: what is left of the epoch is not read by the run that goes on."""
    path = tmp_path / "end.ckpt"
    whole = fit(Plain, loader, Saving(5, path), limit_train_batches=6)
    resumed = fit(Plain, loader, path=path, limit_train_batches=6)
    assert len(resumed.batches) == 6
    assert resumed.batches == whole.batches[12:]


@pytest.mark.parametrize("loader", LOADERS)
def test_saved_in_the_last_batch_of_an_epoch(loader: str, tmp_path: Path) -> None:
    """Whether a loader knows by then that its epoch is over or not, the next one is whole."""
    path = tmp_path / "end.ckpt"
    whole = fit(Plain, loader, Saving(BATCHES - 1, path))
    resumed = fit(Plain, loader, path=path)
    assert resumed.batches == whole.batches[2 * BATCHES :]


@pytest.mark.parametrize("kind", [Plain, Staged])
def test_a_save_inside_of_an_accumulation_window_is_done_at_its_end(kind: type, tmp_path: Path) -> None:
    path = tmp_path / "middle.ckpt"
    options = {"accumulate_grad_batches": 4}
    saving = Saving(1, path)
    whole = fit(kind, "map-style", saving, **options)
    assert not saving.at_once
    resumed = fit(kind, "map-style", path=path, **options)
    assert resumed.losses == whole.losses[BATCHES + 4 :]


def test_what_a_save_replaces_stays_until_the_window_ends(tmp_path: Path) -> None:
    """Validation after every third batch, in windows of two."""
    left = []

    class Looking(Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            left.append(sorted(path.name for path in tmp_path.iterdir()) if tmp_path.exists() else [])

    saving = ModelCheckpoint(tmp_path, "{step}", monitor="val", save_top_k=1, mode="max", save_on_train_epoch_end=False)
    saving.check_monitor_top_k = lambda *_: True  # type: ignore[method-assign]
    options = {"accumulate_grad_batches": 2, "val_check_interval": 3, "max_epochs": 1}
    run = trainer(D9DStrategy(), callbacks=[Looking(), saving], enable_checkpointing=True, **options)
    run.fit(Plain(), DataLoader(rows(48), batch_size=4), DataLoader(rows(8), batch_size=4))
    assert [len(each) for each in left] == [0, 0, 0, 0, *[1] * 8]


@pytest.mark.parametrize("ending", ["stopped", "failed", "requeued"])
def test_a_window_that_stays_open_is_saved_without_its_gradients(tmp_path: Path, ending: str) -> None:
    path = tmp_path / ("hpc_ckpt_1.ckpt" if ending == "requeued" else "end.ckpt")

    class Ending(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 5 and ending == "failed":
                raise ValueError("bad row")
            if batch_idx == 5:
                trainer.save_checkpoint(path)
                assert path.exists() == (ending == "requeued")
                trainer.should_stop = ending == "stopped"

        def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
            trainer.save_checkpoint(path)

    failing = pytest.raises(ValueError, match="bad row") if ending == "failed" else nullcontext()
    with failing, pytest.warns(UserWarning, match="inside of an accumulation window, whose gradients"):
        fit(Plain, "map-style", Ending(), accumulate_grad_batches=4, max_epochs=1)
    assert torch.load(path, weights_only=True)["global_step"] == 1
