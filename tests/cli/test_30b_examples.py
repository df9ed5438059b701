"""The files that train all of Qwen3-30B-A3B: what they build and need, and the same with a tiny model."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path

import pytest
import torch
from tokenizers import ByteLevelBPETokenizer
from torch.optim import Optimizer
from transformers import PreTrainedTokenizerFast

from lightning_d9d import D9DStrategy, GradSyncConfig, MeshConfig, ParallelConfig
from lightning_d9d.memory.step import GIB
from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM, Qwen3MoePretraining, save_huggingface
from lightning_d9d.optim import StochasticAdamW
from lightning_d9d.plan.planning import rank_model
from tests.cli.test_cli import build, callbacks
from tests.harness.tolerances import Kind, tolerance_for
from tests.harness.warm import python_path, run_command

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "qwen3_moe"
GPUS = {"one_gpu": 1, "two_gpus": 2, "four_gpus": 4, "eight_gpus": 8}
"""How many each file is for."""
ROWS = 4
STEPS_BESIDE_ONE_PROCESS = 3
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role + '\\n' + message.content + '<|end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant\\n' }}{% endif %}"
)


def configured(name: str) -> tuple[str, str]:
    return "--config", str(EXAMPLES / f"30b_a3b_{name}.yaml")


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that the files name, without weights."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").mkdir()
    config = Qwen3MoeConfig.preset("30b-a3b").to_dict()
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.usefixtures("base")
def test_settings_on_one_gpu() -> None:
    cli = build(*configured("one_gpu"))
    strategy, trainer = cli.trainer.strategy, cli.trainer
    assert isinstance(strategy, D9DStrategy)
    assert strategy.step_in_backward
    assert strategy.microbatch_count.is_one
    assert (strategy.parallel.recompute, trainer.precision, trainer.gradient_clip_val) == ("full", "bf16-true", None)
    assert strategy.checkpoint_config.asynchronous
    data = cli.config["fit"]["data"]["init_args"]
    assert (cli.model.pretrained, data["tokenizer"], cli.datamodule.sequence_length) == ("base", "base", 4096)
    assert optimizer_of(cli).defaults["state_dtype"] == "uint8"
    assert callbacks(cli)["HuggingFaceExport"].directory == Path("30b_a3b_one_gpu_output/export")


@pytest.mark.usefixtures("base")
def test_settings_on_two_gpus() -> None:
    cli = build(*configured("two_gpus"), "--trainer.devices", "2")
    strategy, trainer = cli.trainer.strategy, cli.trainer
    degrees = strategy.mesh_config.resolve(2)
    assert (degrees.data_parallel_replicate, degrees.expert_parallel, degrees.data_parallel_shard) == (2, 2, 1)
    assert not strategy.step_in_backward
    assert strategy.grad_sync.dtype == "bfloat16"
    assert (strategy.parallel.recompute, trainer.precision, trainer.gradient_clip_val) == ("full", "bf16-true", 1.0)
    assert optimizer_of(cli).defaults["state_dtype"] == "bfloat16"


@pytest.mark.usefixtures("base")
@pytest.mark.parametrize("name", ["four_gpus", "eight_gpus"])
def test_settings_on_four_and_eight_gpus(name: str) -> None:
    cli = build(*configured(name), "--trainer.devices", str(GPUS[name]))
    strategy, trainer = cli.trainer.strategy, cli.trainer
    degrees = strategy.mesh_config.resolve(GPUS[name])
    assert (degrees.data_parallel_replicate, degrees.expert_parallel, degrees.data_parallel_shard) == (GPUS[name], 4, 1)
    assert (strategy.parallel.recompute, trainer.precision, trainer.gradient_clip_val) == ("every_2", "bf16-true", 1.0)
    assert optimizer_of(cli).defaults["state_dtype"] == "bfloat16"


def optimizer_of(cli: object) -> Optimizer:
    settings = cli.config["fit"]["model"]["init_args"]["optimizer"]  # type: ignore[attr-defined]
    assert settings["class_path"].rpartition(".")[2] == "StochasticAdamW"
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    return StochasticAdamW([weight], **{k: v for k, v in settings["init_args"].items() if k != "params"})


@pytest.mark.usefixtures("base")
@pytest.mark.parametrize(
    ("name", "recompute", "low", "high"),
    [
        ("one_gpu", "full", 110, 130),
        ("two_gpus", "full", 110, 130),
        ("four_gpus", "every_2", 90, 110),
        ("eight_gpus", "every_2", 90, 110),
    ],
)
def test_it_fits_by_arithmetic(name: str, recompute: str, low: int, high: int) -> None:
    """Less than the 140 GiB of an H200, with what arithmetic leaves out."""
    mesh = MeshConfig(data_parallel_replicate=GPUS[name], expert_parallel=min(4, GPUS[name]))
    strategy = D9DStrategy(
        mesh=mesh,
        parallel=ParallelConfig(recompute=recompute),
        grad_sync=GradSyncConfig(dtype="bfloat16"),
        step_in_backward=name == "one_gpu",
    )
    dtype = torch.uint8 if name == "one_gpu" else torch.bfloat16
    module = Qwen3MoePretraining(preset="30b-a3b", optimizer=lambda groups: StochasticAdamW(groups, state_dtype=dtype))
    model = rank_model(module, strategy, mesh.world_size, rows=ROWS, tokens=4096)
    assert low * GIB < model.peak(0).total < high * GIB


def write_tiny(folder: Path, num_layers: int = 2) -> None:
    """Write a tiny model in the form of Hugging Face, with a tokenizer that has a chat template, and a text."""
    texts = [path.read_text() for path in sorted(EXAMPLES.glob("*.py"))] * 4
    (folder / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=320, special_tokens=["<|end|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token="<|end|>")
    tokenizer.chat_template = CHAT_TEMPLATE
    config = dataclasses.replace(Qwen3MoeConfig.preset("tiny"), vocab_size=len(tokenizer), num_hidden_layers=num_layers)
    torch.manual_seed(0)
    save_huggingface(Qwen3MoeForCausalLM(config), folder / "base")
    tokenizer.save_pretrained(folder / "base")


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that has `base` and `train.jsonl`."""
    monkeypatch.chdir(tmp_path)
    write_tiny(tmp_path)
    return tmp_path


@pytest.mark.jobs
@pytest.mark.parametrize("name", ["one_gpu", "two_gpus"])
def test_a_tiny_model_trains(tiny: Path, name: str) -> None:
    losses = losses_of(tiny, name)
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 0.5
    export = tiny / f"30b_a3b_{name}_output" / "export"
    assert json.loads((export / "config.json").read_text())["model_type"] == "qwen3_moe"
    assert list(export.glob("*.safetensors"))


@pytest.mark.jobs
def test_eight_processes_train_as_one(tiny: Path) -> None:
    exact = (
        *("--trainer.precision", "32-true", "--trainer.max_steps", str(STEPS_BESIDE_ONE_PROCESS)),
        *("--trainer.limit_val_batches", "0", "--model.optimizer.state_dtype", "float32"),
        *("--trainer.strategy.grad_sync.dtype", "float32", "--model.lr_scheduler.warmup_steps", "1"),
    )
    losses = losses_of(tiny, "eight_gpus", *exact, "--data.batch_size", "1")
    alone = ("--trainer.devices", "1", "--trainer.default_root_dir", "alone", "--data.batch_size", "8")
    degrees = ("--trainer.strategy.mesh.data_parallel_replicate", "1", "--trainer.strategy.mesh.expert_parallel", "1")
    expected = losses_of(tiny, "eight_gpus", *exact, *alone, *degrees, output="alone")
    assert len(losses) == STEPS_BESIDE_ONE_PROCESS
    assert losses == pytest.approx(expected, abs=tolerance_for(Kind.LOSS, torch.float32).absolute)


def losses_of(folder: Path, name: str, *options: str, output: str = "") -> list[float]:
    """Return the losses of the steps of a fit, from its logger."""
    variables = {"PYTHONPATH": python_path(), "LIGHTNING_D9D_CACHE": str(folder / "cache")}
    settings = (*configured(name), *configured("tiny"), *options)
    result = run_command("fit", *settings, folder=folder, variables=variables, forks=True)
    assert result.returncode == 0, result.stderr
    (metrics,) = (folder / (output or f"30b_a3b_{name}_output")).glob("lightning_logs/version_*/metrics.csv")
    with metrics.open() as file:
        return [float(row["train_loss"]) for row in csv.DictReader(file) if row["train_loss"]]
