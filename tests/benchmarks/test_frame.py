"""The frame on contenders whose times are known, and that the contenders of `strategy_overhead` do the same work."""

from __future__ import annotations

import json
from functools import partial
from typing import ClassVar

import pytest
import torch

from tests.benchmarks import frame
from tests.benchmarks.__main__ import machine, main, table
from tests.benchmarks.frame import Case, Ratio, measure, ratio_of_pairs, spread, summarize
from tests.benchmarks.strategy_overhead import cases

CPU = torch.device("cpu")


class Clock:
    """A machine that becomes slower with every second of work."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def work(self, seconds: float) -> None:
        self.seconds += seconds * (1 + 0.01 * self.seconds)


class Timed:
    calls: ClassVar[list[tuple[str, int]]] = []
    closed: ClassVar[list[str]] = []

    def __init__(self, name: str, clock: Clock, step_seconds: float, final_loss: float, device: torch.device) -> None:
        self.name, self.clock, self.step_seconds, self.final_loss = name, clock, step_seconds, final_loss
        assert device == CPU

    def run(self, steps: int) -> None:
        self.calls.append((self.name, steps))
        self.clock.work(steps * self.step_seconds)

    def loss(self) -> float:
        return self.final_loss

    def close(self) -> None:
        self.closed.append(self.name)


@pytest.fixture
def make_case(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(frame.time, "perf_counter", lambda: clock.seconds)
    monkeypatch.setattr(Timed, "calls", [])
    monkeypatch.setattr(Timed, "closed", [])

    def make(seconds: dict[str, float], losses: dict[str, float] | None = None, **kwargs) -> Case:
        contenders = {
            name: partial(Timed, name, clock, s, (losses or {}).get(name, 1.0)) for name, s in seconds.items()
        }
        return Case(name="case", contenders=contenders, peer=next(iter(seconds)), **kwargs)

    return make


def test_contenders_take_turns_and_are_closed(make_case):
    measure(make_case({"a": 1.0, "b": 1.0}, warmup_steps=3, block_steps=2, repeats=3), CPU)
    assert Timed.calls[:2] == [("a", 3), ("b", 3)]
    assert [name for name, _ in Timed.calls[2:]] == [*"ba", *"ab", *"ba", *"ab"]
    assert {steps for _, steps in Timed.calls[2:]} == {2}
    assert Timed.closed == ["a", "b"]


def test_drift_of_the_machine_cancels(make_case):
    measured = measure(make_case({"a": 0.20, "b": 0.22}, repeats=40), CPU)
    a, b = (measured[name]["seconds_per_step"] for name in "ab")
    assert a[-1] > 1.3 * a[0]  # it did drift
    assert ratio_of_pairs(b, a).median == pytest.approx(1.1, abs=0.002)


@pytest.mark.parametrize(
    ("n", "cut", "confidence"), [(2, 0, 0.5), (6, 0, 0.96875), (10, 1, 0.978515625), (20, 5, 0.958611)]
)
def test_interval_holds_the_median_with_the_stated_confidence(n, cut, confidence):
    ratio = ratio_of_pairs([float(i) for i in range(n, 0, -1)], [1.0] * n)
    assert (ratio.low, ratio.high) == (1.0 + cut, n - cut)
    assert ratio.median == (n + 1) / 2
    assert ratio.confidence == pytest.approx(confidence, abs=1e-6)


def test_interval_covers_as_often_as_it_says():
    samples = torch.rand(4000, 11, generator=torch.Generator().manual_seed(0)).tolist()
    ratios = [ratio_of_pairs(row, [1.0] * 11) for row in samples]
    covered = sum(ratio.low <= 0.5 <= ratio.high for ratio in ratios) / len(ratios)
    assert covered == pytest.approx(ratios[0].confidence, abs=0.01)


def test_spread_is_the_quartiles():
    assert spread([5.0, 1.0, 3.0, 2.0, 4.0]) == (2.0, 3.0, 4.0)
    assert spread([7.0]) == (7.0, 7.0, 7.0)


@pytest.mark.parametrize(
    ("low", "high", "confidence", "verdict"),
    [
        (0.9, 1.05, 0.96, "met"),
        (1.06, 1.2, 0.96, "missed"),
        (0.9, 1.2, 0.96, "undecided"),
        (0.9, 1.0, 0.90, "undecided"),
    ],
)
def test_verdict_needs_the_whole_interval_and_enough_rounds(low, high, confidence, verdict):
    assert Ratio(median=1.0, low=low, high=high, confidence=confidence).verdict(1.05) == verdict


@pytest.mark.parametrize(
    ("step_seconds", "verdict"), [((0.2, 0.202), "met"), ((0.2, 0.23), "missed"), ((0.05, 0.06), "steps too short")]
)
def test_report_states_ratio_and_verdict(make_case, step_seconds, verdict):
    case = make_case(dict(zip("ab", step_seconds, strict=True)), limits={"b": 1.05}, conditions={"batch": 8})
    result = json.loads(json.dumps({"benchmark": "name", **summarize(case, measure(case, CPU))}))
    assert result["contenders"]["b"]["ratio"]["verdict"] == verdict
    assert len(result["contenders"]["a"]["seconds_per_step"]) == case.repeats
    lines = table(result, "cpu").splitlines()
    assert "batch 8" in lines[2]
    assert lines[-1].endswith(verdict)
    assert "ms/step" not in table(result, "cpu")
    result["contenders"]["a"]["peak_memory_bytes"] = result["contenders"]["b"]["peak_memory_bytes"] = 2**30
    assert "ms/step" in table(result, "cuda")


def test_contenders_that_do_other_work_are_refused(make_case):
    with pytest.raises(RuntimeError, match=r"b has the loss 1\.02, the peer 1\.0"):
        measure(make_case({"a": 1.0, "b": 1.0}, losses={"b": 1.02}), CPU)


def test_machine_is_described():
    described = json.loads(json.dumps(machine("cpu")))
    assert described["torch"] == torch.__version__
    assert described["cpu"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("nosuch", "benchmark 'nosuch' is unknown; choose from 'strategy_overhead', "),
        ("whole_model --nosuch 1", "unrecognized arguments: --nosuch 1"),
        ("whole_model --gpus 3", "argument --gpus: invalid choice: "),
        ("whole_model --rows 0", "argument --rows: '0' is not a whole number of at least 1"),
        ("pipeline --microbatches 8 x", "argument --microbatches: 'x' is not a whole number of at least 1"),
        ("mesh_build --repeats 0", "argument --repeats: '0' is not a whole number of at least 1"),
        ("ops --sizes 1 nan", "argument --sizes: 'nan' is not a number above 0"),
        ("data --file_gib x", "argument --file_gib: 'x' is not a number above 0"),
        (
            "mesh_build --output nosuch/a.json",
            "argument --output: 'nosuch/a.json' is not a file in a folder that exists",
        ),
        ("whole_model --folder /dev/null", "argument --folder: '/dev/null' is a file, not a folder"),
        ("whole_model --cases 4 nosuch", "--cases 'nosuch' is in no name of a case; choose from '4 layers on 1 GPU'"),
        ("whole_model --repeats 3", "--repeats 3 does nothing: whole_model has no rounds"),
        ("mesh_build --layers 3", "--layers 3 does nothing: mesh_build has no options of its own"),
        ("ops mesh_build --rows 3", "--rows 3 does nothing: ops mesh_build takes --ops, --sizes"),
        ("plan_runs --gpus 4", "plan_runs: --gpus 4: plan_runs has runs on 1 and 2 GPUs only"),
        (
            "whole_model --recompute nosuch",
            "whole_model: --recompute nosuch: ParallelConfig.recompute='nosuch' must be ",
        ),
        (
            "expert_peers --recompute nosuch",
            "expert_peers: --recompute nosuch: ParallelConfig.recompute='nosuch' must ",
        ),
        ("fine_tune --recompute none,nosuch", "fine_tune: --recompute nosuch: ParallelConfig.recompute='nosuch' must "),
        ("fine_tune --experts nosuch", "fine_tune: --experts 'nosuch' is unknown; choose from 'grouped_mm', "),
        ("fine_tune --contenders ours nosuch", "fine_tune: --contenders 'nosuch' begins no name; choose from 'ours, "),
        ("pipeline --schedules nosuch", "pipeline: --schedules nosuch: schedule='nosuch' is unknown; choose one of "),
        ("train_step --peers best", "train_step: --peers best does nothing on a CPU or with --quick, "),
        ("data --quick --memory free", "data: --memory free does nothing with --quick, "),
    ],
)
def test_mistakes_are_one_line(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*words.split(), "--device", "cpu"])
    printed = capsys.readouterr()
    assert ended.value.code == 2
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith(f"python -m tests.benchmarks: {message}")


def test_contenders_of_strategy_overhead_train_alike():
    """A fit must also stop after the steps that it was asked for: the loss of another batch would differ."""
    case = cases("cpu", quick=True)[0]
    losses = [values["warmup_loss"] for values in measure(case, CPU).values()]
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-6)
