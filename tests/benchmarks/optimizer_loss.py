"""Validation losses of optimizers after training on text, against AdamW of float32 weights.

All train the same models from the same initial weights. They read the same windows of the sources of Python's standard
library. AdamW tries each learning rate with the first seed. All kinds then train with each seed at its best one.

On a GPU products are in bfloat16 in all runs: by autocast where weights are float32. On a CPU weights are float32 in
all runs, which leaves the states to be compared.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lightning_d9d.datamodules import ByteTextDataModule
from lightning_d9d.datamodules.text import ByteWindows
from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoePretraining
from lightning_d9d.optim import StochasticAdamW, parameter_groups

PEER = "AdamW, float32"
MOST = 1.005
"""Mean loss over the peer's."""
KINDS: dict[str, tuple[torch.dtype, Callable[..., Optimizer]]] = {
    PEER: (torch.float32, AdamW),
    "float32 states": (torch.bfloat16, StochasticAdamW),
    "bfloat16 states": (torch.bfloat16, partial(StochasticAdamW, state_dtype=torch.bfloat16)),
    "8-bit states": (torch.bfloat16, partial(StochasticAdamW, state_dtype=torch.uint8)),
}
"""Of each kind the dtype of weights on a GPU, and the optimizer."""
OF_100M = replace(
    Qwen3MoeConfig.preset("tiny"),
    hidden_size=512,
    num_hidden_layers=12,
    num_attention_heads=8,
    head_dim=64,
    num_experts=16,
    moe_intermediate_size=384,
)
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
    rows: int = 32
    length: int = 512
    rates: tuple[float, ...] = (5e-4, 1e-3, 2e-3)
    repeats: int = 3
    """Seeds."""
    kinds: tuple[str, ...] = tuple(KINDS)
    num_processes: int = 1


def cases(device_type: str, quick: bool) -> list[LossCase]:
    """The tiny model, and on a GPU one of 100 million parameters; with `quick` a smaller one for some steps."""
    if quick:
        return [LossCase(name="small", config=SMALL, steps=2, rows=2, length=32, rates=(1e-3,), repeats=1)]
    tiny = LossCase(name="tiny", config=Qwen3MoeConfig.preset("tiny"), rates=(1e-3, 3e-3, 6e-3))
    return [tiny, LossCase(name="100M", config=OF_100M)] if device_type == "cuda" else [tiny]


def run_case(case: LossCase, device_type: str) -> dict[str, Any]:
    """Train all, and return their losses, ready for JSON."""
    device = torch.device(device_type)
    text = ByteTextDataModule(sequence_length=case.length)
    text.setup()
    assert text.train_tokens is not None
    assert text.validation_tokens is not None
    both = text.train_tokens, text.validation_tokens
    of_rates = {rate: trained(case, PEER, rate, 0, both, device) for rate in case.rates}
    best = min(of_rates, key=of_rates.__getitem__)
    losses = {
        kind: [
            of_rates[best] if (kind, seed) == (PEER, 0) else trained(case, kind, best, seed, both, device)
            for seed in range(case.repeats)
        ]
        for kind in case.kinds
    }
    return {"case": case.name, "steps": case.steps, "rates": of_rates, "best_rate": best, "losses": losses}


def trained(
    case: LossCase, kind: str, rate: float, seed: int, text: tuple[Tensor, Tensor], device: torch.device
) -> float:
    """The loss on held-out text after all steps."""
    dtype, make = KINDS[kind]
    L.seed_everything(seed, verbose=False)
    module = Qwen3MoePretraining(case.config)
    module.configure_model()
    model = module.model
    model.to(device, dtype if device.type == "cuda" else torch.float32)
    optimizer = make(parameter_groups(model, 0.1), lr=rate, betas=(0.9, 0.95))
    warmup = max(1, case.steps // 20)
    factor = partial(_factor, warmup=warmup, steps=case.steps)
    schedule = LambdaLR(optimizer, factor)
    windows, held_out = (ByteWindows(part, case.length) for part in text)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(case.steps):
        loss, count = _loss(model, _batch(windows, case.rows, generator), device)
        (loss / count).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        sums = [_loss(model, _batch(held_out, case.rows, generator), device) for _ in range(32)]
    return sum(loss.item() for loss, _ in sums) / sum(count for _, count in sums)


def _factor(step: int, warmup: int, steps: int) -> float:
    return min(1.0, (step + 1) / warmup) * (0.1 + 0.45 * (1 + math.cos(math.pi * step / steps)))


def _batch(windows: ByteWindows, rows: int, generator: torch.Generator) -> dict[str, Tensor]:
    chosen = [windows[index] for index in torch.randint(len(windows), (rows,), generator=generator).tolist()]
    return {name: torch.stack([each[name] for each in chosen]) for name in ("input_ids", "labels")}


def _loss(model: nn.Module, batch: Mapping[str, Tensor], device: torch.device) -> tuple[Tensor, int]:
    """Sum over tokens, and their number."""
    on_gpu = device.type == "cuda"
    with torch.autocast("cuda", torch.bfloat16) if on_gpu else nullcontext():
        loss = model(**{name: value.to(device) for name, value in batch.items()}, reduction="sum").loss
    return loss, batch["labels"].numel()


def verdicts(result: Mapping[str, Any]) -> list[str]:
    """Of each kind but the peer."""
    peer = statistics.fmean(result["losses"][PEER])
    means = {kind: statistics.fmean(losses) for kind, losses in result["losses"].items() if kind != PEER}
    return ["met" if mean <= MOST * peer else "missed" for mean in means.values()]


def table(result: Mapping[str, Any], device_type: str) -> str:
    """What a person reads, in Markdown."""
    rates = ", ".join(f"{rate:g}: {loss:.4f}" for rate, loss in result["rates"].items())
    lines = [
        f"\noptimizer_loss, {result['case']}: {result['steps']} steps on {device_type}; {PEER} by rate: {rates}",
        "",
    ]
    lines += [f"| lr {result['best_rate']:g} | mean loss | over {PEER} | of each seed |", "|---|---|---|---|"]
    peer = statistics.fmean(result["losses"][PEER])
    for kind, losses in result["losses"].items():
        mean = statistics.fmean(losses)
        of_seeds = ", ".join(f"{loss:.4f}" for loss in losses)
        lines.append(f"| {kind} | {mean:.4f} | {mean / peer - 1:+.2%} | {of_seeds} |")
    return "\n".join(lines)


def write(result: Mapping[str, Any], directory: Path, device_type: str) -> None:
    """The table as a file."""
    (directory / f"optimizer_loss-{result['case']}.md").write_text(table(result, device_type) + "\n")
