"""Validation losses of decentralised replicas after training on text, beside all-reduce.

All begin with the same weights and read the same windows of the sources of Python's standard library, dealt out to as
many replicas. Each way tries the same learning rates, and the best of one is compared with the best of the other: Adam
divides by the noise of a gradient, of which a replica's own has more. Validation has the mean of all replicas. Replicas
are processes of this machine.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import lightning as L
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from lightning_d9d import D9DStrategy
from lightning_d9d.datamodules import ByteTextDataModule
from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoePretraining
from tests.benchmarks.optimizer_loss import SMALL, _factor
from tests.benchmarks.replica_ranks import run_ranks, trainer_of

PEER = "all_reduce"
OF_150K = replace(SMALL, hidden_size=64, moe_intermediate_size=64)
MOST = 1.02
"""The loss of the mean, over that of all-reduce."""


WAYS = (PEER, "one_peer_exp")
Curve = list[tuple[int, float]]
"""Steps, and losses there."""


@dataclass(frozen=True, kw_only=True)
class ReplicaLossCase:
    """So many replicas of a model, and how long they train."""

    name: str
    num_processes: int
    config: Qwen3MoeConfig = OF_150K
    steps: int = 500
    rows: int = 16
    """The rows of a replica in a step."""
    warmup: float = 0.4
    """The share of the steps in which the rate rises: with 0.05 decentralised replicas end several percent higher."""
    length: int = 128
    rates: tuple[float, ...] = (1.2e-2, 1.8e-2, 2.4e-2)
    num_validations: int = 5
    validation_batches: int = 16
    """The validation batches of a replica."""


def cases(
    device_type: str,
    quick: bool,
    *,
    steps: int | None = None,
    rows: int | None = None,
    rates: Sequence[float] | None = None,
) -> list[ReplicaLossCase]:
    """Four and eight replicas; with `quick` two, for two steps."""
    if quick:
        small: dict[str, Any] = dict(config=SMALL, steps=2, rows=2, length=32, num_validations=1)
        found = [ReplicaLossCase(name="2 replicas", num_processes=2, **small)]
    else:
        found = [ReplicaLossCase(name=f"{number} replicas", num_processes=number) for number in (4, 8)]
    given = {"steps": steps, "rows": rows, "rates": rates and tuple(rates)}
    return [replace(case, **{name: value for name, value in given.items() if value is not None}) for case in found]


class _Curve(L.Callback):
    def __init__(self) -> None:
        self.losses: Curve = []

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.losses.append((trainer.global_step, float(trainer.callback_metrics["val_loss"])))


def trained(case: ReplicaLossCase, rank: int) -> dict[str, dict[str, Curve]]:
    """Be a rank: train all ways at each rate, and return their curves."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    found: dict[str, dict[str, Curve]] = {name: {} for name in WAYS}
    for rate, name in product(case.rates, WAYS):
        begin = time.process_time()
        L.seed_everything(0, verbose=False)
        factor = partial(_factor, warmup=max(1, round(case.steps * case.warmup)), steps=case.steps)
        module = Qwen3MoePretraining(
            case.config,
            optimizer=partial(AdamW, lr=rate, betas=(0.9, 0.95), weight_decay=0.1),
            lr_scheduler=partial(LambdaLR, lr_lambda=factor),
        )
        curve = _Curve()
        trainer = trainer_of(
            D9DStrategy(replicate_sync=name),
            case.num_processes,
            max_steps=case.steps,
            val_check_interval=max(1, case.steps // case.num_validations),
            check_val_every_n_epoch=None,
            limit_val_batches=case.validation_batches,
            callbacks=[curve],
            log_every_n_steps=case.steps,
        )
        trainer.fit(module, ByteTextDataModule(sequence_length=case.length, batch_size=case.rows))
        found[name][f"{rate:g}"] = curve.losses
        if rank == 0:
            seconds = time.process_time() - begin
            print(f"{case.name}, {name}, rate {rate:g}: {curve.losses[-1]}, {seconds:.0f} s a rank", flush=True)
    return found


def run_case(case: ReplicaLossCase, device_type: str) -> dict[str, Any]:
    """Train all, and return their losses, ready for JSON."""
    curves = run_ranks(partial(trained, case), case.num_processes)[0]
    return {"case": case.name, "steps": case.steps, "curves": curves}


def best(result: Mapping[str, Any], name: str) -> float:
    """The last loss of a way at its best rate."""
    losses = [curve[-1][1] for curve in result["curves"][name].values()]
    return min((loss for loss in losses if math.isfinite(loss)), default=math.inf)


def over_peer(result: Mapping[str, Any], name: str) -> float:
    """The best loss of a way over that of all-reduce."""
    return best(result, name) / best(result, PEER)


def verdicts(result: Mapping[str, Any]) -> list[str]:
    """Return the verdict of each way except the peer."""
    return ["met" if over_peer(result, name) <= MOST else "missed" for name in result["curves"] if name != PEER]


def table(result: Mapping[str, Any], device_type: str) -> str:
    """What a person reads, in Markdown."""
    steps = [step for step, _ in next(iter(result["curves"][PEER].values()))]
    lines = [f"\nreplica_loss, {result['case']}: {result['steps']} steps", ""]
    lines.append(f"| way | rate | {' | '.join(f'loss at step {step}' for step in steps)} | best over all-reduce |")
    lines.append("|---" * (len(steps) + 3) + "|")
    for name, of_rates in result["curves"].items():
        for rate, curve in of_rates.items():
            is_shown = name != PEER and curve[-1][1] == best(result, name)
            over = f"{over_peer(result, name) - 1:+.2%}" if is_shown else ""
            lines.append(f"| {name} | {rate} | {' | '.join(f'{loss:.4f}' for _, loss in curve)} | {over} |")
    return "\n".join(lines)


def write(result: Mapping[str, Any], directory: Path, device_type: str) -> None:
    """The table as a file."""
    name = result["case"].replace(" ", "-")
    (directory / f"replica_loss-{name}.md").write_text(table(result, device_type) + "\n")
