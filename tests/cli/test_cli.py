"""The command line in this process: interpolation, short names, saved configurations and messages."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from lightning.pytorch.strategies import DDPStrategy

from lightning_d9d import D9DStrategy, MeshConfig
from lightning_d9d.cli import D9DCLI, main
from lightning_d9d.datamodules import ByteTextDataModule
from lightning_d9d.errors import ConfigError
from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoePretraining
from lightning_d9d.schedule import GPipe, ZeroBubble

TINY = str(Path(__file__).parents[2] / "examples" / "qwen3_moe" / "tiny.yaml")


@pytest.fixture(autouse=True)
def no_arguments_of_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-d9d"])


class Built(D9DCLI):
    """Builds everything and runs nothing."""

    def _run_subcommand(self, subcommand: str) -> None:
        pass


def build(*arguments: str) -> Any:
    return Built(args=["fit", *arguments, "--trainer.accelerator", "cpu"])


class OwnSchedule(GPipe):
    """A schedule of somebody's own."""

    def __init__(self, times: int = 1) -> None:
        self.times = times


def callbacks(cli: Built) -> dict[str, Any]:
    return {type(callback).__name__: callback for callback in cli.trainer.callbacks}  # type: ignore[attr-defined]


def test_tiny_is_the_preset():
    cli = build("--config", TINY)
    assert isinstance(cli.model, Qwen3MoePretraining)
    assert cli.model.config == Qwen3MoeConfig.preset("tiny")
    assert isinstance(cli.trainer.strategy, D9DStrategy)
    assert isinstance(cli.datamodule, ByteTextDataModule)


def test_interpolation_follows_overrides(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("QUICKSTART_OUTPUT", raising=False)
    assert callbacks(build("--config", TINY))["LossCurve"].path == Path("quickstart_output/yaml/loss_curve.png")
    monkeypatch.setenv("QUICKSTART_OUTPUT", "elsewhere")
    cli = build("--config", TINY, "--data.sequence_length", "64")
    assert callbacks(cli)["LossCurve"].path == Path("elsewhere/yaml/loss_curve.png")
    assert callbacks(cli)["TextSample"].context_length == 64
    cli = build("--config", TINY, "--trainer.default_root_dir", "third")
    assert callbacks(cli)["LossCurve"].path == Path("third/loss_curve.png")


def test_interpolation_of_a_number_between_sections(tmp_path: Path):
    config = tmp_path / "config.yaml"
    config.write_text(
        "trainer:\n  max_steps: 5\n  strategy: d9d\n  logger: false\n"
        "model:\n  class_path: Qwen3MoePretraining\n  init_args:\n    preset: tiny\n"
        "    warmup_steps: ${trainer.max_steps}\n"
        "data: ByteTextDataModule\n"
    )
    assert build("--config", str(config)).model.warmup_steps == 5
    cli = build("--config", str(config), "--trainer.max_steps", "7")
    assert cli.model.warmup_steps == 7
    assert isinstance(cli.trainer.strategy, D9DStrategy)


def test_nested_override_keeps_the_rest():
    cli = build("--config", TINY, "--model.config.num_hidden_layers", "2", "--trainer.strategy.schedule", "gpipe")
    assert cli.model.config.num_hidden_layers == 2
    assert cli.model.config.hidden_size == 128


def test_a_mesh_on_the_command_line_keeps_the_degrees_that_it_does_not_name(tmp_path: Path):
    config = tmp_path / "mesh.yaml"
    mesh = "mesh: {pipeline_parallel: 2, data_parallel_replicate: 2}"
    config.write_text(f"trainer: {{devices: 4, strategy: {{class_path: D9DStrategy, init_args: {{{mesh}}}}}}}\n")
    files = ("--config", TINY, "--config", str(config))
    for given, replicas in {"{tensor_parallel: 2}": 2, "{tensor_parallel: 2, data_parallel_replicate: 1}": 1}.items():
        expected = MeshConfig(pipeline_parallel=2, data_parallel_replicate=replicas, tensor_parallel=2)
        assert build(*files, "--trainer.strategy.mesh", given).trainer.strategy.mesh_config == expected


@pytest.mark.parametrize(
    ("schedule", "kind", "arguments"),
    [
        ("{class_path: ZeroBubble}", ZeroBubble, {"stages_per_rank": 1}),
        ("{class_path: GPipe}", GPipe, {}),
        ("{class_path: tests.cli.test_cli.OwnSchedule, init_args: {times: 3}}", OwnSchedule, {"times": 3}),
    ],
)
def test_a_schedule_by_its_class(tmp_path: Path, schedule: str, kind: type, arguments: dict[str, int]):
    config = tmp_path / "schedule.yaml"
    config.write_text(f"trainer: {{strategy: {{class_path: D9DStrategy, init_args: {{schedule: {schedule}}}}}}}\n")
    built = build("--config", TINY, "--config", str(config)).trainer.strategy.schedule
    assert type(built) is kind
    assert vars(built) == arguments


def test_options_follow_the_name_of_the_strategy(tmp_path: Path):
    (tmp_path / "named.yaml").write_text("trainer: {strategy: d9d}\n")
    (tmp_path / "class.yaml").write_text("trainer: {strategy: {class_path: DDPStrategy}}\n")
    options = ("--trainer.strategy.microbatch_size=2", "--trainer.strategy.mesh.data_parallel_replicate", "1")
    base, file, other = (f"--config={each}" for each in (TINY, tmp_path / "named.yaml", tmp_path / "class.yaml"))
    for before in ((base, file), (base, "--trainer.strategy", "d9d"), (base, other, file)):
        strategy = build(*before, *options).trainer.strategy
        assert isinstance(strategy, D9DStrategy)
        assert strategy.staging.microbatch_count.microbatch_size == 2
    stock = build(base, file, other, "--trainer.strategy.process_group_backend", "gloo").trainer.strategy
    assert isinstance(stock, DDPStrategy)


def test_a_schedule_written_in_the_configuration(tmp_path: Path):
    config = tmp_path / "schedule.yaml"
    config.write_text(
        "trainer: {strategy: {class_path: D9DStrategy, init_args: {schedule: {class_path: WrittenProgram, "
        "init_args: {text: 0F0 0B0}}}}}\n"
    )
    built = build("--config", TINY, "--config", str(config)).trainer.strategy.schedule
    assert str(built.program(1, 1)) == "0F0 0B0"


def test_printed_configuration_builds_the_same(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    with pytest.raises(SystemExit, match="0"):
        build("--config", TINY, "--trainer.max_steps", "7", "--print_config")
    printed = tmp_path / "printed.yaml"
    printed.write_text(capsys.readouterr().out)
    with pytest.raises(SystemExit, match="0"):
        build("--config", str(printed), "--print_config")
    assert yaml.safe_load(capsys.readouterr().out) == yaml.safe_load(printed.read_text())
    assert build("--config", str(printed)).trainer.max_steps == 7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--trainer.max_stepz", "2"), "--trainer.max_stepz"),
        (("--trainer.strategy.init_args.microbatches", "2"), "D9DStrategy has no option 'microbatches'"),
        (("--model.learning_rat", "2"), "Qwen3MoePretraining has no option 'learning_rat'"),
        (
            ("--model.preset", "huge"),
            "error: --model.preset: Qwen3MoePretraining got both config and preset='huge'; give one",
        ),
        (
            ("--trainer.strategy.schedule", "zigzag"),
            "error: --trainer.strategy.schedule: schedule='zigzag' is unknown; choose one of",
        ),
        (
            ("--data.batch_size", "0"),
            "error: --data.batch_size: batch_size=0 of ByteTextDataModule must be at least 1.",
        ),
        (
            ("--trainer.accelerator", "gpu"),
            "error: --trainer.accelerator: accelerator=gpu needs a GPU, and torch sees none; choose auto or cpu",
        ),
        (("--ckpt_path", __file__), f"error: checkpoint {__file__!r} cannot be read ("),
        (("--data.batch_size", "${trainer.max_steps}"), "error: --data.batch_size: Interpolation key "),
    ],
)
def test_refused(
    arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "argv", ["lightning-d9d", "fit", "--config", TINY, *arguments])
    with pytest.raises(SystemExit) as exit_info:
        main()
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            "${data.init_args.sequence_lenght}",
            "Interpolation key 'data.init_args.sequence_lenght' not found; did you mean ",
        ),
        ("${oc.env:NO_SUCH_VARIABLE}", "Environment variable 'NO_SUCH_VARIABLE' not found\n"),
    ],
)
def test_interpolations_that_lead_nowhere_are_named(
    value: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    config = tmp_path / "config.yaml"
    config.write_text(
        "model:\n  class_path: Qwen3MoePretraining\n  init_args:\n    preset: tiny\n"
        f"    warmup_steps: {value}\ndata: ByteTextDataModule\n"
    )
    monkeypatch.setattr(sys, "argv", ["lightning-d9d", "fit", "--config", str(config)])
    with pytest.raises(SystemExit, match="2"):
        main()
    error = capsys.readouterr().err
    assert f"error: {config}, line 5: {message}" in error
    assert "(resolved" not in error


def test_what_is_interpolated_is_saved_as_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FOLDER", "secret")
    config = tmp_path / "given.yaml"
    config.write_text(
        "seed_everything: 1\n"
        "model:\n  class_path: Qwen3MoePretraining\n  init_args:\n    preset: tiny\n"
        "    warmup_steps: ${trainer.max_steps}\n    learning_rate: ${oc.decode:${oc.env:RATE,1e-3}}\n"
        "data:\n  class_path: ByteTextDataModule\n  init_args:\n    batch_size: ${.sequence_length}\n"
        "    sequence_length: ${oc.env:LENGTH,64}\n"
        "trainer:\n  max_steps: ${oc.env:STEPS,5}\n  default_root_dir: ${oc.env:FOLDER}/runs\n"
        "  callbacks:\n  - class_path: LossCurve\n    init_args: {path: '${trainer.default_root_dir}/a.png'}\n"
    )
    arguments = ("--config", str(config), "--data.sequence_length", "32", "--trainer.max_epochs", "2")
    cli = build(*arguments)
    assert callbacks(cli)["LossCurve"].path == Path("secret/runs/a.png")
    assert cli.datamodule.batch_size == 32
    saved = tmp_path / "saved.yaml"
    callback = callbacks(cli)["SaveTrainingConfig"]
    callback.parser.save(callback.config, saved, skip_none=False, multifile=False)
    values = yaml.safe_load(saved.read_text())
    assert "secret" not in saved.read_text()
    assert values["model"]["init_args"]["warmup_steps"] == "${...trainer.max_steps}"
    assert values["model"]["init_args"]["learning_rate"] == "${oc.decode:${oc.env:RATE,1e-3}}"
    assert values["data"]["init_args"]["batch_size"] == "${.sequence_length}"
    assert values["data"]["init_args"]["sequence_length"] == 32
    assert values["trainer"]["max_steps"] == "${oc.env:STEPS,5}"
    assert values["trainer"]["max_epochs"] == 2
    assert values["trainer"]["callbacks"][0]["init_args"]["path"] == "${....default_root_dir}/a.png"
    again = build("--config", str(saved))
    assert again.config.fit.as_dict() | {"config": None} == cli.config.fit.as_dict() | {"config": None}


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JSONARGPARSE_DEBUG", "true")
    monkeypatch.setattr(sys, "argv", ["lightning-d9d", "fit", "--config", TINY, "--data.batch_size", "0"])
    with pytest.raises(ConfigError, match="batch_size=0"):
        main()


def test_the_saved_configuration_is_that_of_the_last_training(tmp_path: Path):
    class Small(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(()))

        def training_step(self, batch: Any) -> torch.Tensor:
            return self.weight.square()

        def validation_step(self, batch: Any) -> None:
            pass

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    for subcommand, steps in (("fit", "1"), ("fit", "2"), ("validate", "3")):
        D9DCLI(
            Small,
            ByteTextDataModule,
            args=[
                *(subcommand, "--trainer.default_root_dir", str(tmp_path), "--trainer.limit_val_batches", "1"),
                *("--trainer.accelerator", "cpu", "--trainer.logger", "false", "--trainer.max_steps", steps),
                *("--trainer.enable_checkpointing", "false", "--trainer.enable_progress_bar", "false"),
            ],
        )
    assert "max_steps: 2" in (tmp_path / "config.yaml").read_text()
