"""The files that fine-tune Qwen3-30B-A3B: what they build, with the whole model on the meta device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lightning.pytorch.loggers import CSVLogger

from lightning_d9d import D9DStrategy
from lightning_d9d.callbacks import AdapterExport
from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig
from lightning_d9d.peft import trainable_parameters
from tests.cli.test_cli import build, callbacks

EXAMPLES = Path(__file__).parents[2] / "examples" / "qwen3_moe"
LORA, TINY = ("--config", str(EXAMPLES / "lora_30b.yaml")), ("--config", str(EXAMPLES / "lora_tiny.yaml"))
OF_ATTENTION = 48 * 16 * ((2048 + 4096) + 2 * (2048 + 512) + (4096 + 2048))
OF_EXPERTS = 48 * 128 * (2 * (2048 + 768) + (768 + 2048))
"""Parameters of adapters of rank 1."""


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder that the files name, without weights."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").mkdir()
    config = Qwen3MoeConfig.preset("30b-a3b").to_dict()
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(("options", "rank"), [((), 2), (("--model.peft.rank_of_experts", "16"), 16)], ids=str)
def test_adapters_of_the_30b(options: tuple[str, ...], rank: int) -> None:
    cli = build(*LORA, *options)
    whole = cli.model.whole_on_meta()
    trained = trainable_parameters(whole)
    assert all(".lora." in name or "_lora." in name for name in trained)
    assert sum(each.numel() for each in trained.values()) == OF_ATTENTION + rank * OF_EXPERTS
    frozen = sum(each.numel() for each in whole.parameters() if not each.requires_grad)
    assert frozen == 30_532_122_624
    assert {type(each).__name__ for each in whole.modules() if "Adapter" in type(each).__name__} == {
        "LinearAdapter",
        "ExpertsAdapter",
    }


def test_settings_of_the_run() -> None:
    cli = build(*LORA)
    strategy, trainer = cli.trainer.strategy, cli.trainer
    assert isinstance(strategy, D9DStrategy)
    assert strategy.checkpoint_config.trainable_only
    assert (strategy.parallel.recompute, trainer.precision, trainer.max_epochs) == ("3_of_4", "bf16-true", 1)
    assert (cli.model.pretrained, cli.datamodule.tokenizer, cli.datamodule.sequence_length) == ("base", "base", 4096)
    assert isinstance(trainer.logger, CSVLogger)
    exported = callbacks(cli)["AdapterExport"]
    assert isinstance(exported, AdapterExport)
    assert exported.directory == Path("lora_output/adapter")


def test_what_differs_for_a_tiny_model() -> None:
    cli, tiny = build(*LORA), build(*LORA, *TINY)
    assert (tiny.datamodule.sequence_length, tiny.datamodule.global_batch_size, tiny.trainer.max_steps) == (128, 8, 30)
    assert tiny.model.peft == cli.model.peft
    assert tiny.trainer.strategy.parallel == cli.trainer.strategy.parallel
    optimizers = [each.config["fit"]["model"]["init_args"]["optimizer"] for each in (cli, tiny)]
    assert [each["class_path"].rpartition(".")[2] for each in optimizers] == ["StochasticAdamW"] * 2
    assert [each["init_args"]["lr"] for each in optimizers] == [2e-4, 3e-3]
