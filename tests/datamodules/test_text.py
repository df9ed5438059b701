"""The byte text data module on small folders, and its resume inside a real Trainer."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_d9d import D9DStrategy
from lightning_d9d.datamodules import ByteTextDataModule, ByteWindows, unigram_entropy
from lightning_d9d.datamodules.text import source_directory, text_files
from lightning_d9d.errors import ConfigError
from tests.datamodules.runs import run_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """40 files of 100 random letters each, in two folders."""
    generator = torch.Generator().manual_seed(0)
    for index in range(40):
        path = tmp_path / "text" / ("even" if index % 2 == 0 else "test") / f"{index}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(torch.randint(97, 123, (100,), generator=generator).tolist()))
    return tmp_path / "text"


def data(folder: Path, **kwargs: Any) -> ByteTextDataModule:
    defaults = {"pattern": "**/*.txt", "sequence_length": 10, "batch_size": 4, "validation_fraction": 0.1}
    module = ByteTextDataModule(str(folder), **defaults | kwargs)
    module.setup()
    return module


def test_windows_predict_every_byte_but_the_first_once():
    text = torch.arange(32, dtype=torch.uint8)
    windows = ByteWindows(text, sequence_length=10)
    assert len(windows) == 3
    assert torch.cat([windows[i]["input_ids"] for i in range(3)]).tolist() == list(range(30))
    assert torch.cat([windows[i]["labels"] for i in range(3)]).tolist() == list(range(1, 31))
    assert windows[2]["labels"].dtype == windows[2]["input_ids"].dtype == torch.int64


def test_every_byte_is_on_one_side(folder: Path):
    module = data(folder)
    assert module.validation_tokens is not None
    assert module.train_tokens is not None
    assert len(module.validation_tokens) == 404  # a tenth of 40 x (100 letters + the closing NUL)
    text = bytes(torch.cat([module.train_tokens, module.validation_tokens]).tolist())
    assert sorted(text.split(b"\0")[:-1]) == sorted(path.read_bytes() for path in folder.rglob("*.txt"))
    # The order mixes the folders and is a function of the relative paths.
    order = sorted(
        folder.rglob("*.txt"), key=lambda path: hashlib.sha256(path.relative_to(folder).as_posix().encode()).digest()
    )
    assert text.split(b"\0")[:-1] == [path.read_bytes() for path in order]


def test_unreadable_files_are_left_out_and_named(folder: Path, caplog: pytest.LogCaptureFixture):
    before = data(folder).train_tokens
    (folder / "\x1b[2Jlatin1.txt").write_bytes(b"se\xf1or")
    assert torch.equal(data(folder).train_tokens, before)  # type: ignore[arg-type]
    assert "\\x1b[2Jlatin1.txt" in caplog.text
    assert "\x1b" not in caplog.text


def test_standard_library_without_its_tests():
    root = source_directory(None)
    names = {path.relative_to(root).as_posix() for path in text_files(None, "**/*.py")}
    assert {"json/decoder.py", "unittest/case.py"} <= names
    assert not any(name.startswith(("test/", "site-packages/")) or "/test/" in name for name in names)
    module = ByteTextDataModule()
    module.setup()
    assert module.train_tokens is not None
    assert len(module.train_tokens) > 2_000_000
    assert 2.5 < module.unigram_entropy < 3.6


def test_unigram_entropy():
    assert unigram_entropy(torch.tensor([7, 7, 200, 200], dtype=torch.uint8)) == pytest.approx(math.log(2), abs=1e-12)
    assert unigram_entropy(torch.zeros(5, dtype=torch.uint8)) == 0


def rows(loader: Any) -> list[tuple[int, ...]]:
    return [tuple(row.tolist()) for batch in loader for row in batch["input_ids"]]


def test_order_depends_on_seed_and_epoch_alone(folder: Path):
    loader, again, other_seed = (data(folder, seed=seed).train_dataloader() for seed in (1, 1, 2))
    first = rows(loader)
    torch.manual_seed(5)
    assert rows(again) == first
    assert rows(other_seed) != first
    again.sampler.set_epoch(1)  # type: ignore[attr-defined]
    second = rows(again)
    assert second != first


def test_data_ranks_share_the_windows(folder: Path):
    def rows_of(rank: int, num_ranks: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        module = data(folder)
        module.trainer = run_of(num_ranks, rank)
        return rows(module.train_dataloader()), rows(module.val_dataloader())

    train, validation = rows_of(0, 1)
    with pytest.warns(UserWarning, match=r"1 of 40 held-out rows of ByteTextDataModule are left out, because 3 data r"):
        parts = [rows_of(rank, 3) for rank in range(3)]
    assert [len(part[0]) for part in parts] == [120, 120, 120]
    assert len({row for part in parts for row in part[0]} & set(train)) == 360
    assert [len(part[1]) for part in parts] == [13, 13, 13]  # of 40: none is counted twice
    assert sorted(row for part in parts for row in part[1]) == sorted(validation[:39])


def test_held_out_windows(folder: Path):
    module = data(folder)
    validation, predict = rows(module.val_dataloader()), rows(module.predict_dataloader())
    assert validation == rows(module.test_dataloader())
    assert validation != predict
    assert sorted(validation) == sorted(predict)
    assert module.validation_tokens is not None
    assert [byte for row in predict for byte in row] == module.validation_tokens[:400].tolist()
    assert set(next(iter(module.predict_dataloader()))) == {"input_ids"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pattern": "*.nothing"}, r"pattern='\*\.nothing'.*correct the path or the pattern"),
        ({"sequence_length": 0}, "sequence_length=0"),
        ({"batch_size": -1}, "batch_size=-1"),
        ({"num_workers": -1}, "num_workers=-1.*at least 0"),
        ({"validation_fraction": 1.0}, "validation_fraction=1.0.*between 0 and 1"),
        (
            {"sequence_length": 1000},
            r"training data of ByteTextDataModule have 3 rows .*=1000.*batch_size=4.*lower sequence_length",
        ),
        ({"validation_fraction": 0.001}, "held-out data of ByteTextDataModule have 0 rows"),
    ],
)
def test_bad_input(folder: Path, arguments: dict[str, Any], message: str):
    def load() -> None:
        module = data(folder, **arguments)
        module.train_dataloader()
        module.val_dataloader()

    with pytest.raises(ConfigError, match=message):
        load()


class Recorder(L.LightningModule):
    """Trains one scalar and keeps the rows that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.rows: list[list[int]] = []

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        self.rows += batch["input_ids"].tolist()
        return self.weight * 1.0

    def validation_step(self, batch: dict[str, Tensor]) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class KnowsItsEnd(Recorder):
    """A data module that knows its end. Under `max_epochs` Lightning then sets up the data before it restores a
    checkpoint."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        assert self.trainer.estimated_stepping_batches == 180
        return super().configure_optimizers()


def test_resume_where_the_module_asked_for_the_number_of_steps(folder: Path, tmp_path: Path):
    def fit(checkpoint: Path | None) -> list[list[int]]:
        trainer = L.Trainer(
            strategy=D9DStrategy(),
            max_epochs=2,
            limit_val_batches=0,
            accelerator="cpu",
            logger=False,
            callbacks=ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=40, save_top_k=-1),
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        module = KnowsItsEnd()
        trainer.fit(module, datamodule=data(folder), ckpt_path=checkpoint)
        return module.rows

    whole = fit(None)
    for step in (40, 120):
        assert fit(tmp_path / f"step={step}.ckpt") == whole[4 * step :]


@pytest.mark.parametrize(
    ("saved", "steps_before", "limit", "num_workers"),
    [  # an epoch has 90 batches, or `limit`
        ("after_step", 30, 1.0, 0),
        ("after_step", 90, 1.0, 0),
        ("after_step", 120, 1.0, 1),
        ("after_step", 60, 60, 0),
        ("after_validation", 90, 1.0, 0),
        ("after_validation", 120, 1.0, 0),
    ],
)
def test_resumed_run_reads_what_an_uninterrupted_one_reads(
    folder: Path, tmp_path: Path, saved: str, steps_before: int, limit: float, num_workers: int
):
    def fit(max_steps: int, resume: bool = False) -> list[list[int]]:
        trainer = L.Trainer(
            strategy=D9DStrategy(),
            max_steps=max_steps,
            limit_train_batches=limit,
            limit_val_batches=1,
            val_check_interval=30,
            accelerator="cpu",
            logger=False,
            callbacks=ModelCheckpoint(
                tmp_path / str(max_steps),
                save_last=True,
                every_n_train_steps=steps_before if saved == "after_step" else None,
                every_n_epochs=1 if saved == "after_validation" else None,
            ),
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        module = Recorder()
        checkpoint = tmp_path / str(steps_before) / "last.ckpt" if resume else None
        trainer.fit(module, datamodule=data(folder, num_workers=num_workers), ckpt_path=checkpoint)
        return module.rows

    whole, part, rest = fit(150), fit(steps_before), fit(150, resume=True)
    assert part == whole[: 4 * steps_before]
    assert rest == whole[4 * steps_before :]
