"""Updates inside the backward against the ordinary step: time and peak memory of training through `Trainer.fit`.

Both train equal networks in bfloat16 with `StochasticAdamW`, on equal batches, without clipping.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_d9d import D9DStrategy
from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoePretraining
from lightning_d9d.optim import StochasticAdamW
from tests.benchmarks.frame import Case
from tests.benchmarks.strategy_overhead import PausedFit, Work

BEHIND, INSIDE = "ordinary step", "step_in_backward"
MOST = 1.0
STATES = {"bfloat16 states": torch.bfloat16, "8-bit states": torch.uint8}


def cases(device_type: str, quick: bool) -> list[Case]:
    """One for each kind of states: 8 layers of `30b-a3b` on a GPU, else the tiny model."""
    if device_type == "cuda" and not quick:
        config = replace(Qwen3MoeConfig.preset("30b-a3b"), num_hidden_layers=8)
        work = Work(config=config, precision="bf16-true", batch_size=4, sequence_length=4096)
    else:
        work = Work(config=Qwen3MoeConfig.preset("tiny"), precision="bf16-true", batch_size=2, sequence_length=32)
    return [
        Case(
            name=name,
            contenders={
                BEHIND: partial(fit, work, dtype, False),
                INSIDE: partial(fit, work, dtype, True),
            },
            peer=BEHIND,
            limits={} if quick else {INSIDE: MOST},
            warmup_steps=4,
            block_steps=1 if quick else 8,
            repeats=2 if quick else 10,
            conditions=work.conditions() | {"states": str(dtype)},
        )
        for name, dtype in STATES.items()
    ]


class _Module(Qwen3MoePretraining):
    def __init__(self, config: Qwen3MoeConfig, state_dtype: torch.dtype) -> None:
        super().__init__(config)
        self._state_dtype = state_dtype

    def configure_optimizers(self) -> Optimizer:
        return StochasticAdamW(self.parameters(), lr=1e-5, state_dtype=self._state_dtype)


def fit(work: Work, state_dtype: torch.dtype, inside: bool, device: torch.device) -> PausedFit:
    """One fit, which stands still between blocks."""
    module: Any = _Module(work.config, state_dtype)
    module.stages.append(work.network(device))
    return PausedFit(module, D9DStrategy(step_in_backward=inside), work, device, 1, max_norm=None)
