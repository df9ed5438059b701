"""What a user sees of a mistake on the command line or in a file: the whole of it, and how early."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import lightning as L
import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

import lightning_d9d
from lightning_d9d.cli import D9DCLI, SUBCOMMANDS, main
from lightning_d9d.cli.commands import DTYPES
from lightning_d9d.models.qwen3_moe.presets import PRESETS
from lightning_d9d.state import DTYPE_NAMES
from tests.harness import warm

RUN = """\
model:
  class_path: Qwen3MoePretraining
  init_args:
    preset: tiny
    learning_rate: 1e-3
data:
  class_path: ByteTextDataModule
  init_args:
    batch_size: 8
trainer:
  max_steps: 4
  accelerator: cpu
  logger: false
  strategy:
    class_path: D9DStrategy
    init_args:
      microbatch_size: 4
  callbacks:
  - class_path: TextSample
    init_args:
      context_length: ${data.init_args.sequence_length}
"""
FIT = ("fit", "--config", "run.yaml")
QUIET = (
    *("--trainer.enable_progress_bar", "false", "--trainer.enable_model_summary", "false"),
    *("--trainer.limit_val_batches", "0"),
)
MODEL_TAKES = (
    "Qwen3MoePretraining takes config, preset, learning_rate, weight_decay, betas, warmup_steps, "
    "final_learning_rate_fraction, pretrained, layers_per_stage, virtual_layers_before, virtual_layers_after, balance, "
    "shift_labels, optimizer, lr_scheduler, parameter_groups, peft\n"
)
MESH_TAKES = (
    "trainer.strategy.mesh takes pipeline_parallel, data_parallel_replicate, data_parallel_shard, "
    "context_parallel_shard, context_parallel_replicate, tensor_parallel, expert_parallel\n"
)
SCHEDULES = "['1f1b', 'dual_pipe_v', 'gpipe', 'interleaved_1f1b', 'looped_bfs', 'zero_bubble', 'zero_bubble_v']"
BEFORE_TORCH = {
    ("fitt",): f"subcommand 'fitt' is unknown; did you mean 'fit'?\nchoose one of {', '.join(SUBCOMMANDS)}\n",
    ("fit", "--config", "rum.yaml"): "rum.yaml does not exist; did you mean 'run.yaml'?\n",
    ("fit", "-c", "no/run.yaml"): "no/run.yaml does not exist, nor does its folder\n",
    ("fit", "--config=broken.yaml"): (
        "broken.yaml, line 3, column 6: not YAML: did not find expected ',' or ']' while parsing a flow sequence, "
        "which begins on line 2\n"
    ),
    ("validate", "--config", "list.yaml"): (
        "list.yaml has no settings; it must be a mapping such as `trainer: {max_steps: 100}`\n"
    ),
    (*FIT, "--ckpt_path", "las.ckpt"): (
        "--ckpt_path: las.ckpt does not exist; did you mean 'last.ckpt'?\n"
        "give the path of a checkpoint, or one of last, hpc, auto\n"
    ),
    (*FIT, "--ckpt_path", "best"): (
        "--ckpt_path best: only the process that trained knows which checkpoint was best\n"
        "give its path; ModelCheckpoint's filename can have the monitored value\n"
    ),
}
TAKES = "it takes --help, --base, --tokenizer, --dtype, --device, "
BEFORE_TORCH |= {
    ("convert",): (
        "lightning-d9d convert needs source and target\n"
        "source: Hugging Face directory (or URL), checkpoint directory or .ckpt file\n"
        "target: directory (or URL) for Hugging Face's form, or a name that ends with .ckpt\n"
    ),
    ("convert", "a", "b", "--dtype", "float8"): (
        "--dtype must be 'bfloat16', 'float16', 'float32' or 'float64', not 'float8'; did you mean 'float64'?\n"
    ),
    ("convert", "a", "b", "--overwrit"): (
        "lightning-d9d convert has no option '--overwrit'; did you mean '--overwrite'?\n"
        "it takes --help, --dtype, --max-shard-size, --fused-experts, --adapter, --base, --tokenizer, --weights-only, "
        "--overwrite, --no-verify\n"
    ),
    ("convert", "a", "b", "c"): ("lightning-d9d convert does not take 'c'\nit takes source and target, and options\n"),
    ("convert", "a", "b", "--overwrite=yes"): "--overwrite takes no value, but got 'yes'\n",
    ("doctor", "--gpu=1"): "lightning-d9d doctor has no option '--gpu'\nit takes --help, --measure\n",
    ("plan", "--worldsize=8", "--config", "run.yaml"): (
        "lightning-d9d plan has no option '--worldsize'; did you mean '--world_size'?\n"
        "it takes --help, --world_size, --gpu, --gpus_per_node, --rows, --tokens, --expert_load, --search, "
        "--json, --page, --yaml, and those of fit\n"
    ),
    ("doctor", "now"): "lightning-d9d doctor does not take 'now'\nit takes no arguments\n",
    ("generate", "model", "--promt", "x"): (
        "lightning-d9d generate has no option '--promt'; did you mean '--prompt'?\n"
        f"{TAKES}--prompt, --max-new-tokens, --temperature, --top-k, --top-p, --seed, --no-stop\n"
    ),
    ("generate", "model"): (
        "lightning-d9d generate needs --prompt\n--prompt: what the text begins with; - reads it from standard input\n"
    ),
    ("generate", "model", "--prompt", "x", "--max-new-tokens", "ten"): (
        "--max-new-tokens must be a whole number, not 'ten'\n"
    ),
    ("generate", "model", "--prompt", "x", "--temperature", "1,5"): "--temperature must be a number, not '1,5'\n",
    ("generate", "model", "--prompt", "--seed", "1"): (
        "--prompt needs a value; one that begins with - is --prompt=VALUE\n"
    ),
    ("evaluate", "model", "text.txt", "--dtype"): (
        "--dtype needs a value: 'bfloat16', 'float16', 'float32' or 'float64'\n"
    ),
    ("generate", "nothere", "--prompt", "x"): (
        "nothere does not exist\nsource: Hugging Face directory, checkpoint directory or .ckpt file of a Qwen3\n"
    ),
    ("evaluate", ".", "rum.yaml"): (
        "rum.yaml does not exist; did you mean 'run.yaml'?\ntext: UTF-8 files; each is a text of its own\n"
    ),
    ("convert", "las.ckpt", "out"): (
        "las.ckpt does not exist; did you mean 'last.ckpt'?\n"
        "source: Hugging Face directory (or URL), checkpoint directory or .ckpt file\n"
    ),
    ("generate", ".", "--prompt", "x", "--top-k", "5"): (
        "--top-k needs a --temperature above 0, such as --temperature 1.0: at 0 nothing is drawn\n"
    ),
    ("learning-rate", "--config", "run.yaml"): (
        "lightning-d9d learning-rate needs a picture first, which ends in .png, .svg or .html\n"
        "such as lightning-d9d learning-rate rates.png --config run.yaml; options are those of fit\n"
    ),
    ("evaluate", "model"): "lightning-d9d evaluate needs text\ntext: UTF-8 files; each is a text of its own\n",
    ("evaluate", "model", "text.txt", "--batchsize", "2"): (
        "lightning-d9d evaluate has no option '--batchsize'; did you mean '--batch-size'?\n"
        f"{TAKES}--context-length, --batch-size\n"
    ),
}
ON_THE_COMMAND_LINE = {
    ("--trainer.max_stepz", "2"): (
        "--trainer.max_stepz: trainer has no option 'max_stepz'; did you mean 'max_steps'?\n"
        "`lightning-d9d fit --help` lists what trainer takes\n"
    ),
    ("--trainer.max_step", "2"): (
        "--trainer.max_step: trainer has no option 'max_step'; did you mean 'max_steps'?\n"
        "`lightning-d9d fit --help` lists what trainer takes\n"
    ),
    ("--model.config.num_layers", "2"): (
        "--model.config.num_layers: Qwen3MoeConfig has no option 'num_layers'; did you mean 'num_hidden_layers'?\n"
        "`lightning-d9d fit --model.help Qwen3MoePretraining --model.config.help Qwen3MoeConfig` lists what "
        "Qwen3MoeConfig takes\n"
    ),
    ("--model.learnin_rate", "2"): (
        "--model.learnin_rate: Qwen3MoePretraining has no option 'learnin_rate'; did you mean 'learning_rate'?\n"
        + MODEL_TAKES
    ),
    ("--model.layers_per_stage", "four"): "--model.layers_per_stage must be a list or null, not 'four'\n",
    ("--trainer.max_steps", "ten"): "--trainer.max_steps must be a whole number, not 'ten'\n",
    ("--trainer.strategy.mesh.pipeline_paralel", "2"): (
        "--trainer.strategy.mesh.pipeline_paralel: MeshConfig has no option 'pipeline_paralel'; did you mean "
        "'pipeline_parallel'?\n" + MESH_TAKES.replace("trainer.strategy.mesh", "MeshConfig")
    ),
    ("--trainer.strategy.parallel.kernels", "trito"): (
        "--trainer.strategy.parallel.kernels must be 'auto', 'torch' or 'triton', not 'trito'; did you mean 'triton'?\n"
    ),
    ("--model", "NestedArg(key='preset', val='tiny')"): (
        "--model takes the name of a class without its arguments, not \"NestedArg(key='preset', val='tiny')\"\n"
        "in a file write class_path: NestedArg, with the arguments below init_args:; on the command line "
        "--model.class_path NestedArg --model.ARGUMENT VALUE\n"
    ),
    ("--trainer.strategy", "auto", "--trainer.strategy.microbatch_size", "2"): (
        "--trainer.strategy.microbatch_size: trainer.strategy is no class that has arguments; put "
        "--trainer.strategy.class_path CLASS before\n"
    ),
    ("--trainer.callbacks+=EarlyStopping",): (
        "EarlyStopping needs monitor; give --trainer.callbacks.monitor VALUE behind it, or set monitor: VALUE below "
        "its init_args: in a file\n"
    ),
    ("--optimizer", "SGD", "--lr_scheduler", "StepLR"): (
        "StepLR needs step_size; give --lr_scheduler.step_size VALUE behind it, or set step_size: VALUE below its "
        "init_args: in a file\n"
    ),
    ("--model.optimizer", "AdamW", "--model.lr_scheduler", "OneCycleLR"): (
        "OneCycleLR needs max_lr; give --model.lr_scheduler.max_lr VALUE behind it, or set max_lr: VALUE below its "
        "init_args: in a file\n"
    ),
    ("--model.optimizer", "AdamW", "--model.lr_scheduler", "ReduceLROnPlateau"): (
        "--model.lr_scheduler: several classes have the name ReduceLROnPlateau; give the full one: "
        "torch.optim.lr_scheduler.ReduceLROnPlateau or lightning.pytorch.cli.ReduceLROnPlateau\n"
    ),
    ("--model", "my_package.Model"): (
        "--model: my_package.Model cannot be imported: No module named 'my_package'\n"
        "its package must be installed, or the folder that has it in PYTHONPATH\n"
    ),
    ("--data.batch_size", "${trainer.max_stepz}"): (
        "--data.batch_size: Interpolation key 'trainer.max_stepz' not found; did you mean 'trainer.max_steps'?\n"
        "in files, not in arguments, ${...} is the full name of another value\n"
    ),
    ("more.yaml",): "'more.yaml' follows no option; a configuration file is given with --config more.yaml\n",
    ("--trainer.strategy", "D9DStrategy"): (
        "--trainer.strategy takes a class as --trainer.strategy.class_path D9DStrategy, or as class_path: D9DStrategy "
        "in a file\n"
    ),
    ("--trainer.strategy.schedule", "zero_buble"): (
        f"--trainer.strategy.schedule: schedule='zero_buble' is unknown; choose one of {SCHEDULES}; did you mean "
        "'zero_bubble'?\n"
    ),
    ("--trainer.strategy.schedule", "Auto"): (
        "--trainer.strategy.schedule: schedule='Auto' needs the shape of the batch: class_path: Auto with init_args: "
        "batch_size and sequence_length in a file, or Auto(batch_size=..., sequence_length=...) in Python\n"
    ),
    ("--trainer.max_steps",): "--trainer.max_steps needs a value\n",
    ("--trainer.max_steps", "-5"): (
        "--trainer.max_steps: `max_steps` must be a non-negative integer or -1 (infinite steps). You passed in -5.\n"
    ),
    ("--trainer.devices", "two"): (
        "--trainer.devices: `devices` selected with `CPUAccelerator` should be an int > 0.\n"
    ),
    ("--trainer.strategy.grad_sync.bucket_mb", "-1"): (
        "--trainer.strategy.grad_sync.bucket_mb: GradSyncConfig.bucket_mb=-1.0 must be greater than 0\n"
    ),
    ("--optimizer", "AdamW"): (
        "--optimizer: learning_rate=0.001 of Qwen3MoePretraining has no effect beside `optimizer`, which has "
        "its own settings; set them in `optimizer` or `lr_scheduler`, or leave `optimizer` out\n"
    ),
    ("--model.optimizer", "AdamW", "--model.optimizer.lrr", "1"): (
        "--model.optimizer.lrr: AdamW has no option 'lrr'; did you mean 'lr'?\n"
        "AdamW takes lr, betas, eps, weight_decay, amsgrad, maximize, foreach, capturable, differentiable, fused\n"
    ),
    ("--lr_scheduler", "WarmupStableDecayLR"): (
        "--lr_scheduler: `lr_scheduler` of Qwen3MoePretraining has no effect without `optimizer`; set that, such as "
        "AdamW with lr\n"
    ),
    ("--trainer.strategy.microbatch_size", "3", *QUIET): (
        "--trainer.strategy.microbatch_size: the first batch has 8 rows, which microbatch_size=3 does not divide; "
        "choose microbatch_size from [1, 2, 4, 8] or change the DataLoader's `batch_size`\n"
    ),
    ("--data.batch_size", "6", *QUIET): (
        "--data.batch_size: the first batch has 6 rows, which microbatch_size=4 does not divide; choose "
        "microbatch_size from [1, 2, 3, 6] or change the DataLoader's `batch_size`\n"
    ),
    ("--trainer.val_check_interval", "5", "--trainer.limit_train_batches", "3", *QUIET[:4]): (
        "--trainer.val_check_interval: val_check_interval=5 is more than the 3 training batches of an epoch; choose at "
        "most 3, or set check_val_every_n_epoch to null, which counts batches over epochs\n"
    ),
    ("--trainer.strategy.mesh.pipeline_parallel", "2", "--trainer.devices", "3"): (
        "--trainer.strategy.mesh.pipeline_parallel: MeshConfig.pipeline_parallel=2 does not divide 3 ranks: the "
        "nearest that fit are 1 and 3\n"
    ),
}
ON_THE_COMMAND_LINE |= {
    ("--model.pretrained", "models/qwen", "--trainer.devices", "2"): (
        "--model.pretrained: pretrained='models/qwen' does not exist; give the directory of a model saved as "
        "safetensors; did you mean 'qwen3'?\n"
    ),
    ("--model.pretrained", "models/qwen3"): (
        "--model.pretrained: pretrained='models/qwen3' cannot be read: models/qwen3 has neither model.safetensors nor "
        "model.safetensors.index.json; give the directory of a model saved as safetensors.\n"
    ),
    ("--model.pretrained", "Qwen/Qwen3-0.6B"): (
        "--model.pretrained: pretrained='Qwen/Qwen3-0.6B' does not exist, nor does its folder; fetch a model of "
        "Hugging Face's hub by `hf download Qwen/Qwen3-0.6B --local-dir DIRECTORY`\n"
    ),
    ("--data", "ChatDataModule", "--data.train", "a.jsonl", "--data.tokenizer", "models/qwen"): (
        "--data.tokenizer: tokenizer='models/qwen' does not exist; give another directory, or a name on Hugging Face's "
        "hub; did you mean 'qwen3'?\n"
    ),
    ("--data", "TokenDataModule", "--data.files", "a.txt", "--data.tokenizer", "./model/qwen3"): (
        "--data.tokenizer: tokenizer='./model/qwen3' does not exist, nor does its folder; give another directory, or a "
        "name on Hugging Face's hub; did you mean 'models'?\n"
    ),
    (
        "--trainer.callbacks+=HuggingFaceExport",
        "--trainer.callbacks.directory=out",
        "--trainer.callbacks.tokenizer=t",
    ): (
        "--trainer.callbacks.tokenizer: tokenizer='t' does not exist; give the directory in which a tokenizer was "
        "saved\n"
    ),
    ("--trainer.callbacks+=InitialWeights", "--trainer.callbacks.path=las.ckpt"): (
        "--trainer.callbacks.path: path='las.ckpt' does not exist; give a checkpoint directory or a Lightning file; "
        "did you mean 'last.ckpt'?\n"
    ),
}
INSIDE_OF_A_VALUE = {
    ("--data.init_args", "{batch_size: eight}"): (
        "--data.init_args: data.batch_size must be a whole number or null, not 'eight'\n"
    ),
    ("--config", "{trainer: {max_steps: ten}}"): "--config: trainer.max_steps must be a whole number, not 'ten'\n",
    ("--config", "{trainer: {max_stepz: 10}}"): (
        "--config: trainer has no option 'max_stepz'; did you mean 'max_steps'?\n"
        "`lightning-d9d fit --help` lists what trainer takes\n"
    ),
    ("--trainer.callbacks+={class_path: TextSample, init_args: {context_length: ten}}",): (
        "--trainer.callbacks+: trainer.callbacks.context_length must be a whole number, not 'ten'\n"
    ),
    ("--trainer.strategy.mesh", "{pipeline_parallel: 3}"): (
        "--trainer.strategy.mesh: MeshConfig.pipeline_parallel=3 does not divide 1 rank: at most 1 fits\n"
    ),
    ("--model", "{class_path: Qwen3MoePretraining, init_args: {preset: tiny, warmup_steps: -1}}"): (
        "--model: Qwen3MoePretraining got warmup_steps=-1; it must be at least 0\n"
    ),
}
"""Mistakes in a mapping that an option has as its value; `run.yaml` has another value for most of them."""
IN_THE_FILE = {
    ("  - class_path: TextSample\n", "  - class_path: EarlyStopping\n  - class_path: TextSample\n"): (
        "run.yaml, line 19: EarlyStopping needs monitor; set monitor: VALUE below its init_args:\n"
    ),
    ("    learning_rate: 1e-3\n", "    lr_scheduler: {class_path: OneCycleLR}\n"): (
        "run.yaml, line 5: OneCycleLR needs max_lr; set max_lr: VALUE below its init_args:\n"
    ),
    ("    learning_rate: 1e-3\n", "    optimizer: {class_path: Muon}\n"): (
        "run.yaml, line 5: `optimizer` cannot be made: Muon only supports 2D parameters whereas we found a parameter "
        "with size: torch.Size([8, 256, 128]); MuonAdamW takes all parameters, those that are not matrices with AdamW\n"
    ),
    (
        "    learning_rate: 1e-3\n",
        "    optimizer: {class_path: AdamW}\n    lr_scheduler: {class_path: OneCycleLR, init_args: {max_lr: 0.1}}\n",
    ): (
        "run.yaml, line 6: `lr_scheduler` cannot be made: You must define either total_steps OR (epochs AND "
        "steps_per_epoch); the run has 4 optimizer steps\n"
    ),
    ("max_steps", "max_stepz"): (
        "run.yaml, line 11: trainer has no option 'max_stepz'; did you mean 'max_steps'?\n"
        "`lightning-d9d fit --help` lists what trainer takes\n"
    ),
    ("trainer:", "trainr:"): (
        "run.yaml, line 10: lightning-d9d fit has no option 'trainr'; did you mean 'trainer'?\n"
        "lightning-d9d fit takes config, seed_everything, trainer, model, data, predictions, optimizer, lr_scheduler, "
        "ckpt_path, weights_only\n"
    ),
    ("learning_rate", "learnin_rate"): (
        "run.yaml, line 5: Qwen3MoePretraining has no option 'learnin_rate'; did you mean 'learning_rate'?\n"
        + MODEL_TAKES
    ),
    ("context_length", "context_lenght"): (
        "run.yaml, line 21: TextSample has no option 'context_lenght'; did you mean 'context_length'?\n"
        "TextSample takes prompt, num_tokens, temperature, context_length, seed, tokenizer\n"
    ),
    (
        "batch_size: 8",
        "batch_size: eight",
    ): "run.yaml, line 9: data.batch_size must be a whole number or null, not 'eight'\n",
    ("preset: tiny", "preset: tinny"): (
        f"run.yaml, line 4: preset='tinny' is unknown; choose one of {', '.join(map(repr, PRESETS))}, or the "
        "path of a Hugging Face config.json; did you mean 'tiny'?\n"
    ),
    ("sequence_length}", "sequence_lenght}"): (
        "run.yaml, line 21: Interpolation key 'data.init_args.sequence_lenght' not found; did you mean "
        "'data.init_args.sequence_length'?\nin files, not in arguments, ${...} is the full name of another value\n"
    ),
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(RUN)
    (tmp_path / "broken.yaml").write_text("trainer:\n  callbacks: [LossCurve\nmodel: Qwen3MoePretraining\n")
    (tmp_path / "list.yaml").write_text("- 1\n")
    (tmp_path / "last.ckpt").touch()
    (tmp_path / "models" / "qwen3").mkdir(parents=True)
    return tmp_path


def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What is printed but for Lightning's line about the seed."""
    monkeypatch.setattr(sys, "argv", ["lightning-d9d", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    printed = capsys.readouterr()
    assert not printed.out
    return printed.err.replace("Seed set to 0\n", "")


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs the command line in a process that says at its end whether torch was imported."""
    program = "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules)); import runpy; "
    program += "runpy.run_module('lightning_d9d.cli', run_name='__main__')"
    environment = {**os.environ, "PYTHONPATH": warm.python_path(), **variables}
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.jobs
@pytest.mark.parametrize(("arguments", "message"), BEFORE_TORCH.items(), ids=map(" ".join, BEFORE_TORCH))
def test_found_before_torch_is_imported(arguments: tuple[str, ...], message: str) -> None:
    done = run(*arguments)
    assert (done.stderr, done.stdout, done.returncode) == (f"error: {message}", "False\n", 2)


ON_THE_COMMAND_LINE |= INSIDE_OF_A_VALUE


@pytest.mark.parametrize(("arguments", "message"), ON_THE_COMMAND_LINE.items(), ids=map(" ".join, ON_THE_COMMAND_LINE))
def test_on_the_command_line(
    arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal(monkeypatch, capsys, *FIT, *arguments) == f"error: {message}"


@pytest.mark.parametrize(("change", "message"), IN_THE_FILE.items(), ids=(new for _, new in IN_THE_FILE))
def test_in_the_file(
    change: tuple[str, str],
    message: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (folder / "run.yaml").write_text(RUN.replace(*change))
    assert refusal(monkeypatch, capsys, *FIT) == f"error: {message}"


@pytest.mark.parametrize(
    ("key", "wrong", "right"),
    [
        ("trainer.strategy", "D9dStrategy", "D9DStrategy"),
        ("trainer.callbacks", "TextSampel", "TextSample"),
        ("model", "Qwen3MoePretrainin", "Qwen3MoePretraining"),
        ("data", "ByteTextDatamodul", "ByteTextDataModule"),
    ],
)
def test_classes_in_the_file(
    key: str, wrong: str, right: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "run.yaml").write_text(RUN.replace(right, wrong))
    line = RUN[: RUN.index(right)].count("\n") + 1
    first, second = refusal(monkeypatch, capsys, *FIT).splitlines()
    assert first == f"error: run.yaml, line {line}: {key} knows no {wrong!r}; did you mean {right!r}?"
    assert second.startswith("it may be ")
    assert right in second
    assert second.endswith(" or the full name of a class such as my_package.MyClass")


def test_kinds_of_loggers_are_listed_and_no_other_iterables(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = refusal(monkeypatch, capsys, *FIT, "--trainer.logger", "WandbLoger").splitlines()
    assert first == "error: --trainer.logger knows no 'WandbLoger'; did you mean 'WandbLogger'?"
    names = second.removeprefix("it may be ").removesuffix(" or the full name of a class such as my_package.MyClass")
    assert {"CSVLogger", "TensorBoardLogger", "WandbLogger"} <= {*names.split(", ")}
    assert "Artist" not in names
    assert "Loader" not in names


@pytest.mark.parametrize(("callback", "others"), [("EarlyStopping", ""), ("ModelCheckpoint", ", epoch, step")])
def test_a_monitor_that_nothing_logs(
    callback: str, others: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = f"{{class_path: {callback}, init_args: {{monitor: val_los}}}}"
    (folder / "more.yaml").write_text(f"trainer:\n  callbacks:\n  - {chosen}\n")
    short = ("--trainer.limit_train_batches", "1", "--trainer.limit_val_batches", "1", *QUIET[:4])
    printed = refusal(monkeypatch, capsys, *FIT, "--config", "more.yaml", *short)
    assert "Traceback" not in printed
    assert printed.splitlines()[-1] == (
        f"error: more.yaml, line 3: monitor='val_los' of {callback} is not logged; choose one of train_loss, val_loss, "
        f"val_perplexity{others}, or log it with self.log('val_los', ...); did you mean 'val_loss'?"
    )


class OnlyTraining(L.LightningDataModule):
    """A data module that has only a loader for training."""

    def train_dataloader(self) -> DataLoader[int]:
        return DataLoader(range(4))


class Refusing(OnlyTraining):
    """Raises what Lightning would; the message has a value that stands on the command line for something else."""

    def predict_dataloader(self) -> DataLoader[int]:
        raise MisconfigurationException("more than one argument: logger=false")


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (("--data", f"{__name__}.Refusing"), "more than one argument: logger=false"),
        ((), "predict needs data with a predict_dataloader; give --data CLASS, or data: in a file"),
        (
            ("--data", f"{__name__}.OnlyTraining"),
            "--data: OnlyTraining has no predict_dataloader, which predict reads; add that method",
        ),
    ],
)
def test_data_without_the_loader(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    data: tuple[str, ...],
    expected: str,
) -> None:
    settings = ("--model", "Qwen3MoePretraining", "--model.preset", "tiny", "--trainer.accelerator", "cpu")
    monkeypatch.setattr(sys, "argv", ["lightning-d9d", "predict", *settings, "--trainer.logger", "false", *data])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert f"error: {expected}\n" in capsys.readouterr().err


def test_a_process_of_its_own_prints_nothing_else() -> None:
    done = run(*FIT, "--trainer.max_steps", "ten")
    assert (done.stderr, done.returncode) == ("error: --trainer.max_steps must be a whole number, not 'ten'\n", 2)


def test_ranks_but_the_first_of_a_machine_are_short() -> None:
    done = run("fitt", LOCAL_RANK="3", RANK="11")
    assert done.stderr == "error: local rank 3: subcommand 'fitt' is unknown; did you mean 'fit'?\n"
    assert done.returncode == 2


@pytest.mark.parametrize("arguments", [(), ("--help",)])
def test_all_subcommands_have_a_line(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert (done.stderr, done.returncode) == ("", 0)
    for name, (what, _) in SUBCOMMANDS.items():
        assert re.search(rf"^  {name} +{what}$", done.stdout, re.M)
    assert done.stdout.endswith("False\n")  # torch is not imported


def test_fields_of_nested_settings_have_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        D9DCLI(args=["fit", "--trainer.strategy.help", "lightning_d9d.D9DStrategy"])
    printed = " ".join(capsys.readouterr().out.split())
    for text in (
        "--trainer.strategy.parallel.recompute RECOMPUTE Activations that are recomputed in the backward",
        "--trainer.strategy.grad_sync.bucket_mb BUCKET_MB Size of a bucket in MiB",
        "--trainer.strategy.checkpoint.mode {auto,sharded,consolidated} The form of a checkpoint.",
        "--trainer.strategy.timeouts.step_seconds STEP_SECONDS Timeout of collectives from then on.",
    ):
        assert text in printed
    with pytest.raises(SystemExit, match="0"):
        D9DCLI(args=["fit", "--trainer.strategy.help", "D9DStrategy", "--trainer.strategy.mesh.help"])
    assert "Number of pipeline ranks; each holds one or more stages." in " ".join(capsys.readouterr().out.split())


def test_dtypes_of_commands_are_those_of_weights_in_files() -> None:
    """The command line names them by itself, as it must not import torch."""
    assert sorted(DTYPES) == sorted(str(dtype).removeprefix("torch.") for dtype in DTYPE_NAMES)


def test_the_package_has_its_names_though_it_imports_them_late() -> None:
    code = (
        "import sys, lightning_d9d, lightning_d9d.schedule; assert 'torch' not in sys.modules; "
        "from lightning_d9d import *; from lightning_d9d import callbacks; "
        "assert {*lightning_d9d.__all__} <= {*dir(lightning_d9d)} & {*globals()}; print(D9DStrategy.__name__); "
        "import lightning; print(type(lightning.Trainer('cpu', 'd9d', logger=False).strategy).__name__)"
    )
    environment = {**os.environ, "PYTHONPATH": warm.python_path()}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines()
    assert (printed[0], printed[-1]) == ("D9DStrategy", "D9DStrategy")
    with pytest.raises(AttributeError, match="module 'lightning_d9d' has no attribute 'nothing'"):
        _ = lightning_d9d.nothing
