"""`TextSample` writes with the tokenizer of the data, which is known before the training."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_d9d import ConfigError, D9DStrategy
from lightning_d9d.callbacks import TextSample
from lightning_d9d.datamodules import ChatDataModule, TokenDataModule
from lightning_d9d.errors import printable
from lightning_d9d.models.qwen3_moe import Qwen3MoePretraining
from tests.callbacks.test_callbacks import CONFIG
from tests.data.chats import make_tokenizer, write_chats
from tests.strategy.plain import trainer

LARGER = dataclasses.replace(CONFIG, vocab_size=512)
SAMPLE = {"prompt": "How are", "num_tokens": 12, "context_length": 8, "temperature": 0.0}


def fit(sample: TextSample, data: L.LightningDataModule | DataLoader, vocab_size: int = 512) -> Qwen3MoePretraining:
    module = Qwen3MoePretraining(dataclasses.replace(LARGER, vocab_size=vocab_size), warmup_steps=0)
    trainer(D9DStrategy(), 1, max_steps=1, limit_val_batches=0, callbacks=[sample]).fit(module, data)  # type: ignore[arg-type]
    return module


@pytest.mark.parametrize("saved", [False, True], ids=["object", "directory"])
def test_the_tokenizer_of_the_data_writes_the_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], saved: bool
) -> None:
    """A greedy walk over the trained model's logits, among the tokens that have a text, gives the same."""
    tokenizer = make_tokenizer("chatml")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    chats = write_chats(tmp_path / "chats.jsonl")
    given = str(tmp_path / "tokenizer") if saved else tokenizer
    data = ChatDataModule(str(chats), given, sequence_length=96, batch_size=2, cache_folder=str(tmp_path / "cache"))
    module = fit(TextSample(**SAMPLE), data)
    tokens = tokenizer.encode("How are")
    start = len(tokens)
    for _ in range(12):
        logits = module.model(torch.tensor([tokens[-8:]])).logits[0, -1, : len(tokenizer)]
        tokens.append(int(logits.argmax()))
    text = tokenizer.decode(tokens[start:])
    assert f"--- 12 generated tokens ---\nHow are{printable(text)}\n---" in capsys.readouterr().out
    assert TextSample(**SAMPLE, tokenizer=given).generate(module.model) == text


def rows(vocab_size: int) -> DataLoader:
    ids = torch.arange(18).reshape(2, 9) % vocab_size
    return DataLoader([{"input_ids": row[:-1], "labels": row[1:]} for row in ids], 2)  # type: ignore[arg-type]


def test_what_is_missing_is_said_before_the_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(
        ConfigError, match=r"no tokenizer .* vocab_size=512: no data module is given\. Give TextSample "
    ):
        fit(TextSample(), rows(512))
    (tmp_path / "tokens.bin").write_bytes(bytes(2 * 64))
    data = TokenDataModule(str(tmp_path / "tokens.bin"), sequence_length=4, batch_size=2, borders=False)
    with pytest.raises(ConfigError, match=r"vocab_size=512: TokenDataModule names none"):
        fit(TextSample(), data)
    with pytest.raises(ConfigError, match=r"TextSample\(prompt=''\) has no tokens; give at least one"):
        fit(TextSample(prompt="", tokenizer="bytes"), data)
    fit(TextSample(num_tokens=3, tokenizer="bytes"), data)
    assert "--- 3 generated tokens ---\nimport " in capsys.readouterr().out


def test_a_vocabulary_of_256_is_taken_for_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    fit(TextSample(num_tokens=3), rows(256), vocab_size=256)
    assert "--- 3 generated tokens ---\nimport " in capsys.readouterr().out
