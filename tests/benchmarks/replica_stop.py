"""A replica that is stopped for a while: how late each replica is afterwards, with a mix and with all-reduce.

One process of the job gets SIGSTOP at the start of a step, and SIGCONT after a given time. Each replica notes when its
steps end. Steps compute by pausing, so that the processor is free. How late a step is: by the median time of a step
before, from the last step before the stop.

A step has a message of the step before to wait for, which had one computation's time to arrive. So at h edges from the
stopped replica a delay of D seconds is `max(0, D - h c)`, where c is a computation. With all-reduce it is D everywhere.
"""

from __future__ import annotations

import logging
import os
import signal
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import lightning as L

from lightning_d9d import D9DStrategy
from lightning_d9d.mixing.rounds import Rounds
from tests.benchmarks.replica_ranks import Paused, Times, run_ranks, trainer_of

PEER = "all_reduce"
WAYS = (PEER, "ring", "one_peer_exp")


@dataclass(frozen=True, kw_only=True)
class StopCase:
    """How many replicas there are, how long a step takes, and how long one of them is stopped."""

    name: str = "8 replicas"
    num_processes: int = 8
    stopped: int = 3
    stop_at: int = 5
    """The step in which it is stopped."""
    steps: int = 11
    computing_seconds: float = 1.5
    stopped_seconds: float = 2.5
    num_parameters: int = 80_000


def cases(device_type: str, quick: bool) -> list[StopCase]:
    """Eight replicas; with `quick` two."""
    if quick:
        return [StopCase(name="2 replicas", num_processes=2, stopped=1, steps=8, computing_seconds=0.1)]
    return [StopCase()]


class _Stops(L.Callback):
    """Stops this process once. The parent lets it go on."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.step:
            os.kill(os.getpid(), signal.SIGSTOP)


def timed(case: StopCase, rank: int) -> dict[str, list[float]]:
    """Be a rank: train each way, and return when steps ended."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    found = {}
    for name in WAYS:
        times = Times()
        callbacks = [times, *([_Stops(case.stop_at)] if rank == case.stopped else [])]
        options: dict[str, Any] = {"max_steps": case.steps, "log_every_n_steps": 0, "callbacks": callbacks}
        run = trainer_of(D9DStrategy(replicate_sync=name), case.num_processes, **options)
        run.fit(Paused(case.num_parameters, case.computing_seconds / 3, case.computing_seconds * 2 / 3))
        found[name] = times.ends
    return found


def continue_stopped(case: StopCase, processes: Sequence[BaseProcess]) -> None:
    """Wait for each stop of the process, and let it go on after the case's time."""
    process = processes[case.stopped]
    for _ in WAYS:
        while process.is_alive() and Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.005)
        time.sleep(case.stopped_seconds)
        if process.is_alive() and process.pid is not None:
            os.kill(process.pid, signal.SIGCONT)


def run_case(case: StopCase, device_type: str) -> dict[str, Any]:
    """Measure, and return how late steps were, ready for JSON."""
    of_ranks = run_ranks(
        partial(timed, case), case.num_processes, meanwhile=lambda processes: continue_stopped(case, processes)
    )
    late = {name: [lateness(case, found[name]) for found in of_ranks] for name in WAYS}
    return {
        "case": case.name,
        "stopped": case.stopped,
        "stop_at": case.stop_at,
        "stopped_seconds": case.stopped_seconds,
        "computing_seconds": case.computing_seconds,
        "late": late,
        "predicted": {name: predicted(case, name) for name in WAYS},
    }


def lateness(case: StopCase, ends: Sequence[float]) -> list[float]:
    """How late each step ended, in seconds."""
    last = case.stop_at - 1
    step = statistics.median(ends[index] - ends[index - 1] for index in range(2, case.stop_at))
    return [end - ends[last] - step * (index - last) for index, end in enumerate(ends)]


def predicted(case: StopCase, name: str) -> list[float]:
    """How late each replica is, some steps after the stop."""
    if name == PEER:
        return [case.stopped_seconds] * case.num_processes
    late = [0.0] * case.num_processes
    late[case.stopped] = case.stopped_seconds
    rounds = Rounds(name, case.num_processes)
    for number in range(case.stop_at, case.steps - 1):  # behind step k comes round k, which step k + 1 waits for
        before = list(late)
        for edge in rounds.edges[number % len(rounds)]:
            for replica in edge.replicas:
                most = max(before[each] for each in edge.replicas)
                late[replica] = max(before[replica], most - case.computing_seconds)
    return late


def largest(result: Mapping[str, Any], name: str) -> list[float]:
    """Return how late each replica was when all rounds had come once: the median of the last three steps."""
    return [statistics.median(steps[-3:]) for steps in result["late"][name]]


def verdicts(result: Mapping[str, Any]) -> list[str]:
    """Return the verdicts on the ring: replicas that are no neighbours must be late by less than a fifth of the
    stop."""
    size, limit = len(result["late"]["ring"]), result["stopped_seconds"] / 5
    far = [
        seconds
        for replica, seconds in enumerate(largest(result, "ring"))
        if (replica - result["stopped"]) % size not in (0, 1, size - 1)
    ]
    return ["met" if max(far, default=0.0) < limit else "missed"]


def table(result: Mapping[str, Any], device_type: str) -> str:
    """What a person reads, in Markdown."""
    size = len(result["late"][PEER])
    lines = [
        f"\nreplica_stop, {result['case']}: replica {result['stopped']} is stopped for {result['stopped_seconds']:g} s "
        f"and a step computes for {result['computing_seconds']:g} s. Seconds late, predicted in brackets",
        "",
        f"| way | {' | '.join(f'replica {replica}' for replica in range(size))} |",
        "|---" * (size + 1) + "|",
    ]
    for name in result["late"]:
        pairs = zip(largest(result, name), result["predicted"][name], strict=True)
        lines.append(f"| {name} | {' | '.join(f'{seconds:.2f} ({should:.2f})' for seconds, should in pairs)} |")
    return "\n".join(lines)


def write(result: Mapping[str, Any], directory: Path, device_type: str) -> None:
    """The table and the picture as files."""
    name = result["case"].replace(" ", "-")
    (directory / f"replica_stop-{name}.md").write_text(table(result, device_type) + "\n")
    _draw(result, directory / f"replica_stop-{name}.png")


def _draw(result: Mapping[str, Any], path: Path) -> None:
    from matplotlib import pyplot  # of the extra `viz`

    late = result["late"]
    figure, axes = pyplot.subplots(1, len(late), figsize=(10, 3), sharey=True, layout="constrained")
    for axis, (name, of_replicas) in zip(axes, late.items(), strict=True):
        image = axis.imshow(of_replicas, vmin=0, vmax=result["stopped_seconds"], cmap="magma_r", aspect="auto")
        axis.axvline(result["stop_at"] - 0.5, color="gray", linewidth=0.8)
        axis.set(title=name, xlabel="step")
    axes[0].set(ylabel="replica")
    figure.colorbar(image, ax=axes, label="seconds late")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
