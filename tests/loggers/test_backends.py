"""Runs of TensorBoard, W&B offline, MLflow and Aim, read back from what their packages wrote without a server."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger

from lightning_d9d import ConfigError
from lightning_d9d.loggers import AimLogger
from tests.loggers.jobs import in_process, log_histograms, log_steps, run_job
from tests.strategy.plain import Plain


def two_jobs(make: Any, folder: Path) -> None:
    """Two steps, and two more of another job."""
    checkpoint = run_job(make(), folder, 2)
    run_job(make(), folder, 4, checkpoint)


def records_in(path: Path) -> Iterator[bytes]:
    """Return the records of a file of W&B. They are in blocks of 32 KiB as in LevelDB's log, after a header of 7
    bytes."""
    content, place, parts = path.read_bytes(), 7, b""
    while place + 7 <= len(content):
        left = 2**15 - place % 2**15
        if left < 7:
            place += left
            continue
        _, size, kind = struct.unpack_from("<IHB", content, place)
        parts += content[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            yield parts
            parts = b""


@pytest.mark.loggers
def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    two_jobs(lambda: TensorBoardLogger(tmp_path, "run"), tmp_path)
    assert [each.name for each in (tmp_path / "run").iterdir()] == ["version_0"]
    events = EventAccumulator(str(tmp_path / "run" / "version_0")).Reload()
    assert [event.step for event in events.Scalars("loss_step")] == [0, 1, 2, 3]


@pytest.mark.loggers
def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.tracking import MlflowClient

    uri = f"file:{tmp_path}/runs"
    two_jobs(lambda: MLFlowLogger("experiment", tracking_uri=uri), tmp_path)
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("experiment")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert [each.step for each in client.get_metric_history(run.info.run_id, "loss_step")] == [0, 1, 2, 3]
    assert "versions/torch" in run.data.params


@pytest.mark.loggers
def test_wandb_offline(tmp_path: Path) -> None:
    from wandb.proto.wandb_internal_pb2 import Record

    in_process(log_steps, tmp_path, 2, None)
    in_process(log_steps, tmp_path, 4, tmp_path / "checkpoints" / "step=2.ckpt")
    runs, steps = set(), []
    for path in sorted(tmp_path.glob("wandb/offline-run-*/*.wandb")):
        for data in records_in(path):
            record = Record.FromString(data)
            if record.run.run_id:
                runs.add(record.run.run_id)
            items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            if "loss_step" in items:
                steps.append(int(items["trainer/global_step"]))
    assert len(runs) == 1
    assert steps == [0, 1, 2, 3]


@pytest.mark.loggers
def test_histograms_in_wandb(tmp_path: Path) -> None:
    from wandb.proto.wandb_internal_pb2 import Record

    size = Plain().net[0].weight.numel()
    in_process(log_histograms, tmp_path)
    name = "weights/net.0.weight"
    steps = []
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    for data in records_in(path):
        history = Record.FromString(data).history
        items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in history.item}
        if f"{name}/values" in items:
            steps.append(items["trainer/global_step"])
            assert sum(items[f"{name}/values"]) == size
            assert len(items[f"{name}/bins"]) == len(items[f"{name}/values"]) + 1
    assert steps == [0, 2]


@pytest.mark.loggers
def test_aim(tmp_path: Path) -> None:
    from aim import Repo, Run

    two_jobs(lambda: AimLogger(tmp_path, "experiment"), tmp_path)
    (name,) = Repo.from_path(str(tmp_path)).list_all_runs()
    run = Run(name, repo=str(tmp_path), system_tracking_interval=None, capture_terminal_logs=False)
    assert run.experiment == "experiment"
    assert run["hparams", "device"] == "cpu"
    (metric,) = [each for each in run.metrics() if each.name == "loss_step"]
    assert len(metric.values.sparse_numpy()[1]) == 4
    run.close()


def test_aim_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aim", None)
    with pytest.raises(ConfigError, match=r"pip install 'lightning-d9d\[aim\]'"):
        AimLogger()
