"""`--ckpt_path` of somebody else's file, on a real command line."""

from __future__ import annotations

import pickle
import stat
import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from jsonargparse import Namespace
from lightning import LightningModule

from lightning_d9d.cli import D9DCLI
from tests.checkpoint import hostile
from tests.fuzz import outcome
from tests.harness.warm import run_command

pytestmark = pytest.mark.jobs

MODULE = """
import pathlib
import lightning as L
import torch

pathlib.Path({mark!r}).write_text("imported")


class Small(L.LightningModule):
    def __init__(self, width: int = 1, rate: float = 0.5) -> None:
        super().__init__()
        self.save_hyperparameters()
        print("width", width, "rate", rate)
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def training_step(self, batch):
        return self.weight.square()

    def train_dataloader(self):
        return [torch.zeros(1)]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.rate)
"""


def write_module(folder: Path, name: str) -> Path:
    mark = folder / f"{name}.imported"
    (folder / f"{name}.py").write_text(MODULE.format(mark=str(mark)))
    return mark


def fit(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    (folder / "run.yaml").write_text(
        "model: {class_path: ours.Small, init_args: {width: 3}}\n"
        f"trainer: {{max_steps: 1, accelerator: cpu, logger: false, default_root_dir: {folder}/out}}\n"
    )
    return run_command("fit", "--config", "run.yaml", *arguments, folder=folder, variables=variables)


def with_checkpoint(folder: Path, **hyperparameters: object) -> str:
    write_module(folder, "ours")
    done = fit(folder, "--trainer.max_steps", "1")
    assert done.returncode == 0, done.stderr
    path = next((folder / "out").rglob("*.ckpt"))
    content = torch.load(path, weights_only=True)
    content["hyper_parameters"].update(hyperparameters)
    torch.save(content, folder / "given.ckpt")
    return "given.ckpt"


def test_a_checkpoint_of_another_class_imports_nothing(tmp_path: Path):
    path = with_checkpoint(tmp_path, _class_path="theirs.Small")
    mark = write_module(tmp_path, "theirs")
    done = fit(tmp_path, "--ckpt_path", path, "--trainer.max_steps", "2")
    assert not mark.exists()
    assert done.returncode == 2
    assert "given.ckpt is a checkpoint of 'theirs.Small', but model is" in done.stderr


def test_the_values_of_the_configuration_win(tmp_path: Path):
    path = with_checkpoint(tmp_path, width=7, rate=0.25)
    done = fit(tmp_path, "--ckpt_path", path, "--trainer.max_steps", "2")
    assert done.returncode == 0, done.stderr
    assert "width 3 rate 0.5" in done.stdout
    assert (done.stdout + done.stderr).count("rate=0.5 (not 0.25), width=3 (not 7)") == 1


def parse(path: Path, **arguments: object) -> object:
    """What the command line does with `--ckpt_path` before anything is built."""
    model = Namespace(class_path="ours.Small", init_args=Namespace(**arguments))
    chosen = Namespace(ckpt_path=str(path), model=model)
    given = SimpleNamespace(_arguments=[], config={"subcommand": "fit", "fit": chosen}, _model_class=LightningModule)
    return D9DCLI._parse_ckpt_path(given)  # type: ignore[arg-type]


def test_a_compressed_checkpoint_takes_no_memory(tmp_path: Path):
    pickled = pickle.dumps({"state_dict": {}, "hyper_parameters": {"width": 1}, "junk": "x" * 300_000_000}, 2)
    archive = hostile.packed_again(hostile.saved({"state_dict": {}}), lambda _: pickled, zipfile.ZIP_DEFLATED)
    assert len(archive) < 2_000_000
    (tmp_path / "given.ckpt").write_bytes(archive)
    assert outcome(lambda: parse(tmp_path / "given.ckpt")) == "StateError"


def test_hyperparameters_that_cannot_be_compared_differ(tmp_path: Path):
    torch.save({"state_dict": {}, "hyper_parameters": {"width": torch.ones(3)}}, tmp_path / "given.ckpt")
    with pytest.warns(UserWarning, match=r"width=1 \(not tensor"):
        parse(tmp_path / "given.ckpt", width=1)


def test_the_saved_configuration_is_for_its_owner_and_has_no_secret(tmp_path: Path):
    write_module(tmp_path, "ours")
    (tmp_path / "more.yaml").write_text("model: {init_args: {width: '${oc.env:SECRET}'}}\n")
    done = fit(tmp_path, "--config", "more.yaml", SECRET="12345")
    assert done.returncode == 0, done.stderr
    assert "width 12345" in done.stdout
    saved = tmp_path / "out" / "config.yaml"
    assert "12345" not in saved.read_text()
    assert yaml.safe_load(saved.read_text())["model"]["init_args"]["width"] == "${oc.env:SECRET}"
    assert stat.S_IMODE(saved.stat().st_mode) == 0o600
    done = fit(tmp_path, "--config", str(saved), SECRET="67890")
    assert "width 67890" in done.stdout


def test_the_saved_configuration_is_not_written_through_a_link(tmp_path: Path):
    write_module(tmp_path, "ours")
    (tmp_path / "out").mkdir()
    (tmp_path / "other").write_text("other")
    (tmp_path / "out" / "config.yaml").symlink_to(tmp_path / "other")
    done = fit(tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "other").read_text() == "other"
    assert "max_steps: 1" in (tmp_path / "out" / "config.yaml").read_text()
