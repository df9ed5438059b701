"""The frame of every benchmark: contenders that do the same work take turns in the same processes.

A *block* is a few steps of one contender between two synchronizations of the device and of the ranks, so host overhead
counts. Blocks go round as A B C, C B A, A B C, ...: drift of the machine meets all alike. Each block of a contender is
divided by the peer's block of the same round; the result is the median of these ratios and an interval for it.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import multiprocessing

CONFIDENCE = 0.95
QUARTILES = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
MIN_STEP_SECONDS = 0.1
"""The least time of a step of cases that name no other. Shorter steps say little of the overhead of a large model."""
LOSS_TOLERANCE = 0.01
"""Relative; contenders whose losses after the warm-up differ by more do not do the same work."""


class Contender(Protocol):
    """Something that trains step by step. Built paused, before its first step. All methods are collective.

    It may have a method `settle`, for what has to be over before a block begins, and is not timed.
    """

    def run(self, steps: int) -> None: ...  # the device may be behind when it returns

    def loss(self) -> float: ...  # of the last step, on this rank

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Case:
    """One comparison. It is pickled into the processes that run it."""

    name: str
    contenders: Mapping[str, Callable[[torch.device], Contender]]
    peer: str
    """The contender that all others are divided by; the first."""
    limits: Mapping[str, float] = field(default_factory=dict)
    """Contender -> the largest ratio to the peer that meets the target."""
    pairs: Mapping[str, tuple[str, float | None]] = field(default_factory=dict)
    """Contender -> another one that it is divided by, too, and the largest such ratio that meets a target."""
    loss_tolerance: float = LOSS_TOLERANCE
    """How far a loss after the warm-up may be from the peer's, as a share of it."""
    afterwards: Callable[[Mapping[str, Contender], torch.device], Mapping[str, dict[str, Any]]] | None = None
    """Measures more when the rounds are over, by contender, for JSON. Collective; rank 0's is kept."""
    num_processes: int = 1
    warmup_steps: int = 4
    block_steps: int = 2
    repeats: int = 20
    min_step_seconds: float = MIN_STEP_SECONDS
    """A ratio is held against its limit only on steps that are at least this long."""
    conditions: Mapping[str, Any] = field(default_factory=dict)
    """What a reader must know to repeat it: sizes, dtype, settings."""


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """A median of ratios and a distribution-free interval that holds the true median with probability `confidence`."""

    median: float
    low: float
    high: float
    confidence: float

    def verdict(self, limit: float) -> str:
        """ "met" or "missed" where the whole interval is on one side of the limit, else "undecided"."""
        if self.confidence < CONFIDENCE:
            return "undecided"
        return "met" if self.high <= limit else "missed" if self.low > limit else "undecided"


def ratio_of_pairs(samples: Sequence[float], peer: Sequence[float]) -> Ratio:
    """The ratio round by round. The interval goes between two order statistics, of which as many are cut off on both
    sides as `CONFIDENCE` allows: the median of n values lies outside of the k-th from either end with probability
    2 * P(Binomial(n, 1/2) < k). Below six rounds even the extremes promise less than 95 %.
    """
    ratios = sorted(a / b for a, b in zip(samples, peer, strict=True))
    n, k = len(ratios), 1
    outside = 2.0 * 0.5**n
    while outside + 2 * math.comb(n, k) * 0.5**n <= 1 - CONFIDENCE:
        outside += 2 * math.comb(n, k) * 0.5**n
        k += 1
    return Ratio(median=statistics.median(ratios), low=ratios[k - 1], high=ratios[n - k], confidence=1 - outside)


def spread(samples: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile."""
    low, median, high = torch.tensor(samples, dtype=torch.float64).quantile(QUARTILES).tolist()
    return low, median, high


def run_case(case: Case, device_type: str) -> dict[str, Any]:
    """Runs a case in fresh processes and returns what it measured, ready for JSON.

    Raises:
        ProcessRaisedException: a process failed; the others are ended.
    """
    with tempfile.TemporaryDirectory() as directory:
        if device_type == "cpu":  # one thread each: less noise, and two processes on two cores do not fight
            os.environ["OMP_NUM_THREADS"] = "1"
        multiprocessing.spawn(rank_main, (case, device_type, directory), nprocs=case.num_processes)  # type: ignore[attr-defined]
        measured = json.loads((Path(directory) / "measured.json").read_text())
    return summarize(case, measured)


def summarize(case: Case, measured: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Adds medians, ratios and verdicts to the raw samples of `measure`."""
    peer = measured[case.peer]["seconds_per_step"]
    for name, values in measured.items():
        samples = values["seconds_per_step"]
        low, median, high = spread(samples)
        values |= {"median_seconds": median, "quartiles_seconds": [low, high]}
        if name == case.peer:
            continue
        values["ratio"] = _judged(samples, peer, case.limits.get(name), case.min_step_seconds)
    for name, (other, limit) in case.pairs.items():
        samples, theirs = (measured[each]["seconds_per_step"] for each in (name, other))
        measured[name]["pair"] = {"peer": other, **_judged(samples, theirs, limit, case.min_step_seconds)}
    plan = {name: getattr(case, name) for name in ("peer", "num_processes", "warmup_steps", "block_steps", "repeats")}
    return {"case": case.name, **plan, "conditions": dict(case.conditions), "contenders": measured}


def _judged(
    samples: Sequence[float], peer: Sequence[float], limit: float | None, min_step_seconds: float
) -> dict[str, Any]:
    ratio = ratio_of_pairs(samples, peer)
    if limit is None:
        return asdict(ratio)
    long_enough = statistics.median(peer) >= min_step_seconds
    return asdict(ratio) | {"limit": limit, "verdict": ratio.verdict(limit) if long_enough else "steps too short"}


def measure(case: Case, device: torch.device) -> dict[str, dict[str, Any]]:
    """Builds and warms up the contenders one after another, then times them in turn. Collective.

    Returns:
        For each contender the seconds a step of each of its blocks took (on the slowest rank), the loss after its
        warm-up, and on CUDA the peak memory of start and warm-up beyond what was allocated before it was built.

    Raises:
        RuntimeError: the loss of a contender is not the peer's.
    """
    contenders: dict[str, Contender] = {}
    measured: dict[str, dict[str, Any]] = {}
    on_cuda = device.type == "cuda"
    for name, build in case.contenders.items():
        if on_cuda:
            torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device) if on_cuda else 0
        contenders[name] = build(device)
        contenders[name].run(case.warmup_steps)
        synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - before if on_cuda else None
        loss = _over_ranks(contenders[name].loss(), device, dist.ReduceOp.SUM) / case.num_processes
        measured[name] = {"peak_memory_bytes": peak, "warmup_loss": loss, "seconds_per_step": []}
        peer_loss = measured[case.peer]["warmup_loss"]
        if not math.isclose(loss, peer_loss, rel_tol=case.loss_tolerance):
            raise RuntimeError(f"{case.name}: after the warm-up {name} has the loss {loss}, the peer {peer_loss}")
    for round_index in range(-1, case.repeats):  # the first round only settles the allocator
        for name in sorted(contenders, key=list(contenders).index, reverse=round_index % 2 == 1):
            seconds = _block(contenders[name], case.block_steps, device)
            if round_index >= 0:
                measured[name]["seconds_per_step"].append(seconds)
    if case.afterwards is not None:
        for name, values in case.afterwards(contenders, device).items():
            measured[name] |= values
    for contender in contenders.values():
        contender.close()
    return measured


def _block(contender: Contender, steps: int, device: torch.device) -> float:
    if settle := getattr(contender, "settle", None):
        settle()
    synchronize(device)
    start = time.perf_counter()
    contender.run(steps)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return _over_ranks((time.perf_counter() - start) / steps, device, dist.ReduceOp.MAX)


def synchronize(device: torch.device) -> None:
    """Returns when the device is through with all it was given, on every rank. Collective."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    _over_ranks(0.0, device, dist.ReduceOp.MAX)


def _over_ranks(value: float, device: torch.device, operation: dist.ReduceOp.RedOpType) -> float:
    tensor = torch.tensor(value, device=device, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(tensor, op=operation)
    return tensor.item()


def rank_main(rank: int, case: Case, device_type: str, directory: str) -> None:
    """Measure a case as one of its processes; rank 0 writes `measured.json` in the directory."""
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    if device_type == "cuda":
        torch.cuda.init()
        torch.cuda.set_device(device)
    if case.num_processes > 1:
        size = str(case.num_processes)
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        os.environ |= {"GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "bench"}  # for Lightning: ranks exist already
        dist.init_process_group(
            "nccl" if device_type == "cuda" else "gloo",
            init_method=f"file://{directory}/rendezvous",
            rank=rank,
            world_size=case.num_processes,
            device_id=device if device_type == "cuda" else None,
        )
    measured = measure(case, device)
    if rank == 0:
        (Path(directory) / "measured.json").write_text(json.dumps(measured))
    if dist.is_initialized():
        dist.destroy_process_group()
