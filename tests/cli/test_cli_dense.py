"""The command line with a directory of dense Qwen3 that transformers saved, and what a dense model has no use for."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from lightning_d9d.cli import main
from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM, save_huggingface
from tests.harness.compare import assert_bitwise_equal

TEXT = "to be or not to be, that is the question. " * 12
RUN = """\
model:
  class_path: Qwen3MoePretraining
  init_args: {preset: published, pretrained: published, learning_rate: 0.01, warmup_steps: 0}
data:
  class_path: ByteTextDataModule
  init_args: {directory: texts, pattern: '*.txt', sequence_length: 16, batch_size: 2, validation_fraction: 0.2}
trainer:
  strategy: {class_path: D9DStrategy}
  accelerator: cpu
  devices: 1
  max_steps: 3
  logger: false
  enable_progress_bar: false
  limit_val_batches: 0
  callbacks:
  - class_path: HuggingFaceExport
    init_args: {directory: trained}
  - class_path: ModelCheckpoint
    init_args: {dirpath: saved, save_last: true, every_n_train_steps: 3}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with texts, a configuration of a run, and a dense model as transformers saves it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text(TEXT)
    (tmp_path / "run.yaml").write_text(RUN)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, tie_word_embeddings=True, initializer_range=0.2,
    )  # fmt: skip
    Qwen3ForCausalLM._from_config(config).save_pretrained(tmp_path / "published")
    return tmp_path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-d9d", *arguments])
    main()


def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as end:
        run(monkeypatch, *arguments)
    assert end.value.code == 2
    return capsys.readouterr().err


def reference(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory).eval()


def test_generate_and_evaluate_as_transformers_do(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = reference(folder / "published")
    tokens = torch.tensor([list(TEXT.encode())])
    with torch.no_grad():
        perplexity = float(theirs(tokens, labels=tokens).loss.exp())
    run(monkeypatch, "evaluate", "published", "texts/a.txt", "--context-length", "1024", "--device", "cpu")
    found = re.match(r"perplexity ([\d.]+) ", capsys.readouterr().out)
    assert found is not None
    assert float(found[1]) == pytest.approx(perplexity, rel=1e-4)

    prompt = torch.tensor([list(b"to be")])
    written = theirs.generate(prompt, max_new_tokens=8, do_sample=False)[0].tolist()
    run(monkeypatch, "generate", "published", "--prompt", "to be", "--max-new-tokens", "8", "--device", "cpu")
    assert capsys.readouterr().out == bytes(written).decode(errors="replace") + "\n"


def test_fit_begins_with_it_and_exports_what_transformers_loads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, "fit", "--config", "run.yaml")
    before, after = (reference(folder / name) for name in ("published", "trained"))
    assert type(after) is Qwen3ForCausalLM
    tokens = torch.tensor([list(TEXT.encode())])
    with torch.no_grad():
        losses = [float(model(tokens, labels=tokens).loss) for model in (before, after)]
    assert losses[1] < losses[0]
    run(monkeypatch, "convert", "saved/last.ckpt", "converted")
    assert (folder / "converted" / "model.safetensors").read_bytes() == (
        folder / "trained" / "model.safetensors"
    ).read_bytes()
    # in bfloat16 and back: dtypes and names of the files change, not the model
    run(monkeypatch, "convert", "trained", "half", "--dtype", "bfloat16", "--max-shard-size", "20KB")
    described = json.loads((folder / "half" / "config.json").read_text())
    assert (described["model_type"], described["architectures"]) == ("qwen3", ["Qwen3ForCausalLM"])
    assert len(list((folder / "half").glob("*.safetensors"))) > 1
    weights = dict(reference(folder / "half").named_parameters())
    for name, parameter in after.named_parameters():
        assert_bitwise_equal(name, weights[name], parameter.bfloat16())


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "warmup_steps: 0",
            "warmup_steps: 0, balance: {z_loss: 0.1}",
            r"balance=.* has no effect: no layer .* is a mixture of experts \(num_experts=0\); leave balance out",
        ),
        (
            "directory: trained",
            "directory: trained, fused_experts: true",
            r"HuggingFaceExport\.fused_experts=True has no effect: .*leave fused_experts out",
        ),
        (
            "D9DStrategy}",
            "D9DStrategy, init_args: {parallel: {grouped_gemm: eager}}}",
            r"ParallelConfig\.grouped_gemm='eager' has no effect: .*leave grouped_gemm out",
        ),
    ],
    ids=["balance", "fused experts", "products of experts"],
)
def test_settings_of_experts_are_refused_in_a_run(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    old: str,
    new: str,
    message: str,
) -> None:
    assert RUN.count(old) == 1
    (folder / "run.yaml").write_text(RUN.replace(old, new))
    shown = refused(monkeypatch, capsys, "fit", "--config", "run.yaml")
    assert re.search(message, shown)
    assert "Traceback" not in shown


def test_convert_refuses_fused_experts_and_weights_of_a_mixture(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = refused(monkeypatch, capsys, "convert", "published", "fused", "--fused-experts")
    assert "--fused-experts has no effect: no layer of the config is a mixture of experts" in shown
    save_huggingface(Qwen3MoeForCausalLM(Qwen3MoeConfig.preset("tiny")), "mixture")
    for wrong, right, message in (
        ("mixture", "published", "the files have experts, the model none: set num_experts and model_type='qwen3_moe'"),
        ("published", "mixture", "the model has experts, the files none: set num_experts=0 and model_type='qwen3'"),
    ):
        shutil.copytree(wrong, "mixed", dirs_exist_ok=True)
        shutil.copy(folder / right / "config.json", "mixed")
        shown = refused(monkeypatch, capsys, "convert", "mixed", "new")
        assert re.search(rf"in the files: model\.layers\.0\.mlp\..*{message}, or replace mixed/config", shown)
        assert not (folder / "new").exists()
