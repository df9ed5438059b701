"""The runs of `plan_runs.yaml` through `Trainer.fit`, each in processes of its own. A plan is held against them.

    python -m tests.benchmarks plan_runs                     # those of one GPU
    python -m tests.benchmarks plan_runs --gpus 2            # those of two
    python -m tests.benchmarks plan_runs --cases "sparse 32k"

Each run is a line of JSON, printed as soon as it is measured and appended to `$OUT/plan_runs_GPUS.jsonl`: the most that
a rank has allocated and reserved, the time of a step, the share of it in which ranks of a pipeline compute nothing, and
the bytes that a rank sends, by kind of collective. On a GPU it also has rank 0's kernels of one more step, and the
allocator's bytes by stream. A run that fails, or is not done in its time, says so in its line.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

LIST = Path(__file__).with_name("plan_runs.yaml")
ROOT = Path(__file__).parents[2]
_SECONDS = 100
"""The time limit of a run, from its start."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A line of the list."""

    name: str
    gpus: int = 1
    preset: str = "30b-a3b"
    layers: int | None = None
    """The number of layers; None for all of the preset's."""
    experts: int | None = None
    vocabulary: int | None = None
    rows: int = 4
    """The rows of a batch, of ranks with one share of the data."""
    tokens: int = 4096
    microbatches: int = 1
    mesh: Mapping[str, int] = field(default_factory=dict)
    schedule: str | None = None
    recompute: str = "none"
    optimizer: str = "adamw"
    precision: str = "bf16-true"
    sums: str | None = None
    in_backward: bool = False
    adapters: Mapping[str, Any] | None = None
    held_out: bool = False
    """True if no constant may be fitted to it."""

    @property
    def sizes(self) -> dict[str, int]:
        """Fields of the model's config that differ from the preset's."""
        given = {"num_hidden_layers": self.layers, "num_experts": self.experts, "vocab_size": self.vocabulary}
        return {name: value for name, value in given.items() if value is not None}


def listed() -> list[Run]:
    """Return all runs of the list, in its order."""
    return [Run(name=name, **values) for name, values in yaml.safe_load(LIST.read_text()).items()]


@dataclass(frozen=True)
class RunCase:
    """A run as the benchmarks' command takes it."""

    run: Run
    is_quick: bool

    @property
    def name(self) -> str:
        """What the list calls it."""
        return self.run.name

    @property
    def num_processes(self) -> int:
        """One a GPU."""
        return self.run.gpus


def cases(device_type: str, quick: bool, gpus: int = 1) -> list[RunCase]:
    """Return the cases that take so many GPUs. On a CPU, or quick, these are the first ones, with a tiny model."""
    runs = [run for run in listed() if run.gpus == gpus]
    if not runs:
        with_runs = " and ".join(map(str, sorted({run.gpus for run in listed()})))
        raise ValueError(f"--gpus {gpus}: plan_runs has runs on {with_runs} GPUs only")
    return [RunCase(run, quick or device_type == "cpu") for run in (runs[:1] if quick else runs)]


def run_case(case: RunCase, device_type: str) -> dict[str, Any]:
    """Measure one run in processes of its own, and append its line."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "measured.json"
        command = [sys.executable, "-m"]
        if case.run.gpus > 1:
            launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(case.run.gpus), "-m"]
            command += launcher
        command += ["tests.benchmarks.plan_runs_job", case.name, device_type, str(output)]
        command += ["--quick"] if case.is_quick else []
        failed = finish(command, Path(folder) / "log", _SECONDS)
        measured = {"failed": failed} if failed else json.loads(output.read_text())
    line = {"name": case.name, **measured}
    if directory := os.environ.get("OUT"):
        with (Path(directory) / f"plan_runs_{case.run.gpus}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
    return line


def finish(
    command: Sequence[str], log: Path, seconds: float, environment: Mapping[str, str] | None = None
) -> str | None:
    """Run a command to its end, with its children, for `seconds` at most. Return why it gave nothing, if so."""
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=file,
            stderr=file,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if code == 0:
        return None
    every = log.read_text().splitlines()
    lines = [line for line in every if "Error" in line and "ChildFailedError" not in line] or every[-1:]
    return f"not done in {seconds:g} s" if code is None else f"exit code {code}: {' / '.join(lines[-3:])[:600]}"


def table(result: Mapping[str, Any], device_type: str) -> str:
    """The line."""
    return json.dumps({name: value for name, value in result.items() if name not in ("benchmark", "load_average")})


def verdicts(result: Mapping[str, Any]) -> list[str]:
    """Nothing is judged here, but a run that gave nothing is missed."""
    return ["missed"] if "failed" in result else []
