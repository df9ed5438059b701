"""Even routing: different experts for each token, the same number for each expert on all ranks, in every forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lightning_d9d import D9DStrategy, ParallelConfig
from lightning_d9d.datamodules import ByteTextDataModule
from lightning_d9d.models.qwen3_moe import Qwen3MoePretraining
from lightning_d9d.modules.moe import TopKRouter
from tests.benchmarks.even_routing import EvenRouting, even_choices
from tests.strategy.plain import trainer

NUM_TOKENS, NUM_EXPERTS, TOP_K, NUM_RANKS = 4096, 16, 4, 4


def test_ranks_send_and_receive_as_many_tokens() -> None:
    choices = [even_choices(NUM_TOKENS, NUM_EXPERTS, TOP_K, rank, NUM_RANKS) for rank in range(NUM_RANKS)]
    for each in choices:
        assert each.sort().values.diff().min() > 0
        counts = each.flatten().bincount(minlength=NUM_EXPERTS)
        assert counts.float().std() < 0.05 * counts.float().mean()
    ranks = torch.arange(NUM_RANKS)
    traffic = torch.stack(
        [((each // (NUM_EXPERTS // NUM_RANKS))[..., None] == ranks).any(1).sum(0) for each in choices]
    )
    assert traffic.sum(0).unique().numel() == 1
    assert torch.equal(traffic[1], traffic[0].roll(1))


class Choices(L.Callback):
    """Notes what routers return."""

    def __init__(self) -> None:
        self.found: list[torch.Tensor] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for part in pl_module.modules():
            if isinstance(part, TopKRouter):
                part.register_forward_hook(lambda router, inputs, results: self.note(results))

    def note(self, results: tuple[Any, ...]) -> None:
        self.found.append(results[0])


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_all_forwards_of_a_fit_have_the_choices(
    recompute: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TopKRouter, "forward", TopKRouter.forward)
    choices, strategy = Choices(), D9DStrategy(parallel=ParallelConfig(recompute=recompute))
    callbacks = [EvenRouting(), choices]
    fit = trainer(strategy, max_steps=2, limit_val_batches=0, callbacks=callbacks, default_root_dir=tmp_path)
    module = Qwen3MoePretraining(preset="tiny")
    fit.fit(module, ByteTextDataModule(sequence_length=32, batch_size=4))
    config = module.config
    expected = even_choices(4 * 32, config.num_experts, config.num_experts_per_tok)
    assert len(choices.found) == 2 * 2 * config.num_hidden_layers
    assert all(torch.equal(each, expected) for each in choices.found)
