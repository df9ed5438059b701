"""Lightning's own files: never torn, whatever they replace, and never taken for complete ones before they are."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import lightning as L
import pytest
import torch

from lightning_d9d.checkpoint import is_directory, save_directory
from lightning_d9d.strategy.checkpoint_files import AtomicFileIO
from tests.checkpoint.test_killed import killed_at, loaded


def file(path: Path, number: int) -> None:
    AtomicFileIO().save_checkpoint({"number": number}, path)


def directory(path: Path, number: int) -> None:
    save_directory(path, {"a": torch.full((3,), float(number)), "b": torch.tensor(number)}, {"number": number})


def number_of(path: Path) -> int:
    return loaded(path) if is_directory(path) else torch.load(path, weights_only=True)["number"]


@pytest.mark.parametrize("former", [file, directory])
def test_a_killed_save_leaves_the_old_or_the_new(tmp_path: Path, former: Callable[[Path, int], None]) -> None:
    seen, call = [], 0
    while True:
        folder = tmp_path / str(call)
        path = folder / "last.ckpt"
        former(path, 1)
        killed = killed_at(call, folder, lambda path=path: file(path, 2))
        seen.append(number_of(path))
        if not killed:
            break
        file(path, 3)
        assert number_of(path) == 3
        assert os.listdir(folder) == ["last.ckpt"]
        call += 1
    assert os.listdir(folder) == ["last.ckpt"]
    assert seen == sorted(seen)
    assert {1, 2} == set(seen)


@pytest.mark.parametrize("save", [file, directory])
def test_a_killed_save_is_not_what_a_slurm_job_goes_on_from(tmp_path: Path, save: Callable[[Path, int], None]) -> None:
    """Lightning takes the highest number of all names that have `hpc_ckpt_` in them."""
    connector = L.Trainer(default_root_dir=tmp_path, logger=False, accelerator="cpu")._checkpoint_connector
    call, killed = 0, True
    while killed:
        save(tmp_path / "hpc_ckpt_1.ckpt", 1)
        killed = killed_at(call, tmp_path, lambda: save(tmp_path / "hpc_ckpt_2.ckpt", 2))
        path = connector._hpc_resume_path
        assert path is not None
        assert number_of(Path(path)) in (1, 2)
        for each in tmp_path.iterdir():
            shutil.rmtree(each) if each.is_dir() else each.unlink()
        call += 2
    assert path == str(tmp_path / "hpc_ckpt_2.ckpt")
