"""Validation losses of optimizers after training on text, against AdamW of float32 weights.

All train the same models from the same initial weights, through a Trainer with `D9DStrategy`. They read the same
windows of the sources of Python's standard library. AdamW tries each learning rate with the first seed. All kinds then
train with each seed at its best one. Nothing clips gradients, as updates inside the backward allow no norm.

On a GPU products are in bfloat16 in all runs: by autocast where weights are float32. On a CPU weights are float32 in
all runs, which leaves the states to be compared.

Runs are independent, so several share the GPUs (`--jobs`). Each prints a row when it ends, and appends it to
`$OUT/optimizer_loss-CASE.jsonl`. What a time limit cuts off loses no others.
"""

from __future__ import annotations

import json
import logging
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import Queue, get_context
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lightning_d9d import D9DStrategy
from lightning_d9d.datamodules import ByteTextDataModule
from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoePretraining
from lightning_d9d.optim import MuonAdamW, StochasticAdamW
from lightning_d9d.sync.buckets import GradSyncConfig
from tests.benchmarks.options import check_choices

PEER, MUON = "AdamW, float32", "Muon, float32"
MOST = 1.005
"""Loss over the peer's of the same seed, in the mean: seeds have other text, and differ by more than ways do."""
NUM_VALIDATIONS, VALIDATION_BATCHES = 10, 16
PART_MB = 1.0
"""Gradients of an update inside the backward, so that the tiny model has several, too."""


class Kind(NamedTuple):
    """How weights are kept and updated."""

    optimizer: Callable[..., Optimizer]
    precision: str
    """The precision on a GPU."""
    in_backward: bool = False


KINDS: dict[str, Kind] = {
    PEER: Kind(AdamW, "bf16-mixed"),
    "8-bit states": Kind(partial(StochasticAdamW, state_dtype=torch.uint8), "bf16-true"),
    "in backward": Kind(partial(StochasticAdamW, state_dtype=torch.bfloat16), "bf16-true", True),
    "8-bit states, in backward": Kind(partial(StochasticAdamW, state_dtype=torch.uint8), "bf16-true", True),
    MUON: Kind(MuonAdamW, "bf16-mixed"),
}
OF_100M = replace(
    Qwen3MoeConfig.preset("tiny"),
    hidden_size=512,
    num_hidden_layers=12,
    num_attention_heads=8,
    head_dim=64,
    num_experts=16,
    moe_intermediate_size=384,
)
OF_1B = replace(Qwen3MoeConfig.preset("30b-a3b"), num_hidden_layers=10, num_experts=16, vocab_size=OF_100M.vocab_size)
"""A model of the full width."""
SMALL = replace(
    Qwen3MoeConfig.preset("tiny"),
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    num_experts=4,
    moe_intermediate_size=32,
)


@dataclass(frozen=True, kw_only=True)
class LossCase:
    """A model and how long it trains."""

    name: str
    config: Qwen3MoeConfig
    steps: int = 1000
    rows: int = 8
    length: int = 512
    rates: tuple[float, ...] = (5e-4, 1e-3, 2e-3)
    """Learning rates that the peer tries; a single one is taken without."""
    repeats: int = 3
    """Seeds."""
    kinds: tuple[str, ...] = tuple(KINDS)
    jobs: int = 1
    """Runs at a time, each in a process of its own."""
    num_processes: int = 1
    """The number of processes of a run."""


WIDE = LossCase(
    name="1B",
    config=OF_1B,
    steps=200,
    rates=(3e-4,),
    repeats=2,
    kinds=(PEER, "in backward", "8-bit states, in backward"),
)
"""The ways of the examples that train all of Qwen3-30B-A3B, on a model of its width."""


class Run(NamedTuple):
    """One training run of a case."""

    kind: str
    rate: float
    seed: int


def cases(
    device_type: str,
    quick: bool,
    *,
    methods: Sequence[str] | None = None,
    rates: Sequence[float] | None = None,
    steps: int | None = None,
    jobs: int | None = None,
) -> list[LossCase]:
    """The tiny model, and on a GPU two of 100 million and 1 billion parameters; with `quick` a smaller one."""
    if quick:
        found = [LossCase(name="small", config=SMALL, steps=2, rows=2, length=32, rates=(1e-3,), repeats=1)]
    else:
        found = [LossCase(name="tiny", config=Qwen3MoeConfig.preset("tiny"), rates=(1e-3, 3e-3, 6e-3))]
        of_100m = LossCase(name="100M", config=OF_100M, rows=32, rates=(1e-4, 2e-4, 5e-4))
        found += [of_100m, WIDE] if device_type == "cuda" else []
    check_choices("--methods", methods or (), KINDS)
    given = {"kinds": methods and tuple(methods), "rates": rates and tuple(rates), "steps": steps, "jobs": jobs}
    return [replace(case, **{name: value for name, value in given.items() if value is not None}) for case in found]


def run_case(case: LossCase, device_type: str) -> dict[str, Any]:
    """Train all, and return their losses, ready for JSON."""
    searches = [Run(PEER, rate, 0) for rate in case.rates] if len(case.rates) > 1 else []
    if case.jobs == 1:
        train = partial(map, partial(trained, case, device_type))
        rows = _rows(case, searches, train)
    else:
        context = get_context("spawn")
        gpus = context.Queue()
        names = _visible_gpus() or [""]
        for job in range(case.jobs):
            gpus.put(names[job % len(names)])
        with ProcessPoolExecutor(case.jobs, context, initializer=_take_gpu, initargs=(gpus,)) as pool:
            rows = _rows(case, searches, partial(pool.map, partial(trained, case, device_type)))
    found = {
        kind: {seed: rows[Run(kind, rate, seed)] for seed in range(case.repeats)}
        for kind in case.kinds
        for rate in [_best(case, rows)]
    }
    return {
        "case": case.name,
        "steps": case.steps,
        "rates": {run.rate: rows[run]["loss"] for run in searches},
        "best_rate": _best(case, rows),
        "losses": {kind: [row["loss"] for row in of_seeds.values()] for kind, of_seeds in found.items()},
        "curves": {kind: [row["curve"] for row in of_seeds.values()] for kind, of_seeds in found.items()},
    }


def _visible_gpus() -> list[str]:
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    return names.split(",") if names else [str(index) for index in range(torch.cuda.device_count())]


def _take_gpu(gpus: Queue[str]) -> None:
    """Let a process of the pool use one GPU of the queue alone."""
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus.get()


def _rows(
    case: LossCase, searches: Sequence[Run], train: Callable[[Iterable[Run]], Iterable[dict[str, Any]]]
) -> dict[Run, dict[str, Any]]:
    rows = dict(zip(searches, train(searches), strict=True))
    best = _best(case, rows)
    rest = [Run(kind, best, seed) for seed in range(case.repeats) for kind in case.kinds]
    rest = [run for run in rest if run not in rows]
    return rows | dict(zip(rest, train(rest), strict=True))


def _best(case: LossCase, rows: Mapping[Run, Mapping[str, Any]]) -> float:
    """The rate of the least finite loss."""
    if len(case.rates) == 1:
        return case.rates[0]
    losses = {rate: rows[Run(PEER, rate, 0)]["loss"] for rate in case.rates}
    return min(case.rates, key=lambda rate: losses[rate] if math.isfinite(losses[rate]) else math.inf)


class _Curve(L.Callback):
    """Keeps the validation losses."""

    def __init__(self) -> None:
        self.losses: list[tuple[int, float]] = []

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.losses.append((trainer.global_step, float(trainer.callback_metrics["val_loss"])))


def trained(case: LossCase, device_type: str, run: Run) -> dict[str, Any]:
    """Train once, print and write the row, and return it: the loss on held-out text along the way and at the end."""
    kind, on_gpu = KINDS[run.kind], device_type == "cuda"
    begin = time.perf_counter()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    L.seed_everything(run.seed, verbose=False)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    fused = {"fused": True} if kind.optimizer is AdamW else {}
    factor = partial(_factor, warmup=max(1, case.steps // 20), steps=case.steps)
    module = Qwen3MoePretraining(
        case.config,
        optimizer=partial(kind.optimizer, lr=run.rate, betas=(0.9, 0.95), weight_decay=0.1, **fused),
        lr_scheduler=partial(LambdaLR, lr_lambda=factor),
    )
    curve = _Curve()
    in_parts: dict[str, Any] = {"step_in_backward": True, "grad_sync": GradSyncConfig(bucket_mb=PART_MB)}
    trainer = L.Trainer(
        strategy=D9DStrategy(**(in_parts if kind.in_backward else {})),
        accelerator="gpu" if on_gpu else "cpu",
        devices=1,
        precision=kind.precision if on_gpu else "32-true",  # type: ignore[arg-type]
        max_steps=case.steps,
        val_check_interval=max(1, case.steps // NUM_VALIDATIONS),
        check_val_every_n_epoch=None,
        limit_val_batches=VALIDATION_BATCHES,
        num_sanity_val_steps=0,
        callbacks=[curve],
        log_every_n_steps=case.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, ByteTextDataModule(sequence_length=case.length, batch_size=case.rows, seed=run.seed))
    row = {
        **{"case": case.name, "steps": case.steps, **run._asdict()},
        "loss": curve.losses[-1][1],
        "seconds": round(time.perf_counter() - begin, 1),
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
        "curve": curve.losses,
    }
    print(*(f"{name} {value}" for name, value in row.items() if name != "curve"), sep=", ", flush=True)
    if directory := os.environ.get("OUT"):
        with (Path(directory) / f"optimizer_loss-{case.name}.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
    return row


def _factor(step: int, warmup: int, steps: int) -> float:
    return min(1.0, (step + 1) / warmup) * (0.1 + 0.45 * (1 + math.cos(math.pi * step / steps)))


def steps_to_peer(result: Mapping[str, Any], kind: str) -> int | None:
    """The step of the first validation at which the mean loss of a kind is the peer's last one; None: never."""
    peer = statistics.fmean(result["losses"][PEER])
    for values in zip(*result["curves"][kind], strict=True):
        if statistics.fmean(loss for _, loss in values) <= peer:
            return values[0][0]
    return None


def over_peer(result: Mapping[str, Any], kind: str) -> list[float]:
    """Each seed's loss over the peer's of that seed, less 1."""
    return [loss / peer - 1 for loss, peer in zip(result["losses"][kind], result["losses"][PEER], strict=True)]


def verdicts(result: Mapping[str, Any]) -> list[str]:
    """Return the verdict of each kind except the peer."""
    if PEER not in result["losses"]:
        return []
    found = []
    for kind in result["losses"]:
        if kind == MUON:
            reached = steps_to_peer(result, kind)
            found.append("met" if reached is not None and reached < result["steps"] else "missed")
        elif kind != PEER:
            found.append("met" if 1 + statistics.fmean(over_peer(result, kind)) <= MOST else "missed")
    return found


def table(result: Mapping[str, Any], device_type: str) -> str:
    """What a person reads, in Markdown."""
    rates = ", ".join(f"{rate:g}: {loss:.4f}" for rate, loss in result["rates"].items())
    heading = f"\noptimizer_loss, {result['case']}: {result['steps']} steps on {device_type}; {PEER} by rate: {rates}"
    columns = [
        f"lr {result['best_rate']:g}",
        "mean loss",
        f"over {PEER}, by seed",
        "their mean",
        "of each seed",
        "its loss at step",
    ]
    lines = [heading, "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for kind, losses in result["losses"].items():
        over, spread, reached = "", "", None
        if PEER in result["losses"] and kind != PEER:
            of_seed = over_peer(result, kind)
            deviation = f" +- {statistics.stdev(of_seed):.2%}" if len(of_seed) > 1 else ""
            over, spread = ", ".join(f"{each:+.2%}" for each in of_seed), f"{statistics.fmean(of_seed):+.2%}{deviation}"
        if PEER in result["losses"]:
            reached = steps_to_peer(result, kind)
        of_seeds = ", ".join(f"{loss:.4f}" for loss in losses)
        lines.append(f"| {kind} | {statistics.fmean(losses):.4f} | {over} | {spread} | {of_seeds} | {reached or ''} |")
    return "\n".join(lines)


def write(result: Mapping[str, Any], directory: Path, device_type: str) -> None:
    """The table as a file."""
    (directory / f"optimizer_loss-{result['case']}.md").write_text(table(result, device_type) + "\n")
