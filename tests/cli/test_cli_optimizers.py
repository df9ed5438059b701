"""Optimizers and schedules from files and arguments: they train the same as in Python, and are drawn."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from PIL import Image, ImageChops, ImageStat
from torch import nn
from torch.optim import AdamW

from lightning_d9d.cli import D9DCLI, main
from lightning_d9d.errors import ConfigError
from lightning_d9d.models.qwen3_moe import Qwen3MoePretraining
from lightning_d9d.optim import OptimizerSettings, ParameterGroup, Phase, PiecewiseLR, StochasticAdamW
from tests.test_docs import blocks

MODEL = """\
model:
  class_path: Qwen3MoePretraining
  init_args:
    config: {vocab_size: 256, hidden_size: 16, intermediate_size: 16, moe_intermediate_size: 8, num_hidden_layers: 2,
      num_attention_heads: 2, num_key_value_heads: 1, head_dim: 8, num_experts: 2, num_experts_per_tok: 1}
"""
SETTINGS = """\
    optimizer: {class_path: StochasticAdamW, init_args: {lr: 1.0e-2, weight_decay: 0.1, state_dtype: uint8}}
    lr_scheduler:
      class_path: PiecewiseLR
      init_args:
        initial: 0.5
        phases: [{steps: 2, to: 1.0}, {to: 0.0, curve: cosine}]
    parameter_groups: [{pattern: "*.mlp.experts.*", lr: 1.0e-3}]
"""
REST = """\
data: {class_path: ByteTextDataModule, init_args: {directory: text, sequence_length: 8, batch_size: 2}}
trainer: {max_steps: 4, accelerator: cpu, logger: false, strategy: d9d, enable_checkpointing: false,
  enable_progress_bar: false, enable_model_summary: false, limit_val_batches: 0}
seed_everything: 0
"""
IN_PYTHON = OptimizerSettings(
    partial(StochasticAdamW, lr=1e-2, weight_decay=0.1, state_dtype=torch.uint8),
    partial(PiecewiseLR, phases=[Phase(1.0, steps=2), Phase(0.0, curve="cosine")], initial=0.5),
)
WITHOUT_GROUPS = (
    *("--optimizer", "StochasticAdamW", "--optimizer.lr", "1.0e-2", "--optimizer.weight_decay", "0.1"),
    *("--optimizer.state_dtype", "uint8"),
    *("--lr_scheduler", "PiecewiseLR", "--lr_scheduler.initial", "0.5"),
    *("--lr_scheduler.phases", "[{steps: 2, to: 1.0}, {to: 0.0, curve: cosine}]"),
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lightning-d9d"])
    Path("text").mkdir()
    Path("text/some.py").write_text("x = 1\n" * 100)
    Path("run.yaml").write_text(MODEL + SETTINGS + REST)
    Path("own.yaml").write_text(MODEL + REST)


def trained(*arguments: str, settings: OptimizerSettings | None = None) -> tuple[list[dict[str, Any]], Any]:
    """The groups with names and the last weights; with `settings` in place of those of the configuration."""

    class Changed(D9DCLI):
        def before_fit(self) -> None:
            self.model.optimizer_settings = settings or self.model.optimizer_settings

    cli = Changed(args=["fit", *arguments])
    names = {parameter: name for name, parameter in cli.model.state_dict(keep_vars=True).items()}
    groups = [{**g, "params": [names[p] for p in g["params"]]} for g in cli.trainer.optimizers[0].param_groups]
    return groups, cli.model.state_dict()


def test_a_file_trains_as_python_does() -> None:
    with_groups = OptimizerSettings(
        IN_PYTHON.optimizer, IN_PYTHON.lr_scheduler, [ParameterGroup("*.mlp.experts.*", lr=1e-3)]
    )
    groups, weights = trained("--config", "run.yaml")
    expected, expected_weights = trained("--config", "own.yaml", settings=with_groups)
    assert groups == expected
    assert {group["initial_lr"] for group in groups} == {1e-2, 1e-3}
    assert all(torch.equal(value, expected_weights[name]) for name, value in weights.items())
    [embedding] = [group for group in groups if "model.embed_tokens.weight" in group["params"]]
    assert embedding["weight_decay"] == 0


def test_options_of_lightning_train_as_python_does() -> None:
    groups, weights = trained("--config", "own.yaml", *WITHOUT_GROUPS)
    expected, expected_weights = trained("--config", "own.yaml", settings=IN_PYTHON)
    assert groups == expected
    assert all(torch.equal(value, expected_weights[name]) for name, value in weights.items())


def test_both_at_once_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"`optimizer` is given as well as model\.optimizer; leave one of them out"):
        D9DCLI(args=["fit", "--config", "run.yaml", "--optimizer", "AdamW"])


class Plain(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def training_step(self, batch: Any) -> torch.Tensor:
        return self.layer(torch.ones(2)).sum()


def test_plain_modules_are_left_to_lightning() -> None:
    cli = D9DCLI(Plain, run=False, args=["--optimizer", "AdamW", "--optimizer.lr", "0.5"], save_config_callback=None)
    optimizer = cli.model.configure_optimizers()
    assert isinstance(optimizer, AdamW)
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_a_checkpoint_of_such_a_run_loads_without_settings() -> None:
    cli = D9DCLI(args=["fit", "--config", "run.yaml"])
    cli.trainer.save_checkpoint("run.ckpt")
    loaded = Qwen3MoePretraining.load_from_checkpoint("run.ckpt")
    assert loaded.optimizer_settings is None
    chosen = partial(AdamW, lr=1.0)
    loaded = Qwen3MoePretraining.load_from_checkpoint("run.ckpt", optimizer=chosen)
    assert loaded.optimizer_settings == OptimizerSettings(chosen)


def draw(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["lightning-d9d", "learning-rate", *arguments])
    main()
    return capsys.readouterr().out


def test_the_learning_rate_is_drawn(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Drawing needs no devices of the run, and works with any optimizer."""
    said = draw(monkeypatch, capsys, "rates.png", "--config", "run.yaml", "--trainer.devices", "64")
    assert said == "rates.png: 4 steps, from 0.005 over 0.01 to 0.005\n"
    with Image.open("rates.png") as image:
        assert image.size == (800, 300)
    own = ("--config", "own.yaml", "--model.warmup_steps", "2", "--model.learning_rate", "0.5")
    assert draw(monkeypatch, capsys, "own.html", *own) == "own.html: 4 steps, from 0.25 over 0.5 to 0.275\n"
    assert "Plotly" in Path("own.html").read_text()
    constant = ("--config", "own.yaml", "--optimizer", "SGD", "--optimizer.lr", "0.5")
    assert draw(monkeypatch, capsys, "sgd.svg", *constant) == "sgd.svg: 4 steps, from 0.5 over 0.5 to 0.5\n"


def test_the_pictures_of_the_page_are_what_its_commands_draw(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Up to the fonts and the versions of matplotlib."""
    root = Path(__file__).parents[2]
    found = blocks(root / "docs/how-to/choose-a-learning-rate.md")
    for block in found:
        if block.title:
            Path(block.title).write_text(block.code)
    commands = [words for block in found if block.language == "bash" for words in block.commands()]
    assert len(commands) == 3
    for _, _, picture, *arguments in commands:
        draw(monkeypatch, capsys, picture, *arguments)
        with Image.open(picture) as ours, Image.open(root / "docs/assets" / picture) as shown:
            assert ours.size == shown.size
            difference = ImageChops.difference(ours.convert("L"), shown.convert("L"))
        assert ImageStat.Stat(difference).mean[0] < 2, picture


def test_help_is_that_of_fit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        draw(monkeypatch, capsys, "--help")
    shown = capsys.readouterr().out
    assert shown.startswith("usage: lightning-d9d learning-rate PICTURE [options of fit]\n")
    assert "--trainer.max_steps" in shown


class OwnOptimizer(Qwen3MoePretraining):
    def configure_optimizers(self) -> Any:
        return AdamW(self.parameters())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--model.preset", "tiny", "--trainer.max_steps", "-1"),
            "max_steps=-1 of the Trainer does not give the number of steps to draw",
        ),
        (("--model", f"{__name__}.Plain"), "Plain is a plain LightningModule, whose schedule is known only in a"),
        (
            ("--model", f"{__name__}.OwnOptimizer", "--model.preset", "tiny"),
            "OwnOptimizer.configure_optimizers makes the schedule, which is known only in a run;",
        ),
    ],
)
def test_what_cannot_be_drawn(
    arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("rest.yaml").write_text(REST)
    with pytest.raises(SystemExit, match="2"):
        draw(monkeypatch, capsys, "rates.png", "--config", "rest.yaml", *("--model", "Qwen3MoePretraining"), *arguments)
    assert message in capsys.readouterr().err
