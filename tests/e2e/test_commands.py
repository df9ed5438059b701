"""The commands of the README as a user types them: script, command line, launchers, notebook, and what they refuse."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import lightning
import nbformat
import pytest
import torch
import yaml
from nbclient import NotebookClient

from lightning_d9d.cli import main
from lightning_d9d.state import read_tensors
from tests.harness.compare import assert_close_named
from tests.harness.warm import python_path, run_command

EXAMPLES = Path(__file__).parents[2] / "examples" / "qwen3_moe"
FIT = ("lightning_d9d.cli", "fit", "--config", str(EXAMPLES / "tiny.yaml"))
SHORT = (
    *("--trainer.max_steps", "4", "--trainer.val_check_interval", "2", "--trainer.limit_val_batches", "1"),
    *(
        "--trainer.accelerator",
        "cpu",
        "--trainer.devices",
        "2",
        "--data.batch_size",
        "2",
        "--data.sequence_length",
        "32",
    ),
)
NUM_TOKENS = 8
"""The length of samples of text; to generate a character takes as long as a forward."""
TIMEOUT_SECONDS = 600
"""The limit of a command, longer than a busy machine needs."""

pytestmark = [pytest.mark.jobs, pytest.mark.timeout(2 * TIMEOUT_SECONDS)]


def assert_results(folder: Path, picture: str, export: str) -> None:
    assert (folder / picture).read_bytes().startswith(b"\x89PNG")
    assert json.loads((folder / export / "config.json").read_text())["model_type"] == "qwen3_moe"
    assert sum(file.stat().st_size for file in (folder / export).glob("*.safetensors")) > 4 * 1_800_000
    assert (folder / "checkpoints" / "last.ckpt").exists()


def with_short_text(folder: Path) -> tuple[str, str]:
    """Return arguments that give the callbacks of `tiny.yaml` again, with a short sample of text."""
    callbacks = yaml.safe_load((EXAMPLES / "tiny.yaml").read_text())["trainer"]["callbacks"]
    sample = next(each for each in callbacks if each["class_path"] == "TextSample")
    sample["init_args"]["num_tokens"] = NUM_TOKENS
    config = folder / "short.yaml"
    config.write_text(yaml.safe_dump({"trainer": {"callbacks": callbacks}}))
    return "--config", str(config)


def test_quickstart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    leftover = tmp_path / "checkpoints" / "last.ckpt"
    leftover.parent.mkdir()
    leftover.write_text("of an earlier run")
    options = ("--max_steps", "5", "--num_tokens", str(NUM_TOKENS), "--output", str(tmp_path))
    script = "examples.qwen3_moe.quickstart"
    result = run_command(*options, folder=EXAMPLES.parents[1], variables={}, module=script, seconds=TIMEOUT_SECONDS)
    assert result.returncode == 0, result.stderr
    milestones = [
        "training starts at step 0 of 5",
        "interrupted at step 4",
        "training starts at step 4 of 5",
        f"--- {NUM_TOKENS} generated tokens ---",
        "steps 5, ",
        "unigram entropy 3.",
    ]
    places = [result.stdout.find(milestone) for milestone in milestones]
    assert -1 not in places, result.stdout
    assert places == sorted(places)
    for metric in ("train_loss", "tokens_per_s", "val_loss", "val_perplexity"):
        assert f"{metric}=" in result.stdout + result.stderr
    assert_results(tmp_path, "loss_curve.png", "huggingface")
    shorter = [("--max-new-tokens", str(NUM_TOKENS)), (), with_short_text(tmp_path)]
    commands = [shlex.split(line.split(":  ")[1]) for line in result.stdout.split("What next:")[1].strip().splitlines()]
    printed = []
    for (python, flag, module, *arguments), more in zip(commands, shorter, strict=True):  # in this process: faster
        assert [str(Path(python).absolute()), flag, module] == [
            sys.executable,
            "-m",
            "lightning_d9d.cli",
        ]  # short below here
        monkeypatch.setattr(sys, "argv", ["lightning-d9d", *arguments, *more])
        monkeypatch.setenv("QUICKSTART_OUTPUT", str(tmp_path))
        main()
        printed.append(capsys.readouterr())
    assert printed[0].out.startswith("def ")
    assert printed[1].out.startswith("perplexity ")
    assert f"--- {NUM_TOKENS} generated tokens ---" in printed[2].out
    assert (tmp_path / "yaml" / "export" / "model.safetensors").exists()


@pytest.mark.parametrize("launcher", ["torchrun", "lightning"])
def test_yaml_on_two_processes(launcher: str, tmp_path: Path):
    """Ranks are forks, with their imports made; `test_shutdown.py` has some that make their own."""
    variables = {"QUICKSTART_OUTPUT": str(tmp_path), "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()}
    fit = (*FIT, *with_short_text(tmp_path))
    if launcher == "torchrun":
        module, arguments = "torch.distributed.run", ("--standalone", "--nproc-per-node", "2", "-m", *fit, *SHORT)
    else:
        module, arguments = fit[0], (*fit[1:], "--config", str(EXAMPLES / "pipeline.yaml"), *SHORT)
    how = {"folder": tmp_path, "variables": variables, "module": module, "seconds": TIMEOUT_SECONDS}
    result = run_command(*arguments, **how, forks=True)
    assert result.returncode == 0, result.stderr
    assert "All distributed processes registered. Starting with 2 processes" in result.stderr
    assert "max_steps=4` reached" in result.stderr
    assert_results(tmp_path / "yaml", "loss_curve.png", "export")
    assert "max_steps: 4" in (tmp_path / "yaml" / "config.yaml").read_text()


def test_empty_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    arguments = [*FIT[1:], *SHORT, "--trainer.devices", "1", "--data.directory", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["lightning-d9d", *arguments])
    monkeypatch.setenv("QUICKSTART_OUTPUT", str(tmp_path / "output"))
    with pytest.raises(SystemExit, match="2"):
        main()
    said = capsys.readouterr().err
    assert f"directory={str(tmp_path)!r} and pattern='**/*.py'" in said
    assert "correct the path or the pattern" in said
    assert "Traceback" not in said


def test_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """The notebook's commands run in this process, which takes less time."""
    for name, value in {
        "QUICKSTART_MAX_STEPS": "2",
        "QUICKSTART_OUTPUT": str(tmp_path),
        "OMP_NUM_THREADS": "1",
        "JUPYTER_PLATFORM_DIRS": "1",
    }.items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(EXAMPLES / "quickstart.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    commands = [line for line in notebook.cells.pop().source.splitlines() if line.startswith("!")]
    [sampling] = [cell for cell in notebook.cells if "num_tokens=200" in cell.source]
    sampling.source = sampling.source.replace("=200", f"={NUM_TOKENS}")
    NotebookClient(notebook, timeout=TIMEOUT_SECONDS, resources={"metadata": {"path": str(EXAMPLES)}}).execute()
    assert_results(tmp_path / "notebook", "loss_curve.png", "huggingface")
    printed = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ()))
    assert "stopped at step 2, validation loss" in printed
    for line, said in zip(commands, ("def ", "perplexity "), strict=True):
        words = shlex.split(line.format(sys=sys, output=tmp_path / "notebook", L=lightning))
        assert words[:3] == [f"!{sys.executable}", "-m", "lightning_d9d.cli"]
        words = [str(NUM_TOKENS) if word == "100" else word for word in words]
        monkeypatch.setattr(sys, "argv", ["lightning-d9d", *words[3:]])
        main()
        assert capsys.readouterr().out.startswith(said)


def test_predict_writes_files_unless_it_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Two processes, then this one alone, which takes less time."""
    predict = ("predict", *FIT[2:], *SHORT, "--trainer.limit_predict_batches")
    variables = {"QUICKSTART_OUTPUT": str(tmp_path)}
    result = run_command(*predict, "2", folder=tmp_path, variables=variables, forks=True)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("predict uses the model's initial weights; give --ckpt_path") == 1
    folder = tmp_path / "yaml" / "predictions"
    assert f"wrote 8 rows of predictions to {folder}" in result.stderr
    rows = torch.cat([tensor for _, tensor in read_tensors(folder)])
    assert rows.shape == (8, 32, 256)

    def predict_here(*options: str | Path, output: Path) -> None:
        alone = ("4", "--trainer.devices", "1")
        monkeypatch.setattr(sys, "argv", ["lightning-d9d", *map(str, (*predict, *alone, *options))])
        monkeypatch.setenv("QUICKSTART_OUTPUT", str(output))
        main()

    with pytest.raises(SystemExit, match="2"):
        predict_here(output=tmp_path)
    assert (
        "it already exists and is not an empty directory; choose another path or set overwrite=True"
        in capsys.readouterr().err
    )
    predict_here("--predictions.directory", tmp_path / "other", output=tmp_path)
    assert_close_named("rows", torch.cat([tensor for _, tensor in read_tensors(tmp_path / "other")]), rows)
    predict_here("--predictions.write", "false", output=tmp_path / "none")
    assert not [*(tmp_path / "none").rglob("*.safetensors")]
