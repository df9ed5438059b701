"""What a user sees of mistakes that a first try has: options, classes, and text inside of an option's value."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lightning_d9d.cli import main
from tests.cli.test_cli_mistakes import FIT, QUIET, folder, refusal  # noqa: F401

OPTIONS = {
    ("-trainer.max_steps", "2"): (
        "'-trainer.max_steps' is no option; the names of options begin with two dashes: --trainer.max_steps\n"
    ),
    ("trainer.max_steps=2",): (
        "'trainer.max_steps' is no option; the names of options begin with two dashes: --trainer.max_steps\n"
    ),
    ("--max_steps", "2"): (
        "--max_steps: lightning-d9d fit has no option 'max_steps'; did you mean 'trainer.max_steps'?\n"
        "lightning-d9d fit takes config, seed_everything, trainer, model, data, predictions, optimizer, lr_scheduler, "
        "ckpt_path, weights_only\n"
    ),
    ("--batch_size", "4"): (
        "--batch_size: lightning-d9d fit has no option 'batch_size'; did you mean 'data.batch_size'?\n"
        "lightning-d9d fit takes config, seed_everything, trainer, model, data, predictions, optimizer, lr_scheduler, "
        "ckpt_path, weights_only\n"
    ),
    ("--trainer.callbacks+=LearningRateMonitor", *QUIET): (
        "run.yaml, line 13: LearningRateMonitor needs a logger, but logger=false; choose one, such as CSVLogger, or "
        "leave LearningRateMonitor out\n"
    ),
    ("--trainer.limit_val_batches", "-1"): (
        "--trainer.limit_val_batches: You have passed invalid value -1 for limit_val_batches, it has to be in "
        "[0.0, 1.0] or an int.\n"
    ),
    ("--trainer.val_check_interval", "0"): (
        "--trainer.val_check_interval: val_check_interval=0 must be above 0; limit_val_batches=0 leaves validation "
        "out\n"
    ),
    ("--model.peft", "LoRA", "--model.peft.targets", "[q_prj]", *QUIET): (
        "--model.peft.targets: LoRA(targets=['q_prj']) matches no name of Qwen3MoeForCausalLM; the nearest are "
        "model.layers.0.self_attn.q_proj, model.layers.0.self_attn.k_proj, model.layers.0.self_attn.v_proj\n"
    ),
    ("--trainer.strategy.schedule.class_path", "GPipe", "--trainer.strategy.schedule.stages", "2"): (
        "--trainer.strategy.schedule.stages: GPipe has no option 'stages'\nGPipe takes no options\n"
    ),
}
VALUES = {
    ("--trainer", "{max_steps: ten}"): "--trainer: trainer.max_steps must be a whole number, not 'ten'\n",
    ("--trainer.strategy", "{class_path: D9DStrategy, init_args: {microbatch_sise: 2}}"): (
        "--trainer.strategy: D9DStrategy has no option 'microbatch_sise'; did you mean 'microbatch_size'?\n"
        "D9DStrategy takes mesh, schedule, microbatch_size, num_microbatches, parallel, grad_sync, checkpoint, "
        "timeouts, skip_nonfinite, step_in_backward, replicate_sync, process_group_backend\n"
    ),
    ("--trainer.strategy", "{class_path: D9DStrategy, init_args: {parallel: {kernels: trito}}}"): (
        "--trainer.strategy: trainer.strategy.parallel.kernels must be 'auto', 'torch' or 'triton', not 'trito'; did "
        "you mean 'triton'?\n"
    ),
    ("--trainer.strategy", "{class_path: D9DStrategy, init_args: {microbatch_size: two}}"): (
        "--trainer.strategy: trainer.strategy.microbatch_size must be a whole number or null, not 'two'\n"
    ),
    ("--trainer.strategy", "{class: D9DStrategy}"): (
        "--trainer.strategy takes an object as class_path: CLASS and init_args: SETTINGS\n"
    ),
    ("--trainer.strategy", "{class_path: D9DStrategy"): (
        "--trainer.strategy: not YAML: expected ',' or '}', but got '<stream end>'\n"
    ),
    ("--trainer.profiler", "{class_path: SimpleProfiler, init_args: {filenamee: a}}"): (
        "--trainer.profiler: SimpleProfiler has no option 'filenamee'; did you mean 'filename'?\n"
        "SimpleProfiler takes dirpath, filename, extended\n"
    ),
}


MISTAKES = OPTIONS | VALUES


@pytest.mark.parametrize(("arguments", "message"), MISTAKES.items(), ids=map(" ".join, MISTAKES))
def test_message(
    arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal(monkeypatch, capsys, *FIT, *arguments) == f"error: {message}"


@pytest.mark.parametrize(
    ("option", "subject", "name", "meant"),
    [
        ("--trainer.logger", "--trainer.logger", "wandb", "WandbLogger"),
        ("--trainer.logger", "--trainer.logger", "csv", "CSVLogger"),
        ("--trainer.strategy", "--trainer.strategy", "dpp", "ddp"),
        ("--model.config.class_path", "--model.config.class_path: model.config", "Qwen3Config", "Qwen3MoeConfig"),
        (
            "--trainer.strategy.schedule.class_path",
            "--trainer.strategy.schedule.class_path: trainer.strategy.schedule",
            "ZeroBubbel",
            "ZeroBubble",
        ),
    ],
)
def test_the_class_that_was_meant_is_named(
    option: str,
    subject: str,
    name: str,
    meant: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    first, second = refusal(monkeypatch, capsys, *FIT, option, name).splitlines()
    assert first == f"error: {subject} knows no {name!r}; did you mean {meant!r}?"
    assert second.startswith(f"it may be {meant}")


def test_settings_without_a_class(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    Path("more.yaml").write_text("model:\n  init_args:\n    learning_rate: 0.1\n")
    assert refusal(monkeypatch, capsys, "fit", "--config", "more.yaml") == (
        "error: more.yaml, line 3: model has settings but no class; give class_path: CLASS in a file before this one\n"
    )


@pytest.mark.parametrize(
    "words", [("plan", "--json", "no/file"), ("plan", "--page", "no/file"), ("learning-rate", "no/file")]
)
def test_files_are_refused_before_the_work_for_them(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("no").touch()
    Path("other.yaml").write_text("model: nowhere.Model\n")  # which would be the next to be refused
    monkeypatch.setattr(sys, "argv", ["lightning-d9d", *words, "--config", "other.yaml"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert capsys.readouterr().err.splitlines()[-1] == (
        "error: no/file cannot be written: Not a directory; give another file"
    )
