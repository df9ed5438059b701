"""What users of plain modules do around a fit works as under Lightning's own strategies."""

from __future__ import annotations

import copy
import errno
import os
import pickle
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import RunningStage
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_d9d import ConfigError, D9DStrategy
from tests.harness.compare import assert_bitwise_equal, assert_tensors_close
from tests.harness.ranks import RankContext
from tests.strategy.plain import Plain, TwoOptimizers, loader, trainer
from tests.strategy.staged import Staged, staged_rows

STRATEGIES = {"stock": lambda: "auto", "ours": D9DStrategy}
both = pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)


def weights(module: L.LightningModule) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


class WithoutLength:
    """A loader with its own iterator, like a reader of a stream. Beginning it again loses the place."""

    def __init__(self, ends: bool) -> None:
        self.inner, self.ends = loader(12), ends

    def __iter__(self) -> WithoutLength:
        self.batches = iter(self.inner)
        return self

    def __next__(self) -> Any:
        try:
            return next(self.batches)
        except StopIteration:
            if self.ends:
                raise
            self.batches = iter(self.inner)
            return next(self.batches)


class Unsized(WithoutLength):
    def __len__(self) -> int:
        raise NotImplementedError


@both
@pytest.mark.parametrize("make", [WithoutLength, Unsized])
@pytest.mark.parametrize("ends", [True, False])
def test_loaders_without_a_length(strategy: Any, make: type[WithoutLength], ends: bool) -> None:
    run = trainer(strategy(), max_epochs=1, max_steps=3 if ends else 7)
    run.fit(Plain(), make(ends))
    assert run.global_step == (3 if ends else 7)


class Fails:
    def __iter__(self) -> Iterator[Any]:
        raise OSError("the stream is closed")


def test_the_error_of_a_loader_is_shown() -> None:
    with pytest.raises(OSError, match="the stream is closed"):
        trainer(D9DStrategy()).fit(Plain(), Fails())


class Stream(IterableDataset):
    """What is read is gone."""

    def __init__(self, source: Any, count: int) -> None:
        self.source, self.count = source, count

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.count):
            yield self.source.get_nowait()


@both
def test_a_resumed_stream_loses_nothing(strategy: Any, tmp_path: Path) -> None:
    source: queue.Queue[Any] = queue.Queue()
    for batch in loader(24):
        source.put(batch)

    def fit(max_epochs: int, path: Path | None) -> L.Trainer:
        run = trainer(strategy(), max_epochs=max_epochs)
        run.fit(Plain(), DataLoader(Stream(source, 3), batch_size=None), ckpt_path=path)
        return run

    fit(1, None).save_checkpoint(tmp_path / "a.ckpt")
    assert fit(2, tmp_path / "a.ckpt").global_step == 6
    assert source.empty()


class Copies(L.Callback):
    """Copies the Trainer while it runs."""

    def __init__(self) -> None:
        self.num_copies = 0

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        copied = copy.deepcopy(trainer)
        assert copied.strategy is not trainer.strategy
        assert copied.lightning_module is not pl_module
        assert copied.global_step == trainer.global_step
        for name, value in copied.lightning_module.state_dict().items():
            assert_bitwise_equal(name, value, pl_module.state_dict()[name])
        self.num_copies += 1

    def on_validation_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        copy.deepcopy(trainer.callbacks)


def fit_with(callbacks: list[L.Callback], strategy: Any, devices: int = 1, device: str = "cpu") -> dict[str, Tensor]:
    L.seed_everything(3, verbose=False)
    module = Plain("adamw", batch_norm=False)
    options: dict[str, Any] = {"callbacks": callbacks, "accumulate_grad_batches": 2, "enable_progress_bar": True}
    trainer(strategy, devices, device, **options).fit(module, loader(16 * devices), loader(8 * devices))
    return weights(module)


@both
def test_copies_during_a_fit(strategy: Any) -> None:
    copies = Copies()
    assert_tensors_close(fit_with([copies], strategy()), fit_with([], strategy()))
    assert copies.num_copies == 8


@pytest.mark.ranks(2)
def test_copies_during_a_fit_of_two_ranks(rank: RankContext) -> None:
    copies = Copies()
    with_copies = fit_with([copies], D9DStrategy(), 2, rank.device.type)
    assert_tensors_close(with_copies, fit_with([], D9DStrategy(), 2, rank.device.type))
    assert copies.num_copies == 8


@both
def test_a_trainer_is_pickled_after_a_fit(strategy: Any) -> None:
    run = trainer(strategy(), max_epochs=1)
    run.fit(Plain(), loader(8), loader(8))
    assert pickle.loads(pickle.dumps(run)).global_step == 2


@both
def test_a_trainer_is_pickled_after_one_whose_hook_raised(strategy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning then goes on recording what is set on loaders, and never stops."""
    for name in ("__init__", "__setattr__", "__delattr__"):  # as they were, when this test is over
        monkeypatch.setattr(DataLoader, name, getattr(DataLoader, name))

    class Refusing(Plain):
        def train_dataloader(self) -> Any:
            raise OSError("no data")

    with pytest.raises(OSError, match="no data"):
        trainer(strategy()).fit(Refusing())
    run = trainer(strategy(), max_epochs=1)
    run.fit(Plain(), loader(8), loader(8))
    assert pickle.loads(pickle.dumps(run)).global_step == 2


@both
def test_a_module_without_a_run_is_saved_and_loaded(strategy: Any, tmp_path: Path) -> None:
    run = trainer(strategy())
    module = Plain(batch_norm=False)
    run.strategy.connect(module)
    run.save_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    assert_tensors_close(torch.load(tmp_path / "a.ckpt", weights_only=True)["state_dict"], weights(module))
    assert trainer(strategy()).strategy.load_checkpoint(tmp_path / "a.ckpt")["global_step"] == 0


@both
def test_a_new_trainer_evaluates_a_checkpoint(strategy: Any, tmp_path: Path) -> None:
    run = trainer(strategy(), max_epochs=1)
    run.fit(Plain(), loader(8), loader(8))
    run.save_checkpoint(tmp_path / "a.ckpt")
    expected = run.callback_metrics["val"]
    module = Plain()
    again = trainer(strategy())
    again.validate(module, loader(8), ckpt_path=tmp_path / "a.ckpt", verbose=False)
    assert_bitwise_equal("val", again.callback_metrics["val"], expected)


def test_a_file_where_names_cannot_be_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trainer(D9DStrategy(), max_epochs=1)
    run.fit(Plain(), loader(8))
    (tmp_path / "a.ckpt").write_text("an earlier one")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "rename", refuse)
    run.save_checkpoint(tmp_path / "a.ckpt")
    assert torch.load(tmp_path / "a.ckpt", weights_only=True)["global_step"] == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.ckpt"]


@pytest.mark.parametrize("num_saved", [0, 2])
def test_optimizers_that_were_not_saved_begin_anew(num_saved: int, tmp_path: Path) -> None:
    run = trainer(D9DStrategy(), max_epochs=1)
    run.fit(Plain(), loader(8))
    run.save_checkpoint(tmp_path / "a.ckpt")
    content = torch.load(tmp_path / "a.ckpt", weights_only=True)
    content["optimizer_states"] = content["optimizer_states"] * num_saved
    torch.save(content, tmp_path / "a.ckpt")
    resumed = trainer(D9DStrategy(), max_epochs=2)
    with pytest.warns(UserWarning, match=f"has {num_saved} optimizers and the module 1"):
        resumed.fit(Plain(), loader(8), ckpt_path=tmp_path / "a.ckpt")
    assert resumed.global_step == 4


class SeesCheckpoints(L.Callback):
    """Keeps what hooks are given; strategies must not change it afterwards."""

    def __init__(self) -> None:
        self.given: list[dict[str, Any]] = []
        self.num_callbacks: list[int] = []

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self.given.append(checkpoint)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.num_callbacks.append(len(trainer.callbacks))  # type: ignore[attr-defined]


def test_hooks_and_callbacks_are_those_of_stock(tmp_path: Path) -> None:
    seen = {}
    for name, strategy in STRATEGIES.items():
        sees = seen[name] = SeesCheckpoints()
        checkpoint = ModelCheckpoint(tmp_path / name, every_n_train_steps=1)
        run = trainer(strategy(), max_epochs=1, callbacks=[sees, checkpoint], enable_checkpointing=True)
        run.fit(Plain(), loader(8))
    assert seen["ours"].num_callbacks == seen["stock"].num_callbacks
    assert [list(each) for each in seen["ours"].given] == [list(each) for each in seen["stock"].given]


@both
def test_a_missing_checkpoint_is_a_missing_file(strategy: Any, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="Checkpoint file not found"):
        trainer(strategy()).fit(Plain(), loader(8), ckpt_path=tmp_path / "missing.ckpt")


def test_a_compiled_module_trains_as_under_stock() -> None:
    results = {}
    for name, strategy in STRATEGIES.items():
        L.seed_everything(3, verbose=False)
        module = Plain(batch_norm=False)
        module.log = lambda *_, **__: None  # type: ignore[method-assign]  # Lightning's own cannot be compiled
        trainer(strategy(), max_epochs=1).fit(torch.compile(module, backend="eager"), loader(8))
        results[name] = weights(module)
    assert_tensors_close(results["ours"], results["stock"])


def test_a_compiled_d9d_module_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"torch\.compile\(Staged\) .*ParallelConfig\(compile=True\)"):
        trainer(D9DStrategy()).fit(torch.compile(Staged()), staged_rows(8))


@both
def test_one_process_of_a_slurm_job_need_not_say_its_rank(strategy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_JOB_NAME", "train")
    monkeypatch.setattr("lightning.pytorch.plugins.environments.SLURMEnvironment.detect", lambda: True)
    run = trainer(strategy(), max_epochs=1)
    run.fit(Plain(), loader(8))
    assert (run.global_rank, run.world_size, run.global_step) == (0, 1, 2)


@both
def test_a_tuner_that_fails_says_why(strategy: Any) -> None:
    run = trainer(strategy(), max_epochs=1)
    module = TwoOptimizers()
    module.learning_rate = 0.1
    with pytest.raises(Exception, match="optimizer"):
        L.pytorch.tuner.Tuner(run).lr_find(module, loader(400))


def barebones(strategy: Any, module: L.LightningModule, data: Any) -> L.Trainer:
    """A Trainer that logs nothing, at no step."""
    run = L.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_steps=2, barebones=True)
    run.fit(module, data)
    return run


@both
def test_a_barebones_trainer_fits(strategy: Any) -> None:
    torch.manual_seed(0)
    module = Plain(batch_norm=False)
    before = weights(copy.deepcopy(module))
    assert barebones(strategy(), module, loader(8)).global_step == 2
    assert any(not torch.equal(before[name], value) for name, value in weights(module).items())


def test_a_barebones_trainer_fits_stages() -> None:
    assert barebones(D9DStrategy(), Staged(), DataLoader(staged_rows(8), batch_size=2)).global_step == 2


@both
def test_a_step_by_hand_after_a_fit_is_lightnings(strategy: Any) -> None:
    module = Plain(batch_norm=False)
    run = trainer(strategy(), max_epochs=1)
    run.fit(module, loader(8))
    before = weights(copy.deepcopy(module))
    run.state.stage = RunningStage.TRAINING
    inputs = {"batch": next(iter(loader(8))), "batch_idx": 0}
    assert run.fit_loop.epoch_loop.automatic_optimization.run(run.optimizers[0], 0, inputs)["loss"] > 0
    assert any(not torch.equal(before[name], value) for name, value in weights(module).items())
