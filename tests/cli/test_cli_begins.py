"""How runs of the command line begin: the last checkpoint, a saved configuration, a full disk, missing files."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from pathlib import Path

import pytest

from lightning_d9d import cli
from lightning_d9d.checkpoint import open_directory
from lightning_d9d.cli import main, training
from lightning_d9d.cli.commands import parse
from lightning_d9d.errors import ConfigError, RankError, StateError, note_first
from lightning_d9d.generation.commands import main_evaluate
from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM, save_huggingface
from lightning_d9d.schedule import MeasuredCosts, WrittenProgram
from lightning_d9d.state import read_tensors
from tests.harness.forked import on_small_disk

CONFIG = """
model:
  class_path: Qwen3MoePretraining
  init_args:
    config:
      {vocab_size: 256, hidden_size: 16, moe_intermediate_size: 8, num_hidden_layers: 1, num_attention_heads: 2,
       num_key_value_heads: 2, head_dim: 8, num_experts: 2, num_experts_per_tok: 1, norm_topk_prob: true}
    warmup_steps: ${trainer.max_steps}
data:
  class_path: ByteTextDataModule
  init_args: {directory: texts, sequence_length: 8, batch_size: 2, pattern: "*.txt"}
trainer:
  strategy: d9d
  accelerator: cpu
  max_steps: 2
  logger: false
  enable_progress_bar: false
  enable_model_summary: false
  limit_val_batches: 0
  default_root_dir: runs
  callbacks:
  - class_path: ModelCheckpoint
    init_args: {dirpath: '${trainer.default_root_dir}/saved', save_last: true, every_n_train_steps: 2}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("to be or not to be, that is the question. " * 30)
    (tmp_path / "run.yaml").write_text(CONFIG)
    return tmp_path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit code."""
    monkeypatch.setattr(sys, "argv", ["lightning-d9d", *arguments])
    try:
        cli.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


class Built(cli.D9DCLI):
    """Builds everything and runs nothing."""

    def _run_subcommand(self, subcommand: str) -> None:
        pass


def test_last_and_auto(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """`last` never begins afresh, `auto` does; then both go on. A saved configuration follows overrides."""
    caplog.set_level(logging.INFO, logger="lightning.pytorch")  # a benchmark in this process may have raised it
    saved = folder / "runs" / "saved"
    fit = ("fit", "--config", "run.yaml")
    assert run(monkeypatch, *fit, "--ckpt_path", "last") == 2
    assert capfd.readouterr().err.splitlines()[-1] == (
        f"error: --ckpt_path last: no last*.ckpt is in {saved}; give the path of a checkpoint, or begin without one by "
        "--ckpt_path auto"
    )
    assert run(monkeypatch, *fit, "--ckpt_path", "auto", "--model.pretrained", "nowhere") == 2
    assert not saved.exists()
    assert run(monkeypatch, *fit, "--ckpt_path", "auto") == 0
    assert open_directory(saved / "last.ckpt", alone=True).values["global_step"] == 2
    for wanted, steps in (("auto", "4"), ("last", "6")):
        more = ("--trainer.max_steps", steps, "--model.pretrained", "nowhere")  # which a resumed run does not read
        assert run(monkeypatch, *fit, "--ckpt_path", wanted, *more) == 0
        assert f"Restored all states from the checkpoint at {saved / 'last'}" in caplog.text
        caplog.clear()
    assert run(monkeypatch, "validate", "--config", "run.yaml", "--ckpt_path", "auto", "--trainer.callbacks", "[]") == 2
    assert capfd.readouterr().err.splitlines()[-1] == (
        "error: --ckpt_path auto: no ModelCheckpoint has a dirpath to look in; let a ModelCheckpoint have save_last: "
        "true, or give the path of a checkpoint"
    )
    overridden = ("--trainer.max_steps", "9", "--trainer.default_root_dir", "other")
    monkeypatch.setattr(sys, "argv", ["lightning-d9d"])
    built = Built(args=["fit", "--config", "runs/config.yaml", *overridden])
    assert built.model.warmup_steps == 9
    assert getattr(built.trainer.checkpoint_callback, "dirpath", None) == str(folder / "other" / "saved")


def test_a_checkpoint_of_adapters_names_the_options_that_it_needs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of its base, or of the seed of initial weights. A run that follows goes on."""
    monkeypatch.setattr(sys, "argv", ["lightning-d9d"])
    config = Built(args=["fit", "--config", "run.yaml"]).model.config
    save_huggingface(Qwen3MoeForCausalLM(config), "base")
    adapters = ("--model.peft", "LoRA", "--model.peft.rank", "2")
    fit = ("fit", "--config", "run.yaml", *adapters, "--trainer.strategy.checkpoint.trainable_only", "true")
    resume = ("--ckpt_path", "last", "--trainer.max_steps", "4")
    for first, wrong, remedy in (
        (("--model.pretrained", "base"), (), "--model.pretrained base"),
        (("--seed_everything", "1"), ("--seed_everything", "2"), "--seed_everything 1"),
    ):
        assert run(monkeypatch, *fit, *first) == 0
        capsys.readouterr()
        assert run(monkeypatch, *fit, *wrong, *resume) == 2
        [error] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert f"has only trained parameters, on the {'base' if not wrong else 'initial weights of seed 1'}" in error
        assert f"et {remedy}, or " in error
        assert run(monkeypatch, *fit, *remedy.split(), *resume) == 0
        assert open_directory("runs/saved/last.ckpt", alone=True).values["global_step"] == 4
        shutil.rmtree("runs")


@pytest.mark.mounts
def test_a_disk_that_is_full_at_the_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "runs").mkdir()
    errors = folder / "errors.txt"

    def fill_and_run() -> None:
        system = os.statvfs(folder / "runs")
        (folder / "runs" / "others").write_bytes(bytes(system.f_bavail * system.f_frsize))
        with errors.open("w") as output:
            os.dup2(output.fileno(), 2)
        sys.stderr = os.fdopen(2, "w", buffering=1)
        assert run(monkeypatch, "fit", "--config", "run.yaml") == 2

    on_small_disk(folder / "runs", 64, fill_and_run)
    text = errors.read_text()
    assert "Traceback" not in text
    assert [line for line in text.splitlines() if line.startswith("error: ")] == [
        "error: config.yaml cannot be written at the start of the run: No space left on device; free some space, or "
        "set another trainer.default_root_dir"
    ]


@pytest.mark.parametrize(
    "read",
    [
        lambda: Qwen3MoeConfig.from_json("nowhere.json"),
        lambda: WrittenProgram(path="nowhere.json"),
        lambda: MeasuredCosts.read("nowhere.json"),
        lambda: main_evaluate(parse("evaluate", ["model", "nowhere.json"])),
        lambda: dict(read_tensors("nowhere.json.safetensors")),
    ],
    ids=["config", "program", "costs", "text", "tensors"],
)
def test_a_missing_file_is_named_once(folder: Path, read: object) -> None:
    with pytest.raises((ConfigError, StateError)) as caught:
        read()  # type: ignore[operator]
    assert str(caught.value).count("nowhere.json") == 1
    assert "it does not exist" in str(caught.value)
    assert "Errno" not in str(caught.value)


def test_a_directory_that_is_no_checkpoint_is_named_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "fit", "--config", "run.yaml", "--ckpt_path", "texts") == 2
    text = "checkpoint 'texts' is a directory without values.pt: it is none, or incomplete; give another ckpt_path"
    assert f"error: ckpt_path cannot be loaded: {text}\n" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [RankError, RuntimeError])
def test_a_failure_of_another_rank_is_one_line(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: object) -> None:
        error = kind("rank 1 failed: ValueError: bad row" if kind is RankError else "Connection closed by peer")
        if kind is RuntimeError:
            note_first(error, "rank 1 failed: ValueError: bad row")
        raise error

    monkeypatch.setattr(training, "run", fail)
    monkeypatch.setattr(sys, "argv", ["lightning-d9d", "fit"])
    with pytest.raises(SystemExit, match="1"):
        main()
    assert capsys.readouterr().err == "error: rank 1 failed: ValueError: bad row\n"
    monkeypatch.setenv("JSONARGPARSE_DEBUG", "true")
    with pytest.raises(kind):
        main()


def test_json_is_said_to_be_read_as_it_is(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "texts.jsonl").write_text('{"text": "a"}')
    with caplog.at_level(logging.WARNING, "lightning_d9d"), pytest.raises(ConfigError, match="model"):
        main_evaluate(parse("evaluate", ["model", "texts.jsonl"]))  # there is no model
    assert caplog.messages == [
        "texts.jsonl is read as plain text, names and braces too; give files with the texts alone"
    ]


@pytest.mark.parametrize(("setting", "lines"), [("stopping_threshold: 1.0e+9", 1), ("patience: 9", 0)])
def test_an_early_stop_says_why(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, setting: str, lines: int
) -> None:
    stopping = f"  - class_path: EarlyStopping\n    init_args: {{monitor: train_loss, {setting}}}\n"
    (folder / "run.yaml").write_text(CONFIG + stopping)
    short = ("--trainer.max_steps", "4", "--trainer.limit_train_batches", "1")
    caplog.set_level(logging.INFO, logger="lightning.pytorch")
    assert run(monkeypatch, "fit", "--config", "run.yaml", *short) == 0
    said = [text for each in caplog.records if "stopped: Stopping threshold" in (text := each.getMessage())]
    assert len(said) == lines
    assert all(text.endswith(" < 1000000000.0.") and "reached: train_loss = " in text for text in said)
