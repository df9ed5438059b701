"""Updates inside the backward against the ordinary step: time and peak memory of training through `Trainer.fit`.

All train equal networks in bfloat16 with `StochasticAdamW`, on equal batches, without clipping. One updates parameters
on the stream of the backward, which shows what the stream of updates saves. When the rounds are over, some steps of
each are profiled: `step_profile`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.optim import Optimizer

from lightning_d9d import D9DStrategy
from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoePretraining
from lightning_d9d.optim import StochasticAdamW
from lightning_d9d.parallel import ParallelConfig
from lightning_d9d.parallel.recompute import recompute_activations
from lightning_d9d.strategy.step_in_backward import StepInBackward
from tests.benchmarks import __main__ as main
from tests.benchmarks import step_profile
from tests.benchmarks.frame import Case
from tests.benchmarks.strategy_overhead import PausedFit, Work

BEHIND, INSIDE, ON_ONE_STREAM = "ordinary step", "step_in_backward", "step_in_backward, one stream"
MOST = 1.0
WORK = {
    "bfloat16 states": (torch.bfloat16, "none"),
    "8-bit states": (torch.uint8, "none"),
    "bfloat16 states, blocks recomputed": (torch.bfloat16, "full"),
}
"""Dtype of the states, and what is recomputed. With all activations of a batch there, the peak is at the loss."""


def cases(device_type: str, quick: bool, layers: int | None = None) -> list[Case]:
    """One for each kind of work: layers of `30b-a3b` on a GPU, else the tiny model. Quick ones have two layers."""
    if device_type == "cuda" and not quick:
        config = replace(Qwen3MoeConfig.preset("30b-a3b"), num_hidden_layers=layers or 8)
        work = Work(config=config, precision="bf16-true", batch_size=4, sequence_length=4096)
    else:
        tiny = Qwen3MoeConfig.preset("tiny")
        config = replace(tiny, num_hidden_layers=layers or (2 if quick else tiny.num_hidden_layers))
        work = Work(config=config, precision="bf16-true", batch_size=2, sequence_length=32)
    return [
        Case(
            name=name,
            contenders={
                BEHIND: partial(fit, work, dtype, recompute, False),
                INSIDE: partial(fit, work, dtype, recompute, True),
                ON_ONE_STREAM: partial(OnOneStream, work, dtype, recompute),
            },
            peer=BEHIND,
            limits={} if quick else {INSIDE: MOST},
            warmup_steps=4,
            block_steps=1 if quick else 8,
            repeats=2 if quick else 10,
            afterwards=step_profile.profiles,
            conditions=work.conditions() | {"states": str(dtype), "recompute": recompute},
        )
        for name, (dtype, recompute) in WORK.items()
    ]


class _Module(Qwen3MoePretraining):
    def __init__(self, config: Qwen3MoeConfig, state_dtype: torch.dtype) -> None:
        super().__init__(config)
        self._state_dtype = state_dtype

    def configure_optimizers(self) -> Optimizer:
        return StochasticAdamW(self.parameters(), lr=1e-5, state_dtype=self._state_dtype)


def fit(work: Work, state_dtype: torch.dtype, recompute: str, inside: bool, device: torch.device) -> PausedFit:
    """One fit, which stands still between blocks."""
    module: Any = _Module(work.config, state_dtype)
    network = work.network(device)
    recompute_activations(network, ParallelConfig(recompute=recompute), network.model.layers.values())
    module.stages.append(network)
    return PausedFit(module, D9DStrategy(step_in_backward=inside), work, device, 1, max_norm=None)


class OnOneStream:
    """A fit that updates parameters inside the backward, on its stream."""

    def __init__(self, work: Work, state_dtype: torch.dtype, recompute: str, device: torch.device) -> None:
        self._fit = fit(work, state_dtype, recompute, True, device)

    def run(self, steps: int) -> None:
        with patch.object(StepInBackward, "_stream_of_updates", lambda _, stream: stream):
            self._fit.run(steps)

    def loss(self) -> float:
        return self._fit.loss()

    def close(self) -> None:
        self._fit.close()


def table(result: dict[str, Any], device_type: str) -> str:
    """Ratios, and the profiles of all."""
    profiles = {name: values["profile"] for name, values in result["contenders"].items()}
    return f"{main.table(result, device_type)}\n{step_profile.table(profiles)}"


def write(result: Mapping[str, Any], directory: Path, device_type: str) -> None:
    """The table as a file."""
    name = result["case"].replace(" ", "-")
    (directory / f"step_in_backward-{name}.md").write_text(table(dict(result), device_type) + "\n")
