"""Profiled steps: what is written, that training is not changed by it, and what is refused."""

from __future__ import annotations

import gzip
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.profilers import PyTorchProfiler
from torch.profiler import profile
from torch.utils.data import DataLoader

from lightning_d9d import D9DStrategy, MeshConfig
from lightning_d9d.callbacks import PipelineTimeline, StepProfile
from lightning_d9d.errors import ConfigError
from lightning_d9d.metrics.profiled import COMMUNICATION, GAPS, PRODUCTS, WAIT
from tests.harness.compare import assert_bitwise_equal
from tests.harness.ranks import RankContext
from tests.strategy.pipelined import Pipelined, token_rows
from tests.strategy.plain import trainer


def fit(
    *callbacks: L.Callback,
    rank: RankContext | None = None,
    num_batches: int = 4,
    module: Pipelined | None = None,
    ckpt_path: Path | None = None,
    **options: Any,
) -> Pipelined:
    L.seed_everything(7, verbose=False)
    module = module or Pipelined()
    num_ranks = 1 if rank is None else rank.world_size
    strategy = D9DStrategy(mesh=MeshConfig(pipeline_parallel=num_ranks), microbatch_size=2)
    device = options.pop("device", "cpu")
    options = {"precision": "64-true", "max_epochs": 1, **options}
    run = trainer(strategy, num_ranks, device, callbacks=list(callbacks), **options)
    rows: Any = token_rows(4 * num_batches)
    run.fit(module, DataLoader(rows, batch_size=4), ckpt_path=ckpt_path)
    return module


def ranges(path: Path) -> set[str]:
    """The names of the ranges in a trace."""
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    return {event["name"] for event in events if event.get("cat") == "user_annotation"}


def test_one_process(tmp_path: Path) -> None:
    callback = StepProfile(tmp_path / "out", first_step=2, last_step=3, every_n_steps=3, ranks="all")
    module, plain = fit(callback, num_batches=6), fit(num_batches=6)
    for ours, theirs in zip(module.losses, plain.losses, strict=True):
        assert_bitwise_equal("loss", ours, theirs)
    names = {"rank_0.trace.json.gz", "rank_0.md", "rank_0.json"}
    files = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").glob("*/*")}
    assert files == {f"{step}/{name}" for step in ("step_2", "step_5") for name in names}

    found = ranges(tmp_path / "out/step_5/rank_0.trace.json.gz")
    assert {"0F0", "0F1", "0B0", "0B1", "step 5, batch 4", "step 6, batch 5"} <= found
    assert not any(name.startswith(("step 4", "step 7")) for name in found)
    profiled = callback.profiled
    assert profiled is not None
    assert profiled.num_steps == 2
    assert sum(profiled.parts.values()) == pytest.approx(profiled.seconds)
    assert profiled.parts[PRODUCTS] > 0
    values = json.loads((tmp_path / "out/step_5/rank_0.json").read_text())
    assert values["parts"] == profiled.parts
    assert values["seconds"] == profiled.seconds
    text = (tmp_path / "out/step_5/rank_0.md").read_text()
    assert text.startswith("# Rank 0: 2 step(s) from step 5 on\n")
    assert f"| {GAPS} |" in text


@pytest.mark.ranks(2)
def test_a_pipeline(rank: RankContext) -> None:
    callback = StepProfile(rank.tmp_dir / "out", first_step=3, ranks=[1])
    run: dict[str, Any] = {"rank": rank, "num_batches": 7, "accumulate_grad_batches": 2}
    module, plain = fit(callback, **run), fit(**run)
    for ours, theirs in zip(module.losses, plain.losses, strict=True):
        assert_bitwise_equal("loss", ours, theirs)
    rank.barrier()
    folder = rank.tmp_dir / "out/step_3"
    pictures = {f"timeline.{ending}" for ending in ("png", "svg", "html", "json")}
    written = {"rank_1.trace.json.gz", "rank_1.md", "rank_1.json"} | pictures
    assert {path.name for path in folder.iterdir()} == written
    found = ranges(folder / "rank_1.trace.json.gz")
    assert {"1F0", "1F1", "1B0", "1B1", "1RECV_F0", "1SEND_B1", WAIT} <= found
    assert {name for name in found if name.startswith("step")} == {"step 3, batch 4", "step 3, batch 5"}
    assert not any(name.startswith("0") for name in found)
    assert json.loads((folder / "timeline.json").read_text())["step"] == 2
    assert callback.measured is not None
    assert {span.rank for span in callback.measured.spans} == {0, 1}
    assert (callback.profiled is None) == (rank.rank == 0)
    if callback.profiled is not None:
        assert callback.profiled.parts[COMMUNICATION] > 0


class Act(L.Callback):
    """Does something at the beginning of a step, counted from 1."""

    def __init__(self, step: int, action: Any) -> None:
        self.step, self.action = step, action

    def on_train_batch_start(self, run: L.Trainer, *_: Any) -> None:
        if run.global_step + 1 == self.step:
            self.action(run)


def test_training_goes_on_where_nothing_can_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = tmp_path / "out"

    def spoil(_: L.Trainer) -> None:
        shutil.rmtree(directory)
        directory.write_text("a file")

    with caplog.at_level(logging.WARNING, "lightning_d9d"):
        module = fit(Act(1, spoil), StepProfile(directory, first_step=2, every_n_steps=2))
    assert len(module.losses) == 4
    (message,) = [text for text in caplog.messages if "StepProfile" in text]
    assert message.startswith("StepProfile failed: NotADirectoryError")
    assert "out/step_2" in message
    assert message.endswith("Training goes on, and further failures are not said")


def test_another_profiler_of_the_process_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with profile() as other, caplog.at_level(logging.WARNING, "lightning_d9d"):
        module = fit(StepProfile(tmp_path, first_step=2))
    assert len(module.losses) == 4
    assert "another profiler runs in this process" in caplog.text
    assert not list(tmp_path.iterdir())
    assert any(event.name == "0F0" for event in other.events() or ())


def test_a_fit_that_ends_early(tmp_path: Path) -> None:
    def stop(run: L.Trainer) -> None:
        run.should_stop = True

    callback = StepProfile(tmp_path / "stopped", first_step=2, last_step=4)
    fit(callback, Act(2, stop))
    assert callback.profiled is not None
    assert callback.profiled.num_steps == 1
    assert "step 2, batch 1" in ranges(tmp_path / "stopped/step_2/rank_0.trace.json.gz")

    def fail(_: L.Trainer) -> None:
        raise ValueError("from a hook")

    with pytest.raises(ValueError, match="from a hook"):
        fit(StepProfile(tmp_path / "failed", first_step=2, last_step=4), Act(3, fail))
    assert not list((tmp_path / "failed").iterdir())
    assert not torch.autograd._profiler_enabled()


def test_beside_the_checkpoints(tmp_path: Path) -> None:
    saved = ModelCheckpoint(tmp_path / "run/checkpoints", save_last=True)
    fit(StepProfile(first_step=2), saved, enable_checkpointing=True)
    assert (tmp_path / "run/profile/step_2/rank_0.md").exists()
    with pytest.warns(UserWarning, match="profiles nothing: this run goes on behind step 4, and last_step=2 is done"):
        fit(StepProfile(tmp_path, first_step=2), ckpt_path=Path(saved.last_model_path), max_epochs=2)
    fit(StepProfile(first_step=2), default_root_dir=tmp_path / "plain")
    assert (tmp_path / "plain/profile/step_2/rank_0.md").exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"first_step": 1}, "first_step=1.*at least 2"),
        ({"first_step": 5, "last_step": 4}, "last_step=4.*before first_step=5"),
        ({"first_step": 5, "last_step": 6, "every_n_steps": 2}, "every_n_steps=2.*more than the 2"),
        ({"directory": "s3://bucket/run"}, "cannot write to s3://bucket/run: set its directory"),
        ({"ranks": []}, "ranks=.*must be ranks"),
        ({"memory": "sometimes"}, "memory='sometimes'.*'steps', 'always' or 'never'"),
    ],
)
def test_values_that_are_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        StepProfile(**arguments)


def test_runs_that_are_refused(tmp_path: Path) -> None:
    def refused(text: str, *others: L.Callback, options: Any = None, **arguments: Any) -> None:
        arguments = {"directory": tmp_path / "out", "first_step": 2, **arguments}
        with pytest.raises(ConfigError, match=text):
            fit(StepProfile(**arguments), *others, **(options or {}))

    (tmp_path / "file").touch()
    refused(r"StepProfile\(directory=.*cannot be written", directory=tmp_path / "file/out")
    refused("the run has the ranks 0 to 0; leave out 1, 3", ranks=[0, 1, 3])
    refused("first_step=2, last_step=5.*the run ends with step 4", last_step=5)
    refused("last_step=5.*the run ends with step 3", last_step=5, options={"max_steps": 3})
    lightnings = PyTorchProfiler(dirpath=tmp_path)
    refused("cannot be used with PyTorchProfiler: only one", options={"profiler": lightnings})
    lightnings.profiler = None  # its __del__ looks into one that has never begun
    refused("cannot be used with StepProfile: only one", StepProfile(tmp_path, first_step=3))
    refused("cannot be used with PipelineTimeline: only one", PipelineTimeline(tmp_path))
    refused("memory='always'.*needs a GPU", memory="always")
    with pytest.raises(ConfigError, match="needs D9DStrategy, but the Trainer has SingleDeviceStrategy"):
        trainer("auto", callbacks=[StepProfile(tmp_path)]).fit(Pipelined())


class Greedy(Pipelined):
    """Wants more memory than there is in its third step."""

    def microbatch_inputs(self, microbatch: Any) -> Any:
        if self.trainer.global_step == 2:
            torch.empty(2**50, dtype=torch.uint8, device=self.device)
        return super().microbatch_inputs(microbatch)


@pytest.mark.gpu
@pytest.mark.parametrize("memory", ["steps", "always"])
def test_on_a_gpu(tmp_path: Path, memory: Any) -> None:
    callback = StepProfile(tmp_path, first_step=2, memory=memory)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        fit(callback, module=Greedy(), device="cuda")
    snapshot = tmp_path / "out_of_memory_rank_0.pickle"
    assert snapshot.stat().st_size > 0
    assert any(str(snapshot) in note for note in caught.value.__notes__)
    names = {"rank_0.trace.json.gz", "rank_0.md", "rank_0.json", "rank_0.memory.pickle"}
    assert {path.name for path in (tmp_path / "step_2").iterdir()} == names
    profiled = callback.profiled
    assert profiled is not None
    assert profiled.device is not None
    assert profiled.parts[PRODUCTS] > 0
    assert 0 < profiled.device.busy < 1e6 * profiled.seconds
    kernels = sum(seconds for name, seconds in profiled.parts.items() if name != GAPS)
    assert kernels == pytest.approx(1e-6 * sum(profiled.device.streams.values()), rel=1e-3)
