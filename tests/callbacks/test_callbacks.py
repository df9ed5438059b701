"""The callbacks in a short real training."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_d9d import D9DStrategy
from lightning_d9d.callbacks import HuggingFaceExport, LossCurve, TextSample
from lightning_d9d.datamodules import ByteTextDataModule
from lightning_d9d.errors import ConfigError, StateError, printable
from lightning_d9d.models.qwen3_moe import (
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3MoePretraining,
    load_huggingface,
    save_huggingface,
)
from lightning_d9d.state import SafetensorsReader

CONFIG = Qwen3MoeConfig(
    vocab_size=256,
    hidden_size=16,
    moe_intermediate_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    num_experts=4,
    num_experts_per_tok=2,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.py").write_text("a = b + c\n" * 200)
    return folder


def fit(
    folder: Path,
    *callbacks: L.Callback,
    max_steps: int = 4,
    resume: Path | None = None,
    pretrained: str | None = None,
    **kwargs: Any,
) -> Any:
    trainer = L.Trainer(
        strategy=D9DStrategy(),
        accelerator="cpu",
        max_steps=max_steps,
        val_check_interval=2,
        limit_val_batches=1,
        log_every_n_steps=1,
        logger=False,
        enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        **kwargs,
    )
    module = Qwen3MoePretraining(CONFIG, learning_rate=1e-2, warmup_steps=1, pretrained=pretrained)
    data = ByteTextDataModule(str(folder), sequence_length=16, batch_size=2, validation_fraction=0.2)
    trainer.fit(module, data, ckpt_path=resume, weights_only=True)
    return module


def test_loss_curve_continues_after_resume(folder: Path, tmp_path: Path):
    checkpoint = ModelCheckpoint(tmp_path / "checkpoints", save_last=True, save_on_train_epoch_end=False)
    curve = LossCurve(tmp_path / "new" / "curve.png")
    fit(folder, curve, checkpoint)
    assert [step for step, _ in curve.training] == [1, 2, 3, 4]
    assert [step for step, _ in curve.validation] == [2, 4]  # not the sanity check
    assert (tmp_path / "new" / "curve.png").read_bytes().startswith(b"\x89PNG")
    resumed = LossCurve(tmp_path / "resumed.png")
    fit(folder, resumed, max_steps=6, resume=tmp_path / "checkpoints" / "last.ckpt")
    assert resumed.training[:4] == curve.training
    assert [step for step, _ in resumed.training] == [1, 2, 3, 4, 5, 6]
    assert [step for step, _ in resumed.validation][-1] == 6


def test_loss_curve_without_matplotlib_is_refused_before_training(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"LossCurve.*matplotlib.*lightning-d9d\[viz\]"):
        LossCurve(tmp_path / "curve.png").setup(L.Trainer(logger=False), Qwen3MoePretraining(CONFIG), "fit")


def test_text_sample_is_printed_and_repeatable(folder: Path, capsys: pytest.CaptureFixture[str]):
    module = fit(folder, TextSample(prompt="a =", num_tokens=20, context_length=8))
    printed = capsys.readouterr().out
    sample = TextSample(prompt="a =", num_tokens=20, context_length=8)
    assert f"a ={printable(sample.generate(module.model))}" in printed
    assert module.model.training
    # With a certain model every byte is its likeliest: the same as a greedy walk over its logits.
    tokens = list(b"a =")
    for _ in range(20):
        tokens.append(int(module.model(torch.tensor([tokens[-8:]])).logits[0, -1].argmax()))
    sample.temperature = 1e-6
    assert sample.generate(module.model).encode() == bytes(tokens[3:])


def test_a_text_sample_does_not_steer_a_terminal(folder: Path, capsys: pytest.CaptureFixture[str]):
    class Escape(TextSample):
        def generate(self, module: Any) -> str:
            return "\x1b[2J\n"

    fit(folder, Escape(prompt="a ="))
    assert "\na =\\x1b[2J\n\n---" in capsys.readouterr().out


def test_export_is_the_trained_model(folder: Path, tmp_path: Path):
    module = fit(folder, HuggingFaceExport(tmp_path / "export"))
    loaded = Qwen3MoeForCausalLM(CONFIG)
    load_huggingface(loaded, tmp_path / "export")
    for name, parameter in module.model.named_parameters():
        assert torch.equal(parameter, loaded.get_parameter(name)), name


@pytest.fixture
def pretrained(tmp_path: Path) -> Path:
    """A model as it is published: weights, a tokenizer and what to do when text is generated."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {word: place for place, word in enumerate(("<pad>", "<end>", "a", "b"))}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="a")), pad_token="<pad>", eos_token="<end>"
    )
    save_huggingface(Qwen3MoeForCausalLM(CONFIG), tmp_path / "pretrained")
    tokenizer.save_pretrained(tmp_path / "pretrained")
    (tmp_path / "pretrained" / "generation_config.json").write_text(json.dumps(GENERATION))
    return tmp_path / "pretrained"


GENERATION = {"eos_token_id": [1, 3], "pad_token_id": 0, "bos_token_id": 2, "do_sample": True, "top_k": 20}


def test_the_export_has_the_tokenizer_and_the_generation_config_it_began_with(
    folder: Path, tmp_path: Path, pretrained: Path
):
    from transformers import AutoTokenizer, GenerationConfig

    fit(folder, HuggingFaceExport(tmp_path / "own"), pretrained=str(pretrained))
    fit(folder, HuggingFaceExport(tmp_path / "given", tokenizer=pretrained))
    for export in (tmp_path / "own", tmp_path / "given"):
        assert AutoTokenizer.from_pretrained(export).decode([2, 3, 1]) == "a b <end>"
        assert json.loads((export / "generation_config.json").read_text()) == GENERATION
        read = GenerationConfig.from_pretrained(export)
        assert (read.eos_token_id, read.pad_token_id, read.bos_token_id, read.top_k) == ([1, 3], 0, 2, 20)
        assert json.loads((export / "config.json").read_text())["hidden_size"] == CONFIG.hidden_size
    fit(folder, HuggingFaceExport(tmp_path / "none"))
    assert not (tmp_path / "none" / "tokenizer.json").exists()
    assert json.loads((tmp_path / "none" / "generation_config.json").read_text()) == {}  # CONFIG has no ids
    with pytest.raises(ConfigError, match=r"tokenizer='.*text' has none of tokenizer.json, tokenizer_config.json, "):
        fit(folder, HuggingFaceExport(tmp_path / "x", tokenizer=folder))


def test_a_checkpoint_in_place_of_a_hugging_face_directory_and_the_reverse(folder: Path, tmp_path: Path):
    fit(folder, HuggingFaceExport(tmp_path / "hf"), ModelCheckpoint(tmp_path / "checkpoints", save_last=True))
    last = tmp_path / "checkpoints" / "last.ckpt"
    text = rf"{last} is a checkpoint, but a Hugging Face directory is needed. Convert it with `lightning-d9d convert "
    with pytest.raises(ConfigError, match=f"^{text}"):
        Qwen3MoePretraining(preset=str(last))
    with pytest.raises(ConfigError, match=rf"{text}.* and pretrained=DIRECTORY; or resume .* with ckpt_path$"):
        fit(folder, pretrained=str(last))
    hf = tmp_path / "hf"
    remedy = rf"with Qwen3MoePretraining\(preset='{hf}', pretrained='{hf}'\)$"
    with pytest.raises(StateError, match=rf"'{hf}' is a Hugging Face directory: leave ckpt_path out, .* {remedy}"):
        fit(folder, resume=hf)
    with pytest.raises(StateError, match=remedy):
        Qwen3MoePretraining.load_from_checkpoint(hf)


def test_export_refuses_a_directory_with_files(folder: Path):
    with pytest.raises(ConfigError, match="not empty; choose another one, or set overwrite=True"):
        fit(folder, HuggingFaceExport(folder))
    assert (folder / "a.py").exists()


@pytest.mark.parametrize("relation", ["is", "contains", "lies in"])
def test_export_refuses_to_replace_what_the_training_begins_with(folder: Path, tmp_path: Path, relation: str):
    begin = tmp_path / "out" / "begin"
    save_huggingface(Qwen3MoeForCausalLM(CONFIG), begin)
    (begin / "tokenizer.json").write_text("{}")
    directory = {"is": begin, "contains": begin.parent, "lies in": begin / "new"}[relation]
    text = rf"HuggingFaceExport\(directory='{directory}'\): the target {directory} {relation} {begin}, which is read;"
    for tokenizer, pretrained in ((None, str(begin)), (begin, None)):
        with pytest.raises(ConfigError, match=text):
            fit(folder, HuggingFaceExport(directory, overwrite=True, tokenizer=tokenizer), pretrained=pretrained)
    load_huggingface(Qwen3MoeForCausalLM(CONFIG), begin)


@pytest.mark.parametrize("overwrite", [False, True])
def test_export_refuses_a_directory_in_which_checkpoints_are_saved(folder: Path, tmp_path: Path, overwrite: bool):
    export = HuggingFaceExport(tmp_path / "out", overwrite=overwrite)
    for place in (tmp_path / "out", tmp_path / "out" / "checkpoints"):
        with pytest.raises(ConfigError, match=r"checkpoints are saved in .*out.*or another dirpath of ModelCheckpoint"):
            fit(folder, export, ModelCheckpoint(place, save_last=True))
    saved = ModelCheckpoint(tmp_path / "saved", save_last=True, save_on_train_epoch_end=False)
    fit(folder, HuggingFaceExport(tmp_path / "saved" / "export", overwrite=overwrite), saved)
    assert (tmp_path / "saved" / "last.ckpt").exists()


def test_parents_of_an_export_are_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    module = Qwen3MoePretraining(CONFIG)
    module.configure_model()
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    HuggingFaceExport(tmp_path / "a" / "b" / "export").on_fit_start(L.Trainer(logger=False), module)
    assert {str(tmp_path), str(tmp_path / "a")} <= {*synced}


def test_an_export_to_a_url(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    url = "memory://test_callbacks/export"
    module = fit(folder, HuggingFaceExport(url))
    loaded = Qwen3MoeForCausalLM(CONFIG)
    load_huggingface(loaded, url)
    assert torch.equal(loaded.lm_head.weight, module.model.lm_head.weight)
    assert not (folder / "memory:").exists()
    with pytest.raises(ConfigError, match=rf"directory='{url}'\): the directory is not empty; choose another one"):
        fit(folder, HuggingFaceExport(url))
    message = r"HuggingFaceExport\(directory=.none://a.\) cannot be written: .*Protocol not"
    with pytest.raises(ConfigError, match=message):
        HuggingFaceExport("none://a")


def test_bars_of_files_where_somebody_sees_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_huggingface(Qwen3MoeForCausalLM(CONFIG), tmp_path / "weights")

    def shown(**options: Any) -> str:
        module = Qwen3MoePretraining(CONFIG, pretrained=str(tmp_path / "weights"))
        module.trainer = trainer = L.Trainer(logger=False, accelerator="cpu", **options)
        module.configure_model()
        HuggingFaceExport(tmp_path / "export", overwrite=True).on_fit_end(trainer, module)
        return capsys.readouterr().err

    assert "B/s" not in shown()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    printed = shown()
    for what in ("checking", "reading", "writing"):
        assert what in printed
    assert "B/s" not in shown(enable_progress_bar=False)


def test_the_export_in_another_dtype_and_layout(folder: Path, tmp_path: Path) -> None:
    fit(folder, HuggingFaceExport(tmp_path / "export", dtype="bfloat16", fused_experts=True))
    specs = SafetensorsReader(tmp_path / "export").specs
    assert {spec.dtype for spec in specs.values()} == {torch.bfloat16}
    assert "model.layers.0.mlp.experts.gate_up_proj" in specs
    with pytest.raises(ConfigError, match=r"HuggingFaceExport\(dtype='int8'\) must be one of float64, float32"):
        HuggingFaceExport("export", dtype="int8")


@pytest.mark.parametrize("make", [HuggingFaceExport, LossCurve])
def test_a_place_that_cannot_be_written_is_refused_before_training(folder: Path, make: Any):
    with pytest.raises(ConfigError, match=rf"{make.__name__}\(.*a.py/out/x.*cannot be written.*give another place"):
        fit(folder, make(folder / "a.py" / "out" / "x"))


@pytest.mark.parametrize("callback", [HuggingFaceExport("export"), TextSample()], ids=lambda each: type(each).__name__)
def test_another_model_is_refused_before_training(callback: L.Callback):
    class Other(L.LightningModule):
        pass

    with pytest.raises(ConfigError, match=rf"{type(callback).__name__} needs a module.*Other does not"):
        callback.on_fit_start(L.Trainer(logger=False), Other())


def test_of_two_whole_models_the_first_is_exported_and_asked(tmp_path: Path):
    class Distilled(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher = Qwen3MoeForCausalLM(CONFIG), Qwen3MoeForCausalLM(CONFIG)

    module = Distilled()
    HuggingFaceExport(tmp_path / "export").on_fit_end(L.Trainer(logger=False), module)
    loaded = Qwen3MoeForCausalLM(CONFIG)
    load_huggingface(loaded, tmp_path / "export")
    assert torch.equal(loaded.lm_head.weight, module.student.lm_head.weight)
    sample = TextSample(num_tokens=5)
    assert sample.generate(module) == sample.generate(module.student)
