"""How long training stands still for a checkpoint: asynchronous saves against synchronous ones.

A step is one `trainer.save_checkpoint` of a model that has been trained for a step, in the middle of `fit`; the same
path each time. Before each block what is still written in the background is waited for.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from lightning_d9d import CheckpointConfig, D9DStrategy
from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig
from tests.benchmarks.frame import Case
from tests.benchmarks.strategy_overhead import PausedFit
from tests.benchmarks.train_step import Work, module_of

SYNCHRONOUS, ASYNCHRONOUS = "synchronous", "asynchronous"
MOST_OF_SYNCHRONOUS = 0.05


def cases(device_type: str, quick: bool) -> list[Case]:
    """About 0.5 GB of float32 on a CPU, 1.8 GB of bfloat16 on a GPU; with `quick` a few MB."""
    tiny, large = Qwen3MoeConfig.preset("tiny"), Qwen3MoeConfig.preset("30b-a3b")
    if device_type == "cuda" and not quick:
        config = replace(large, num_hidden_layers=1, num_experts=32, vocab_size=32_000)
        work = Work(config=config, dtype=torch.bfloat16, num_rows=1, sequence_length=1024)
    else:
        config = tiny if quick else replace(tiny, hidden_size=512, moe_intermediate_size=512, num_hidden_layers=6)
        work = Work(config=config, dtype=torch.float32, num_rows=1, sequence_length=32)
    return [
        Case(
            name="one process",
            contenders={
                SYNCHRONOUS: partial(Saves, work, CheckpointConfig(mode="sharded")),
                ASYNCHRONOUS: partial(Saves, work, CheckpointConfig(mode="sharded", asynchronous=True)),
            },
            peer=SYNCHRONOUS,
            limits={} if quick else {ASYNCHRONOUS: MOST_OF_SYNCHRONOUS},
            warmup_steps=1,
            block_steps=1,
            repeats=2 if quick else 8,
            conditions=work.conditions(),
        )
    ]


class Saves(PausedFit):
    """Stands still in the second batch, and saves."""

    def __init__(self, work: Work, checkpoint: CheckpointConfig, device: torch.device) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="saving")
        self.path = Path(self._folder.name, "job.ckpt")
        super().__init__(module_of(work, device), D9DStrategy(checkpoint=checkpoint), work, device, 1)
        self._train(1)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self._trainer.save_checkpoint(self.path)

    def settle(self) -> None:
        self._trainer.strategy.finish_saves()  # type: ignore[attr-defined]

    def close(self) -> None:
        self.settle()
        super().close()
        self._folder.cleanup()
