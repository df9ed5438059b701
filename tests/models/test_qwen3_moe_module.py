"""Qwen3MoePretraining: its optimizer, its learning rate and what it logs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_d9d import ConfigError, D9DStrategy
from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoePretraining
from tests.strategy.plain import trainer

CONFIG = Qwen3MoeConfig(
    vocab_size=32,
    hidden_size=16,
    moe_intermediate_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    num_experts=4,
    num_experts_per_tok=2,
)


def rows(count: int) -> list[dict[str, Tensor]]:
    """Row i has i % 5 labels that do not count."""
    generator = torch.Generator().manual_seed(0)
    result = []
    for index in range(count):
        tokens = torch.randint(0, 32, (9,), generator=generator)
        labels = tokens[1:].clone()
        labels[: index % 5] = -100
        result.append({"input_ids": tokens[:-1], "labels": labels})
    return result


class Endless(IterableDataset):
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        yield from rows(8)


def test_learning_rate_warms_up_and_decays_and_vectors_do_not() -> None:
    class Watch(Qwen3MoePretraining):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            rates.append(optimizer.param_groups[0]["lr"])
            groups[:] = [{p.ndim for p in group["params"]} for group in optimizer.param_groups]
            decays[:] = [group["weight_decay"] for group in optimizer.param_groups]

    rates: list[float] = []
    groups: list[set[int]] = []
    decays: list[float] = []
    module = Watch(CONFIG, learning_rate=0.5, weight_decay=0.1, warmup_steps=2, final_learning_rate_fraction=0.2)
    trainer(D9DStrategy(), max_epochs=1).fit(module, DataLoader(rows(12), batch_size=2))
    cosine = [0.5 * (0.2 + 0.8 * (1 + math.cos(math.pi * step / 4)) / 2) for step in range(4)]
    assert rates == pytest.approx([0.25, 0.5, *cosine])
    assert decays == [0.1, 0.0]
    assert min(groups[0]) >= 2
    assert groups[1] == {1}


def test_tokens_outside_the_vocabulary_are_refused() -> None:
    data = [row | {"input_ids": row["input_ids"] + 1} for row in rows(8)]
    data[0]["input_ids"][0] = 32
    with pytest.raises(ConfigError, match="token id 32, but vocab_size=32: ids go from 0 to vocab_size - 1"):
        trainer(D9DStrategy(), max_epochs=1).fit(Qwen3MoePretraining(CONFIG), DataLoader(data, batch_size=8))  # type: ignore[arg-type]


def test_negative_warmup_is_refused() -> None:
    with pytest.raises(ConfigError, match="warmup_steps=-3; it must be at least 0"):
        Qwen3MoePretraining(CONFIG, warmup_steps=-3)


@pytest.mark.parametrize("max_epochs", [1, -1])
def test_training_of_unknown_length_is_refused(max_epochs: int) -> None:
    loader = DataLoader(Endless(), batch_size=2)
    with pytest.raises(ConfigError, match=r"number of steps, which is unknown.*max_steps"):
        trainer(D9DStrategy(), max_epochs=max_epochs).fit(Qwen3MoePretraining(CONFIG), loader)
    run = trainer(D9DStrategy(), max_epochs=max_epochs, max_steps=2)
    run.fit(Qwen3MoePretraining(CONFIG), loader)
    assert run.global_step == 2


@pytest.mark.parametrize("options", [{}, {"microbatch_size": 1}], ids=str)
def test_loss_and_perplexity_weigh_every_label_that_counts_the_same(options: dict[str, Any]) -> None:
    L.seed_everything(1, verbose=False)
    module = Qwen3MoePretraining(CONFIG)
    run = trainer(D9DStrategy(**options), precision="64-true")
    (result,) = run.validate(module, DataLoader(rows(7), batch_size=3), verbose=False)
    batch = torch.utils.data.default_collate(rows(7))
    with torch.no_grad():
        logits = module.model(batch["input_ids"]).logits
    expected = float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()))
    assert result["val_loss"] == pytest.approx(expected, rel=1e-10)
    assert result["val_perplexity"] == pytest.approx(math.exp(expected), rel=1e-5)


def test_tokens_per_second_starts_anew_with_each_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time stands still inside a fit but for one second a batch; an hour passes between two fits."""
    now = 0.0

    class Ticking(Qwen3MoePretraining):
        def on_after_backward(self) -> None:
            nonlocal now
            now += 1.0

    monkeypatch.setattr("lightning_d9d.models.qwen3_moe.module.time.perf_counter", lambda: now)
    module = Ticking(CONFIG)
    for _ in range(2):
        run = trainer(D9DStrategy(), max_epochs=1)
        run.fit(module, DataLoader(rows(4), batch_size=2))
        assert run.callback_metrics["tokens_per_s"] == 16
        now += 3600


def test_a_sequence_without_labels_gives_logits() -> None:
    run = trainer(D9DStrategy())
    (logits,) = run.predict(Qwen3MoePretraining(CONFIG), DataLoader([{"input_ids": torch.arange(8)}]))  # type: ignore[misc]
    assert logits.shape == (1, 8, 32)


@pytest.mark.parametrize("mode", ["sharded", "consolidated"])
def test_a_checkpoint_has_what_load_from_checkpoint_needs(tmp_path, mode):
    from lightning_d9d import CheckpointConfig

    module = Qwen3MoePretraining(preset="tiny", learning_rate=0.125)
    run = L.Trainer(
        strategy=D9DStrategy(checkpoint=CheckpointConfig(mode=mode)),
        accelerator="cpu",
        max_steps=1,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
    )
    ids = torch.arange(32).reshape(2, 16)
    batches = DataLoader([{"input_ids": ids, "labels": ids}], batch_size=None)
    run.validate(module, batches, verbose=False)  # its metric was then made in inference mode
    run.fit(module, batches, batches)
    run.save_checkpoint(tmp_path / "step.ckpt")
    loaded = Qwen3MoePretraining.load_from_checkpoint(tmp_path / "step.ckpt")
    assert loaded.config == module.config
    assert loaded.learning_rate == 0.125
    assert all(torch.equal(weight, module.state_dict()[name]) for name, weight in loaded.state_dict().items())
    other = Qwen3MoePretraining.load_from_checkpoint(tmp_path / "step.ckpt", learning_rate=0.5)
    assert (other.learning_rate, other.config) == (0.5, module.config)
    if mode == "consolidated":  # as of a module that kept no arguments
        file = torch.load(tmp_path / "step.ckpt", weights_only=True)
        del file["qwen3_moe_arguments"]
        torch.save(file, tmp_path / "stock.ckpt")
        stock = Qwen3MoePretraining.load_from_checkpoint(tmp_path / "stock.ckpt", preset="tiny")
        assert stock.config == module.config
    logits = run.predict(module, batches)  # labels in the batch do no harm
    assert logits[0].shape == (2, 16, module.config.vocab_size)
