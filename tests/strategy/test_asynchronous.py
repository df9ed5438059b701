"""`CheckpointConfig(asynchronous=True)`: the checkpoints of a synchronous run, and training does not wait for them."""

from __future__ import annotations

import copy
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_d9d import CheckpointConfig, ConfigError, D9DStrategy, StateError
from lightning_d9d.checkpoint import is_directory, open_directory
from lightning_d9d.checkpoint import tensors as tensor_files
from lightning_d9d.checkpoint.background import THREAD_NAME, BackgroundSaver
from lightning_d9d.strategy import saving as saves
from tests.harness.compare import assert_bitwise_equal
from tests.harness.ranks import RankContext
from tests.strategy.plain import Plain, loader, trainer


def fit(
    folder: Path,
    callbacks: list[L.Callback],
    mode: Any = "sharded",
    asynchronous: bool = True,
    devices: int = 1,
    device: str = "cpu",
    path: Any = None,
    **options: Any,
) -> tuple[L.Trainer, Plain]:
    torch.manual_seed(1)
    module = Plain("adamw", scheduler="step")
    strategy = D9DStrategy(checkpoint=CheckpointConfig(mode=mode, asynchronous=asynchronous))
    options = {"max_epochs": 1, "enable_checkpointing": bool(callbacks), **options}
    run = trainer(strategy, devices, device, callbacks=callbacks, **options)
    run.fit(module, loader(32 * devices), loader(8), ckpt_path=path)
    return run, module


def best_and_last(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder, "{step}", monitor="loss_step", save_top_k=2, save_last=True, every_n_train_steps=1)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mode", ["sharded", "consolidated"])
def test_the_same_checkpoints_and_the_same_training(rank: RankContext, mode: str) -> None:
    """The best two and the last of eight, each replaced as soon as there is a better one."""
    options: dict[str, Any] = {"mode": mode, "devices": 2, "device": str(rank.device)}
    folders = {asynchronous: rank.tmp_dir / str(asynchronous) for asynchronous in (False, True)}
    modules = {
        each: fit(folder, [best_and_last(folder)], asynchronous=each, **options)[1] for each, folder in folders.items()
    }
    for name, weight in modules[True].state_dict().items():
        assert_bitwise_equal(name, weight, modules[False].state_dict()[name])
    names = sorted(os.listdir(folders[False]))
    assert sorted(os.listdir(folders[True])) == names
    assert len(names) == 3
    for name in names:
        if mode == "sharded":
            expected, actual = (open_directory(folders[each] / name).read() for each in (False, True))
        else:
            expected, actual = (
                torch.load(folders[each] / name, weights_only=True)["state_dict"] for each in (False, True)
            )
        assert actual.keys() == expected.keys()
        for key, value in expected.items():
            assert_bitwise_equal(f"{name}: {key}", actual[key], value)
    run, resumed = fit(folders[True], [], path=folders[True] / names[1], **options)
    assert run.global_step == 8
    for name, weight in resumed.state_dict().items():
        assert_bitwise_equal(name, weight, modules[False].state_dict()[name])
    assert not [each for each in threading.enumerate() if each.name.startswith(THREAD_NAME)]


class Scored(Plain):
    """A module with a score for each step."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.log("score", torch.tensor([0.1, 0.6, 0.7, 0.8, 0.9, 1.0][batch_idx]))
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("mode", ["sharded", "consolidated"])
def test_a_checkpoint_that_is_not_there_yet_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: Any
) -> None:
    """Each is written when somebody waits for it, which is after the next one has got its name."""
    is_awaited = threading.Event()
    wait, submit = BackgroundSaver.wait, BackgroundSaver.submit

    def wait_now(saver: BackgroundSaver) -> None:
        is_awaited.set()
        wait(saver)
        is_awaited.clear()

    def submit_later(saver: BackgroundSaver, action: Callable[[], object], path: Any, **options: Any) -> None:
        submit(saver, lambda: is_awaited.wait(60) and action(), path, **options)

    kept = {}
    for asynchronous in (False, True):
        if asynchronous:
            monkeypatch.setattr(BackgroundSaver, "wait", wait_now)
            monkeypatch.setattr(BackgroundSaver, "submit", submit_later)
        folder = tmp_path / str(asynchronous)
        saving = ModelCheckpoint(folder, "best", monitor="score", save_top_k=2, every_n_train_steps=1)
        strategy = D9DStrategy(checkpoint=CheckpointConfig(mode=mode, asynchronous=asynchronous))
        run = trainer(strategy, 1, callbacks=[saving], max_steps=6, enable_checkpointing=True)
        run.fit(Scored(), loader(32), loader(8))
        assert sorted(saving.best_k_models) == sorted(str(path) for path in folder.iterdir())
        kept[asynchronous] = {path.name: global_step(path) for path in folder.iterdir()}
        assert "file_exists" not in vars(saving)
    assert kept[True] == kept[False]
    assert sorted(kept[True].values()) == [1, 2]


class Pickled(L.Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.copies = [
            pickle.loads(pickle.dumps(trainer.checkpoint_callback)),
            copy.deepcopy(trainer.checkpoint_callback),
        ]


def test_callbacks_of_a_run_can_be_pickled_and_copied(tmp_path: Path) -> None:
    """What their copies say of names is what they say."""
    pickled, saving = Pickled(), ModelCheckpoint(tmp_path, "best", every_n_train_steps=1, save_top_k=-1)
    run, _ = fit(tmp_path, [pickled, saving], max_steps=1)
    assert [each.file_exists(str(tmp_path / "best.ckpt"), run) for each in pickled.copies] == [True, True]


def global_step(path: Path) -> int:
    values = open_directory(path).values if path.is_dir() else torch.load(path, weights_only=True)
    return values["global_step"]


def test_a_save_that_waits_for_the_end_of_a_window_has_its_name(tmp_path: Path) -> None:
    """Two callbacks save after the same validation, with one name."""
    savers: list[L.Callback] = [
        ModelCheckpoint(tmp_path, "best", monitor=monitor, save_on_train_epoch_end=False) for monitor in ("val", None)
    ]
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "val_check_interval": 3, "limit_val_batches": 1}
    fit(tmp_path, savers, asynchronous=False, max_steps=2, **options)
    assert sorted(os.listdir(tmp_path)) == ["best-v1.ckpt", "best.ckpt"]


class Holding(L.Callback):
    """Nothing is written before the third batch ends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, act: Callable[[], None] = lambda: None) -> None:
        self.go_on, self.act = threading.Event(), act
        real = tensor_files.write_tensors

        def write_later(*arguments: Any) -> Any:
            assert self.go_on.wait(60)
            return real(*arguments)

        monkeypatch.setattr(tensor_files, "write_tensors", write_later)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.act()
            self.go_on.set()


def test_training_goes_on_and_the_older_one_stays_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = tmp_path / "step=1.ckpt"
    fit(tmp_path, [ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1)], max_steps=1)
    assert is_directory(first)
    seen = []
    holding = Holding(monkeypatch, lambda: seen.append([path.name for path in tmp_path.glob("[!.]*")]))
    saving = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_last=True)
    saving.best_model_path = str(first)
    fit(tmp_path, [holding, saving], max_steps=3)
    assert seen == [["step=1.ckpt"]]  # the second step was saved before the third batch, its predecessor removed
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "step=2.ckpt"]
    assert open_directory(tmp_path / "last.ckpt").values["global_step"] == 2


def test_a_failure_is_raised_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tensor_files, "write_tensors", fail)
    with pytest.raises(StateError, match=r"step=8.ckpt' cannot be saved: .*No space left on device; free space"):
        fit(tmp_path, [ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=8)])
    with pytest.raises(StateError, match=r"step=6.ckpt' cannot be saved: .*step=3.ckpt' cannot be saved: "):
        fit(tmp_path, [ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=3)])
    assert os.listdir(tmp_path) == []


@pytest.mark.ranks(2)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_cannot_be_removed_stays_and_training_goes_on(rank: RankContext, asynchronous: bool) -> None:
    """Only rank 0 removes files. The other rank must not wait for it in the next save."""

    def fail(path: Any) -> None:
        raise PermissionError(1, "Operation not permitted", str(path))

    saving = ModelCheckpoint(rank.tmp_dir, "{step}", every_n_train_steps=1)
    options: dict[str, Any] = {"devices": 2, "device": str(rank.device), "asynchronous": asynchronous, "max_steps": 3}
    real, saves.remove_directory = saves.remove_directory, fail
    try:
        if rank.rank == 0:
            with pytest.warns(UserWarning, match=r"step=1.ckpt' is no longer needed, but cannot .* not permitted"):
                fit(rank.tmp_dir, [saving], **options)
        else:
            fit(rank.tmp_dir, [saving], **options)
    finally:
        saves.remove_directory = real
    rank.barrier()
    assert sorted(os.listdir(rank.tmp_dir)) == [f"step={step}.ckpt" for step in (1, 2, 3)]


@pytest.mark.filterwarnings("error:checkpoint")
def test_a_save_is_finished_though_training_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        threading.Timer(0.2, holding.go_on.set).start()
        raise ValueError("bad row")

    holding = Holding(monkeypatch, fail)
    with pytest.raises(ValueError, match="bad row"):
        fit(tmp_path, [holding, ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2)])
    assert open_directory(tmp_path / "step=2.ckpt").values["global_step"] == 2


def test_after_training_a_save_is_done_when_it_returns(tmp_path: Path) -> None:
    run, _ = fit(tmp_path, [], max_steps=1)
    run.save_checkpoint(tmp_path / "end.ckpt")
    assert is_directory(tmp_path / "end.ckpt")


def test_what_needs_the_checkpoint_at_once_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="save_last=True"):
        fit(tmp_path, [ModelCheckpoint(tmp_path, save_last="link")])


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_last_two_and_every_fourth_are_kept(tmp_path: Path, asynchronous: bool) -> None:
    last = ModelCheckpoint(
        tmp_path, "{step}", monitor="step", mode="max", save_top_k=2, every_n_train_steps=1, save_last=True
    )
    every = ModelCheckpoint(tmp_path, "kept-{step}", every_n_train_steps=4, save_top_k=-1)
    fit(tmp_path, [last, every], asynchronous=asynchronous, max_steps=7)
    assert sorted(os.listdir(tmp_path)) == ["kept-step=4.ckpt", "last.ckpt", "step=6.ckpt", "step=7.ckpt"]
    assert open_directory(tmp_path / "last.ckpt").values["global_step"] == 7
