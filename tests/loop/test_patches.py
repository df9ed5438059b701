"""What a run replaces on its Trainer: only what the table has, and nothing is left afterwards, however the run ends."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import (
    ModelCheckpoint,
    ModelSummary,
    RichModelSummary,
    RichProgressBar,
    TQDMProgressBar,
)
from torch.utils.data import DataLoader

from lightning_d9d import D9DStrategy, MeshConfig
from lightning_d9d.loop.patches import PATCHES, Patches
from tests.harness.ranks import RankContext
from tests.strategy.plain import Plain, loader, trainer
from tests.strategy.staged import Staged, staged_rows

STAYS = "_progress_bar_metrics"
WITH_BARS = {"enable_progress_bar": True, "enable_model_summary": True}
BARS: dict[str, Any] = {
    "tqdm": lambda: [TQDMProgressBar(), ModelSummary()],
    "rich": lambda: [RichProgressBar(), RichModelSummary()],
}


def state_of(run: L.Trainer) -> dict[tuple[str, int], Any]:
    """What each owner of a row of the table has of its own, by attribute and owner; of a callback also its class."""
    state: dict[tuple[str, int], Any] = {}
    for patch in PATCHES:
        for owner in patch.owners(run):
            own = type(owner) if patch.attribute == "__class__" else vars(owner).get(patch.attribute)
            state[patch.attribute, id(owner)] = [*own] if patch.attribute == "callbacks" else own
    return {key: value for key, value in state.items() if key[0] != STAYS}


def test_replaces_what_the_table_has_until_undone(tmp_path: Path) -> None:
    saver, other = ModelCheckpoint(tmp_path), L.Callback()
    run = trainer(D9DStrategy(), callbacks=[saver, TQDMProgressBar(), other], enable_checkpointing=True, **WITH_BARS)
    saver.on_exception = theirs = lambda *_: None  # type: ignore[method-assign]
    before, bar = state_of(run), run.progress_bar_callback
    patches = Patches(run)
    patches.replace(run.fit_loop, "run", lambda: 1)
    patches.replace(run.fit_loop, "run", lambda: 2)
    patches.replace(saver, "on_exception", lambda *_: None)
    patches.replace(run._accelerator_connector, "use_distributed_sampler", False)
    patches.replace(run.test_loop, "inference_mode", False)
    patches.replace(bar, "__class__", type("Bar", (TQDMProgressBar,), {}))
    patches.insert_callback(first := L.Callback())
    assert run.fit_loop.run() == 2  # type: ignore[func-returns-value]
    assert run.callbacks[0] is first  # type: ignore[attr-defined]
    run.callbacks.append(late := L.Callback())  # type: ignore[attr-defined]
    patches.undo()
    assert run.callbacks[0] is not first  # type: ignore[attr-defined]
    assert run.callbacks.pop() is late  # type: ignore[attr-defined]
    assert state_of(run) == before
    assert saver.on_exception is theirs
    assert type(bar) is TQDMProgressBar
    patches.undo()
    assert state_of(run) == before


@pytest.mark.parametrize(
    ("owner", "attribute"),
    [
        (lambda run: run.fit_loop, "advance"),  # a row of the loop inside of it
        (lambda run: run.test_loop, "run"),
        (lambda run: run.fit_loop.epoch_loop.val_loop, "inference_mode"),
        (lambda run: trainer(D9DStrategy()).fit_loop, "run"),  # of another Trainer
        (lambda run: L.Callback(), "__class__"),
    ],
)
def test_refuses_what_the_table_has_not(owner: Any, attribute: str) -> None:
    run = trainer(D9DStrategy())
    patches, it = Patches(run), owner(run)
    before = dict(vars(it))
    with pytest.raises(
        ValueError, match=rf"{type(it).__name__}\.{attribute} cannot be replaced: PATCHES in .* has no row"
    ):
        patches.replace(it, attribute, lambda: None)
    with pytest.raises(ValueError, match="cannot be replaced"):
        patches.write(it, attribute, "loss", 1.0)
    assert vars(it) == before


def test_an_entry_stays() -> None:
    run = trainer(D9DStrategy())
    patches = Patches(run)
    patches.write(run._logger_connector, "_progress_bar_metrics", "train_loss", 2.0)
    patches.undo()
    assert run.progress_bar_metrics == {"train_loss": 2.0}


class Ends(L.Callback):
    """Notes what is replaced in the second batch, and ends the run there if it is to end early."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.during: dict[tuple[str, int], Any] = {}

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step != 2:
            return
        self.during = state_of(trainer)
        if self.how == "exception":
            raise ValueError("bad row")
        if self.how != "end" and trainer.global_rank == 0:
            for _ in range(2 if self.how == "twice" else 1):
                os.kill(os.getpid(), signal.SIGINT)


def replaced_by(run: L.Trainer, ends: Ends, *arguments: Any) -> set[str]:
    """Fit, and return the attributes that were replaced in the meantime; they are as before at the end."""
    before = state_of(run)
    with suppress(ValueError, SystemExit):
        run.fit(*arguments)
    assert state_of(run) == before
    return {key[0] for key, value in ends.during.items() if key in before and value != before[key]}


@pytest.mark.parametrize("bars", BARS)
@pytest.mark.parametrize("how", ["end", "exception", "ctrl_c", "twice"])
def test_nothing_is_left_in_one_process(tmp_path: Path, how: str, bars: str) -> None:
    ends = Ends(how)
    callbacks = [ends, ModelCheckpoint(tmp_path), *BARS[bars]()]
    run = trainer(D9DStrategy(), callbacks=callbacks, enable_checkpointing=True, precision="bf16-mixed", **WITH_BARS)
    assert replaced_by(run, ends, Plain(), loader(24), loader(8)) == {
        *("register_signal_handlers", "advance", "file_exists", "dataloader", "__class__"),
        *("clip_grad_by_norm", "clip_grad_by_value", "clip_gradients"),
    }
    assert run.global_step == (12 if how == "end" else 2)


class Validates(Ends):
    """Begins another run of the Trainer inside of its fit."""

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.validate(pl_module, loader(8), verbose=False)


def test_nothing_is_left_where_a_run_begins_inside_of_another() -> None:
    ends = Validates("end")
    assert "advance" in replaced_by(trainer(D9DStrategy(), callbacks=[ends]), ends, Plain(), loader(24))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", ["end", "exception", "ctrl_c"])
def test_nothing_is_left_on_two_ranks(rank: RankContext, how: str) -> None:
    ends, strategy = Ends(how), D9DStrategy(mesh=MeshConfig(data_parallel_shard=2))
    run = trainer(strategy, rank.world_size, str(rank.device), callbacks=[ends])
    num_rows = 4800 if how == "ctrl_c" else 48  # ranks agree on where to stop while steps go on
    data = [DataLoader(staged_rows(count), batch_size=4) for count in (num_rows, 16)]
    assert replaced_by(run, ends, Staged(), *data) == {
        *("run", "setup_data", "on_run_start", "on_advance_start", "on_advance_end", "_broadcast_sigterm_tensor"),
        "callbacks",
        *(
            "_store_dataloader_outputs",
            "_sigterm_notifier_fn",
            "register_signal_handlers",
            "dataloader",
            "_resolve_sampler",
        ),
        *("inference_mode", "clip_grad_by_norm", "clip_grad_by_value"),
    }
    assert run.global_step == 12 if how == "end" else run.global_step < num_rows // 4
