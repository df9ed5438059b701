"""A step inside the backward with recomputed blocks, as in the 30B's example, has the gradients of transformers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader

from lightning_d9d import D9DStrategy, ParallelConfig
from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoePretraining
from tests.benchmarks.train_step import Work, transformers_of
from tests.harness.compare import assert_close_named, assert_tensors_close
from tests.harness.tolerances import TOLERANCES, Kind
from tests.strategy.plain import trainer

RATE = 1e4
"""So large that weights change by more than their rounding. The step of SGD is then the gradient."""
TINY, WIDE = Qwen3MoeConfig.preset("tiny"), Qwen3MoeConfig.preset("30b-a3b")


class Same(Qwen3MoePretraining):
    """Begins with the weights of a network, and keeps its only loss."""

    def __init__(self, network: nn.Module, config: Qwen3MoeConfig) -> None:
        super().__init__(config, optimizer=partial(SGD, lr=RATE))
        self.given = [network]  # in a list, so that it is no part of the module

    def load_pretrained(self) -> None:
        self.model.load_state_dict(self.given[0].state_dict())


def check(config: Qwen3MoeConfig, device: torch.device, recompute: str, length: int) -> None:
    config = replace(config, num_hidden_layers=2)
    work = Work(config=config, dtype=torch.float32, num_rows=2, sequence_length=length)
    batch = next(iter(work.batches(device)))
    reference = transformers_of(work, device, experts="eager")
    ids, labels = (batch[name].to(device) for name in ("input_ids", "labels"))
    expected = reference(ids, labels=labels, shift_labels=labels, use_cache=False).loss
    expected.backward()
    gradients: dict[str, Tensor | None] = {name: each.grad for name, each in reference.named_parameters()}
    del reference
    network = work.network(device)
    module = Same(network, work.config)
    strategy = D9DStrategy(step_in_backward=True, parallel=ParallelConfig(recompute=recompute))
    run = trainer(strategy, device=device.type, max_steps=1, limit_val_batches=0)
    run.fit(module, DataLoader([{k: v[i] for k, v in batch.items()} for i in range(2)], batch_size=2))
    loss = run.callback_metrics["train_loss"]
    assert_close_named("loss", loss, expected.detach().cpu(), tolerance=TOLERANCES[torch.float32][Kind.LOSS])
    before = dict(network.named_parameters())
    steps: dict[str, Tensor | None] = {
        name: (before[name].detach() - each.detach()) / RATE for name, each in module.model.named_parameters()
    }
    assert_tensors_close(steps, gradients)


@pytest.mark.parametrize("recompute", ["full", "offload"])
def test_a_tiny_model(recompute: str) -> None:
    check(TINY, torch.device("cpu"), recompute, length=32)


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", ["full", "offload"])
def test_two_layers_of_the_real_width(recompute: str) -> None:
    check(WIDE, torch.device("cuda"), recompute, length=512)
