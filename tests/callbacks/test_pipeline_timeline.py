"""A measured step of a pipeline: what ran, what is written, and that nothing else changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from torch.utils.data import DataLoader

from lightning_d9d import D9DStrategy, MeshConfig
from lightning_d9d.callbacks import PipelineTimeline
from lightning_d9d.errors import ConfigError
from lightning_d9d.schedule import Forward, MeasuredCosts, compute_parts
from tests.harness.compare import assert_bitwise_equal
from tests.harness.ranks import RankContext
from tests.strategy.pipelined import Pipelined, token_rows
from tests.strategy.plain import Plain, loader, trainer


def fit(rank: RankContext | None, *callbacks: L.Callback, num_batches: int = 4, **options: Any) -> Pipelined:
    L.seed_everything(7, verbose=False)
    module = Pipelined()
    num_ranks = 1 if rank is None else rank.world_size
    strategy = D9DStrategy(mesh=MeshConfig(pipeline_parallel=num_ranks), microbatch_size=1, **options)
    device = "cpu" if rank is None else rank.device.type
    run = trainer(strategy, num_ranks, device, precision="64-true", max_epochs=1, callbacks=list(callbacks))
    rows: Any = token_rows(4 * num_batches)
    run.fit(module, DataLoader(rows, batch_size=4))
    return module


@pytest.mark.ranks(2)
@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zero_bubble_v"])
def test_a_measured_step(rank: RankContext, schedule: str) -> None:
    plain = fit(rank, schedule=schedule)
    callback = PipelineTimeline(rank.tmp_dir / "out", step=2)
    module = fit(rank, callback, schedule=schedule)
    for ours, theirs in zip(module.losses, plain.losses, strict=True):
        assert_bitwise_equal("loss", ours, theirs)

    measured = callback.measured
    assert measured is not None
    program = measured.simulation.program
    assert program.num_microbatches == 4
    for number, actions in enumerate(program.ranks):
        ran = [span.action for span in measured.spans if span.rank == number]
        assert ran == [part for action in actions for part in compute_parts(action)]
    assert all(0 <= span.start < span.end for span in measured.spans)
    assert 0 < measured.bubble_ratio < 1
    assert measured.seconds > 0.999 * max(measured.simulation.compute_time)

    rank.barrier()
    out = rank.tmp_dir / "out"
    assert {path.name for path in out.iterdir()} == {
        "timeline.png", "timeline.svg", "timeline.html", "timeline.json", "costs.json",
    }  # fmt: skip
    values = json.loads((out / "timeline.json").read_text())
    assert values["step"] == 3
    assert values["bubble_ratio"] == measured.bubble_ratio
    assert len(values["spans"]) == len(measured.spans)
    costs = MeasuredCosts.read(out / "costs.json")
    assert [stage.layers for stage in costs.stages] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert (costs.sequence_length, costs.microbatch_size) == (5, 1)
    for stage, of_stage in enumerate(costs.stages):
        seconds = [s.end - s.start for s in measured.spans if s.action in {Forward(stage, m) for m in range(4)}]
        assert of_stage.forward_seconds == pytest.approx(sum(seconds) / 4)
        splits = schedule == "zero_bubble_v" and stage > 0
        assert (of_stage.backward_seconds is None) == splits
        assert (of_stage.backward_input_seconds is not None) == splits


def test_activations_of_one_rank(tmp_path: Path) -> None:
    callback = PipelineTimeline(tmp_path, step=1)
    fit(None, callback)
    (stage,) = MeasuredCosts.read(tmp_path / "costs.json").stages
    assert stage.layers == (0, 8)
    tokens, width, doubles = 5, 6, 8
    assert 8 * 5 * tokens * width * doubles < stage.activation_bytes < 8 * 30 * tokens * width * doubles
    assert callback.measured is not None
    assert callback.measured.bubble_ratio < 0.5


def test_a_fit_that_is_too_short_says_so(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="measured nothing: the fit ended before its step 4"):
        fit(None, PipelineTimeline(tmp_path, step=4))
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_measured_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"step=0.*at least 1"):
        PipelineTimeline(tmp_path, step=0)
    with pytest.raises(ConfigError, match="needs a D9DModule under D9DStrategy, but Plain trains under D9DStrategy"):
        trainer(D9DStrategy(), callbacks=[PipelineTimeline(tmp_path)]).fit(Plain(), loader(4))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"matplotlib.*lightning-d9d\[viz\]"):
        fit(None, PipelineTimeline(tmp_path))
