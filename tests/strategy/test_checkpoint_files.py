"""Lightning's own files: never torn, whatever they replace, and never taken for complete ones before they are."""

from __future__ import annotations

import functools
import http.server
import os
import pickle
import shutil
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from lightning_d9d import D9DStrategy, StateError, convert
from lightning_d9d.callbacks import InitialWeights
from lightning_d9d.checkpoint import MODEL, is_directory, save_directory
from lightning_d9d.cli.commands import parse
from lightning_d9d.strategy.checkpoint_files import AtomicFileIO, mapped, read_checkpoint, read_value
from lightning_d9d.strategy.weights import overwrite_weights
from tests.checkpoint.hostile import packed_again, saved
from tests.checkpoint.test_killed import loaded
from tests.harness.forked import killed_at
from tests.strategy.plain import Plain, loader, trainer
from tests.strategy.staged import Staged


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
    call, killed, path = 0, True, None
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


class Malicious:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path.with_name("executed")),)


@pytest.fixture
def malicious(tmp_path: Path) -> Path:
    """A complete checkpoint, with something else in it."""
    path = tmp_path / "step.ckpt"
    run = trainer(D9DStrategy(), max_epochs=1)
    run.fit(Plain(), loader(16))
    run.save_checkpoint(path)
    torch.save({**torch.load(path, weights_only=True), "more": Malicious(path)}, path)
    return path


@pytest.fixture
def address(malicious: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address at which a server has the malicious file."""
    monkeypatch.setenv("TORCH_HOME", str(malicious.parent / "cache"))
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(malicious.parent))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}/{malicious.name}"
        server.shutdown()


def fit(path: Any, **options: Any) -> None:
    trainer(D9DStrategy()).fit(Plain(), loader(16), ckpt_path=path, **options)


def fit_from_its_weights(path: Any) -> None:
    trainer(D9DStrategy(), callbacks=[InitialWeights(path)]).fit(Plain(), loader(16))


def convert_it(path: Any) -> None:
    convert.main(parse("convert", [str(path), str(path.with_name("huggingface"))]))


READERS: dict[str, tuple[Callable[[Any], Any], type[Exception]]] = {
    "ckpt_path": (fit, StateError),
    "InitialWeights": (fit_from_its_weights, StateError),
    "load_from_checkpoint": (Staged.load_from_checkpoint, pickle.UnpicklingError),
    "convert": (convert_it, StateError),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_file_runs_no_code(malicious: Path, reader: str) -> None:
    read, error = READERS[reader]
    with pytest.raises(error, match=r"posix\.mkdir"):
        read(malicious)
    assert not malicious.with_name("executed").exists()


@pytest.mark.parametrize("reader", ["ckpt_path", "load_from_checkpoint"])
def test_a_file_from_http_runs_no_code(malicious: Path, address: str, reader: str) -> None:
    read, error = READERS[reader]
    with pytest.raises(error, match=r"posix\.mkdir"):
        read(address)
    assert not malicious.with_name("executed").exists()


def test_a_file_runs_code_where_the_user_says_so(malicious: Path) -> None:
    fit(malicious, weights_only=False)
    assert malicious.with_name("executed").exists()


@pytest.mark.parametrize("save", [torch.save, lambda state, path: save_directory(path, as_in_a_directory(state), {})])
def test_a_part_is_refused_from_a_file_as_from_a_directory(tmp_path: Path, save: Callable[[Any, Path], None]) -> None:
    state = nn.BatchNorm1d(2).state_dict()
    save({"state_dict": {**state, "num_batches_tracked": torch.tensor(2.5)}}, tmp_path / "float.ckpt")
    module = nn.BatchNorm1d(2)
    with pytest.raises(StateError, match=r"num_batches_tracked is torch.float32 in the checkpoint, torch.int64 in the"):
        overwrite_weights(module, tmp_path / "float.ckpt")
    assert module.num_batches_tracked == 0
    overwrite_weights(module, tmp_path / "float.ckpt", prefix="weight")
    save({"state_dict": state}, tmp_path / "right.ckpt")
    with pytest.raises(StateError, match="is on the meta device; allocate it first"):
        overwrite_weights(module.to("meta"), tmp_path / "right.ckpt")


def as_in_a_directory(content: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {f"{MODEL}{name}": value for name, value in content["state_dict"].items()}


@pytest.mark.parametrize("content", [b"", b".", b"h0", b"junk", b"N.", bytes(range(256)), b"PK\x03\x04junk"])
def test_a_file_that_is_no_checkpoint(tmp_path: Path, content: bytes) -> None:
    """Torch's reader fails in its own way for each."""
    path = tmp_path / "no.ckpt"
    path.write_bytes(content)
    assert read_value(path, "epoch") is None
    with pytest.raises(StateError, match="cannot be read"):
        read_checkpoint(functools.partial(mapped, path), path)


def test_a_file_that_holds_no_mapping_has_no_value(tmp_path: Path) -> None:
    torch.save(torch.ones(2), tmp_path / "tensor.ckpt")
    assert read_value(tmp_path / "tensor.ckpt", "epoch") is None
    torch.save({"epoch": 3}, tmp_path / "old.ckpt", _use_new_zipfile_serialization=False)
    assert read_value(tmp_path / "old.ckpt", "epoch") == 3


def test_a_traceback_does_not_steer_a_terminal(tmp_path: Path) -> None:
    """Torch's error, which is the cause, names what the file asks for."""
    path, asks = tmp_path / "no.ckpt", b"\x80\x02}X\x0a\x00\x00\x00state_dictcevil\x1b[2J\nx\ns."
    path.write_bytes(packed_again(saved({"state_dict": {}}), lambda _: asks))
    with pytest.raises(StateError, match=r"holds an object of evil\\x1b\[2J.x") as caught:
        read_checkpoint(functools.partial(mapped, path), path)
    assert isinstance(caught.value.__cause__, pickle.UnpicklingError)
    assert "\x1b" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("read", [fit, lambda path: overwrite_weights(Plain(), path)])
def test_what_is_no_checkpoint_is_named_once(tmp_path: Path, read: Callable[[Any], Any]) -> None:
    (tmp_path / "wrong").mkdir()
    (tmp_path / "junk.ckpt").write_text("junk")
    for path in (tmp_path / "wrong", tmp_path / "junk.ckpt", tmp_path / "gone.ckpt"):
        with pytest.raises(StateError) as caught:
            read(path)
        assert str(caught.value).count(str(path)) == 1
