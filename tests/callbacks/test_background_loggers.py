"""Loggers that fail or hang, and runs that go on: with the logger that needs no package."""

from __future__ import annotations

import csv
import threading
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import DummyLogger

from lightning_d9d import ConfigError, D9DStrategy, MeshConfig
from lightning_d9d.callbacks import BackgroundLoggers
from lightning_d9d.loop import logger_threads
from tests.harness.ranks import RankContext
from tests.strategy.plain import Plain, loader, trainer
from tests.strategy.sharded import Sharded


class Failing(DummyLogger):
    """Fails so many times."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times
        self.written: list[int] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if self.times > 0:
            self.times -= 1
            raise OSError("no space left")
        assert step is not None
        self.written.append(step)


class Hanging(DummyLogger):
    """A logger whose first call does not return before it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.go.wait()


def steps_in(folder: Path) -> list[int]:
    with (folder / "metrics.csv").open() as file:
        return [int(row["step"]) for row in csv.DictReader(file) if row.get("loss_step")]


def fit(loggers: list[Any], hang_seconds: float = 30.0, **options: Any) -> None:
    callbacks = [BackgroundLoggers(hang_seconds), *options.pop("callbacks", [])]
    run = trainer(D9DStrategy(), logger=loggers, callbacks=callbacks, **{"max_steps": 4, "max_epochs": None} | options)
    run.fit(Plain(), loader(16))


def test_a_logger_that_fails_is_tried_again_and_others_do_not_notice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logger_threads, "_RETRY_SECONDS", (0.0, 0.0))
    once, always, file = Failing(2), Failing(10**9), CSVLogger(tmp_path, "", "")
    with pytest.warns(UserWarning, match="has lost") as warned:
        fit([once, always, file])
    assert once.written[:4] == [0, 1, 2, 3]
    texts = [str(each.message) for each in warned]
    assert sum("Failing failed with OSError: no space left" in text for text in texts) == 2
    assert [text for text in texts if "has lost" in text] == [
        "Failing has lost 5 calls of this fit; other loggers have theirs"
    ]
    assert steps_in(tmp_path) == [0, 1, 2, 3]


def test_a_logger_that_hangs_is_left_behind(tmp_path: Path) -> None:
    hanging, file = Hanging(), CSVLogger(tmp_path, "", "")
    with pytest.warns(UserWarning, match=r"Hanging has lost \d+ calls"):
        fit([hanging, file], hang_seconds=0.3)
    assert steps_in(tmp_path) == [0, 1, 2, 3]
    hanging.go.set()


def test_loggers_are_their_own_again_afterwards(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, "", "")
    fit([logger])
    assert not {"log_metrics", "save", "log_hyperparams", "finalize"} & vars(logger).keys()


@pytest.mark.parametrize("continues", [True, False])
def test_a_resumed_job_goes_on_with_its_run(tmp_path: Path, continues: bool) -> None:
    saving = ModelCheckpoint(tmp_path / "checkpoints", every_n_train_steps=2, save_top_k=-1)
    options: dict[str, Any] = {"callbacks": [saving], "enable_checkpointing": True}
    fit([CSVLogger(tmp_path / "logs", "run")], max_steps=2, **options)
    again = CSVLogger(tmp_path / "logs", "run")
    callbacks = [BackgroundLoggers(continue_runs=continues)]
    run = trainer(D9DStrategy(), logger=[again], callbacks=callbacks, max_steps=4, max_epochs=None)
    (checkpoint,) = (tmp_path / "checkpoints").iterdir()
    run.fit(Plain(), loader(16), ckpt_path=checkpoint)
    assert again.version == (0 if continues else 1)
    assert steps_in(tmp_path / "logs" / "run" / "version_0") == ([0, 1, 2, 3] if continues else [0, 1])


def test_bad_input_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="hang_seconds=0"):
        BackgroundLoggers(0)
    with pytest.raises(ConfigError, match="has no logger to call"):
        trainer(D9DStrategy(), callbacks=[BackgroundLoggers()]).fit(Plain(), loader(4))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"CSVLogger\(save_dir='.*file'\) cannot be written"):
        fit([CSVLogger(tmp_path / "file")])


@pytest.mark.ranks(2)
def test_a_mesh_logs_once_and_is_recorded(rank: RankContext) -> None:
    logger = CSVLogger(rank.tmp_dir, "", "")
    run = trainer(
        D9DStrategy(mesh=MeshConfig(tensor_parallel=2)),
        2,
        rank.device.type,
        logger=[logger],
        callbacks=[BackgroundLoggers()],
        max_epochs=1,
    )
    run.fit(Sharded())
    if rank.rank == 0:
        with (rank.tmp_dir / "metrics.csv").open() as file:
            steps = [int(row["step"]) for row in csv.DictReader(file)]
        assert steps == [*range(len(steps))]
        assert len(steps) > 1
        record = (rank.tmp_dir / "hparams.yaml").read_text()
        assert "mesh/tp: 2" in record
        assert "versions/torch:" in record
        assert "strategy/mesh: MeshConfig" in record
