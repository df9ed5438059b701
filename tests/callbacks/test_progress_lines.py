"""Lines of progress, by a clock that stands still but for what a test does."""

from __future__ import annotations

import logging
import sys
from typing import Any

import pytest
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_d9d import D9DStrategy
from lightning_d9d.callbacks import ProgressLines
from tests.harness.ranks import RankContext
from tests.strategy.plain import Plain, loader, trainer
from tests.strategy.staged import Staged, staged_rows

LOG = logging.getLogger("lightning.pytorch.utilities.rank_zero")
STEP_SECONDS, VALIDATION_SECONDS = 30.0, 1000.0


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Ticking(Plain):
    """Takes its time for steps and validations, and logs values that are known."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.clock.now += STEP_SECONDS
        self.log("train_loss", 1.0 + self.global_step, prog_bar=True, sync_dist=True)
        self.log("hidden", 5.0, sync_dist=True)
        return self.loss(batch)

    def on_train_batch_end(self, *_: Any) -> None:
        self.log("tokens_per_s", 1000.0 * self.global_step, prog_bar=True, sync_dist=True)

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.clock.now += VALIDATION_SECONDS
        self.log("val_loss", 7.0, prog_bar=True, sync_dist=True)


class Heard(logging.Handler):
    """The lines of progress in what is logged while it is open."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith("step "):
            self.lines.append(record.getMessage())

    def __enter__(self) -> list[str]:
        LOG.addHandler(self)
        self.level_before = LOG.level
        LOG.setLevel(logging.INFO)
        return self.lines

    def __exit__(self, *_: Any) -> None:
        LOG.removeHandler(self)
        LOG.setLevel(self.level_before)


def fit(world_size: int = 1, **options: Any) -> list[str]:
    clock = Clock()
    run = trainer(
        D9DStrategy(),
        world_size,
        **{
            "callbacks": [ProgressLines()],
            "max_epochs": None,
            "max_steps": 5,
            "log_every_n_steps": 2,
            "val_check_interval": 2,
            "limit_val_batches": 1,
            "num_sanity_val_steps": 1,
            **options,
        },
    )
    with pytest.MonkeyPatch.context() as monkeypatch, Heard() as lines:
        monkeypatch.setattr("lightning_d9d.callbacks.progress_lines.perf_counter", clock)
        run.fit(Ticking(clock), loader(64), loader(4))
    return lines


EXPECTED = [
    "step 2 of 5: train_loss 2.000, 2000 tokens/s, 30 s a step, 0:01:30 left",
    "step 2: val_loss 7.000",
    "step 4 of 5: train_loss 4.000, 4000 tokens/s, 30 s a step, 0:00:30 left",
    "step 4: val_loss 7.000",
]


def test_lines_of_steps_and_validations() -> None:
    assert fit() == EXPECTED


@pytest.mark.ranks(2)
def test_rank_0_alone_logs(rank: RankContext) -> None:
    assert fit(world_size=2) == (EXPECTED if rank.rank == 0 else [])


@pytest.mark.parametrize("kind", [TQDMProgressBar, RichProgressBar])
def test_a_bar_is_replaced_in_a_file_alone(
    kind: type[Any], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    bar = kind()
    options = {
        "callbacks": [ProgressLines(), bar],
        "enable_progress_bar": True,
        "log_every_n_steps": 5,
        "limit_val_batches": 0,
    }
    assert fit(**options) == ["step 5 of 5: train_loss 5.000, 5000 tokens/s, 30 s a step"]
    assert "Epoch 0" not in "".join(capfd.readouterr())
    assert bar.is_enabled  # again
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert fit(**options) == []
    assert "Epoch 0" in "".join(capfd.readouterr())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_values_of_a_d9d_module(device: str) -> None:
    """The loss is that of its own step, also where the host hears of it later."""
    losses = []

    class Kept(Staged):
        def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
            losses.append(float(outputs["loss"]))

    strategy = D9DStrategy(microbatch_size=2)
    run = trainer(strategy, 1, device, callbacks=[ProgressLines()], max_epochs=1, log_every_n_steps=2)
    with Heard() as lines:
        run.fit(Kept(), DataLoader(staged_rows(16, None), batch_size=4))  # type: ignore[arg-type]
    assert [line.partition(", ")[0] for line in lines] == [
        f"step {step} of 4: train_loss {losses[step - 1]:.3f}" for step in (2, 4)
    ]
    assert all(("GiB at most" in line) == (device == "cuda") for line in lines)
