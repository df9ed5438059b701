"""The table of a start."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import lightning as L
import pytest
import torch

from lightning_d9d import D9DStrategy
from lightning_d9d.callbacks import StartTimes
from lightning_d9d.callbacks.start_times import seconds_of_process
from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoePretraining
from tests.benchmarks.strategy_overhead import Tokens


def test_the_lines_make_up_the_time_of_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    callback, config = StartTimes(), Qwen3MoeConfig.preset("tiny")
    loader = torch.utils.data.DataLoader(Tokens(config.vocab_size, 8), batch_size=1)

    def fit() -> tuple[float, float]:
        """The bounds of the time from the call to the end of the first batch."""
        ends: list[float] = []

        class End(L.Callback):
            def on_train_batch_end(self, *_: object) -> None:
                ends.append(time.perf_counter())

        trainer = L.Trainer(
            strategy=D9DStrategy(),
            accelerator="cpu",
            max_steps=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
            callbacks=[callback, End()],
        )
        begin = time.perf_counter()
        trainer.fit(Qwen3MoePretraining(config), loader)
        return begin, ends[0]

    since_process, at = seconds_of_process(), time.perf_counter()
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        _, end = fit()
    stretches = {"before setup", "model and strategy", "initial weights", "first batch", "first step"}
    assert stretches <= callback.seconds.keys()
    assert sum(callback.seconds.values()) == pytest.approx(since_process + end - at, abs=0.1)
    (table,) = [message for message in caplog.messages if message.startswith("start ")]
    assert table.splitlines()[-1].split() == ["total", f"{sum(callback.seconds.values()):.1f}"]
    begin, end = fit()
    assert "before setup" not in callback.seconds
    assert 0 < sum(callback.seconds.values()) <= end - begin


def test_evaluation_has_no_table(tmp_path: Path) -> None:
    callback, config = StartTimes(), Qwen3MoeConfig.preset("tiny")
    loader = torch.utils.data.DataLoader(Tokens(config.vocab_size, 8), batch_size=1)
    trainer = L.Trainer(
        strategy=D9DStrategy(),
        accelerator="cpu",
        logger=False,
        limit_val_batches=1,
        enable_progress_bar=False,
        default_root_dir=tmp_path,
        callbacks=[callback],
    )
    trainer.validate(Qwen3MoePretraining(config), loader, verbose=False)
    assert callback.seconds == {}
