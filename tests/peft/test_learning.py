"""Adapters learn: 100 steps on text that the base has not seen, and the merged export predicts as well."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F

from lightning_d9d import D9DStrategy
from lightning_d9d.datamodules import ByteTextDataModule
from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoePretraining, save_huggingface
from lightning_d9d.peft import LoRA, trainable_parameters
from tests.harness.compare import assert_close_named
from tests.harness.tolerances import Kind
from tests.strategy.plain import trainer

CONFIG = Qwen3MoeConfig(
    vocab_size=256,
    hidden_size=64,
    moe_intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    num_experts=4,
    num_experts_per_tok=2,
)
DOCS = Path(__file__).parents[2] / "docs"


def fitted(module: Qwen3MoePretraining, data: ByteTextDataModule, steps: int) -> Qwen3MoePretraining:
    L.seed_everything(0, verbose=False)
    trainer(D9DStrategy(), max_steps=steps, gradient_clip_val=1.0).fit(module, data)
    module.eval()
    return module


@torch.no_grad()
def loss_of(model: torch.nn.Module, data: ByteTextDataModule) -> torch.Tensor:
    """Return the mean loss of the held-out text."""
    losses = [
        F.cross_entropy(model(batch["input_ids"]).logits.flatten(0, 1), batch["labels"].flatten())
        for batch in data.val_dataloader()
    ]
    return torch.stack(losses).mean()


def test_adapters_learn_a_new_text(tmp_path: Path) -> None:
    from transformers import Qwen3MoeForCausalLM as Reference

    code = ByteTextDataModule(sequence_length=64, batch_size=8)
    prose = ByteTextDataModule(str(DOCS), "**/*.md", sequence_length=64, batch_size=8)
    for data in (code, prose):
        data.setup()
    base = fitted(Qwen3MoePretraining(CONFIG, learning_rate=5e-3, warmup_steps=12), code, 60)
    before = loss_of(base.model, prose)
    save_huggingface(base.model, tmp_path / "base")

    source = str(tmp_path / "base")
    module = Qwen3MoePretraining(
        preset=source, pretrained=source, peft=LoRA(rank=16), learning_rate=1e-2, warmup_steps=20
    )
    fitted(module, prose, 100)
    after = loss_of(module.model, prose)
    assert after < before - 0.2
    trained = sum(parameter.numel() for parameter in trainable_parameters(module).values())
    assert trained < CONFIG.num_parameters / 4

    save_huggingface(module.model, tmp_path / "merged")
    merged = loss_of(Reference.from_pretrained(tmp_path / "merged"), prose)
    assert_close_named("merged", merged, after, kind=Kind.LOSS)
