"""The data module of token files: what an epoch has, what is held out, and streams that go on exactly."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lightning_d9d import D9DStrategy, RankError
from lightning_d9d.data import Span, TokenFile, TokenFileWriter, TokenRows
from lightning_d9d.datamodules import TokenDataModule
from lightning_d9d.errors import ConfigError
from lightning_d9d.models.qwen3_moe import Qwen3MoePretraining
from tests.datamodules.rows_job import GLOBAL_BATCH, rows_of_steps, tokens, train
from tests.datamodules.runs import run_of
from tests.harness.jobs import run_job
from tests.harness.ranks import RankContext
from tests.strategy.plain import trainer


def write(path: Path, lengths: Sequence[int], first: int = 0) -> str:
    """Documents whose ids count from `first` on over all of them."""
    ids = np.arange(first, first + sum(lengths))
    writer = TokenFileWriter(path, np.int32)
    writer.add_joined(ids, np.array(lengths))
    writer.finish()
    return str(path)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, float]:
    """Two texts: 100 training rows of 8 tokens or so, ids from 0, and 20, ids from 10,000."""
    lengths = np.random.default_rng(0).integers(0, 30, 60).tolist()
    return {write(tmp_path / "a", lengths): 0.7, write(tmp_path / "b", lengths[:12], first=10_000): 0.3}


def data(
    files: Any, rank: int = 0, num_ranks: int = 1, vocab_size: int | None = None, **options: Any
) -> TokenDataModule:
    module = TokenDataModule(files, **{"sequence_length": 8, "batch_size": 4, "validation_fraction": 0.1} | options)
    config = SimpleNamespace() if vocab_size is None else SimpleNamespace(vocab_size=vocab_size)
    module.trainer = run_of(num_ranks, rank, is_global_zero=True, lightning_module=SimpleNamespace(config=config))
    module.setup()
    return module


def batches(loader: Any) -> list[list[list[int]]]:
    return [batch["input_ids"].tolist() for batch in loader]


def test_a_batch(files: dict[str, float]) -> None:
    batch = next(iter(data(files, batch_size=32).train_dataloader()))
    assert set(batch) == {"input_ids", "labels", "document_ids"}
    assert all(values.shape == (32, 8) and values.dtype == torch.int64 for values in batch.values())
    ids, labels, documents = batch["input_ids"], batch["labels"], batch["document_ids"]
    assert (labels == -100).any()
    is_next = labels[:, :-1] == ids[:, 1:]
    assert is_next.equal(documents[:, 1:] == documents[:, :-1])
    without = next(iter(data(files, borders=False).train_dataloader()))
    assert set(without) == {"input_ids", "labels"}
    assert without["labels"][:, :-1].equal(without["input_ids"][:, 1:])


def test_proportions_and_epochs(files: dict[str, float]) -> None:
    module = data(files)
    loader = module.train_dataloader()
    first = [row for batch in batches(loader) for row in batch]
    assert len(first) == len(loader) * 4
    assert sum(row[0] >= 10_000 for row in first) / len(first) == pytest.approx(0.3, abs=0.03)
    assert batches(loader) == batches(data(files).train_dataloader())
    assert batches(loader) != batches(data(files, seed=1).train_dataloader())
    loader.sampler.set_epoch(1)  # type: ignore[attr-defined]
    second = [row for batch in batches(loader) for row in batch]
    assert second != first
    every = data(list(files)).train_dataloader()
    rows = [row[0] for batch in batches(every) for row in batch]
    assert len(set(rows)) == len(rows)


@pytest.mark.parametrize("num_workers", [1, 4])
def test_workers_change_nothing(files: dict[str, float], num_workers: int) -> None:
    alone = batches(data(files).train_dataloader())
    assert batches(data(files, num_workers=num_workers).train_dataloader()) == alone


def test_what_is_held_out(files: dict[str, float]) -> None:
    module = data(files)
    held_out = {row[0] for batch in batches(module.val_dataloader()) for row in batch}
    training = {row[0] for batch in batches(data(list(files)).train_dataloader()) for row in batch}
    assert held_out
    assert not held_out & training
    # Whole documents: what is held out of the first text begins where one begins.
    starts = np.cumsum([0, *np.random.default_rng(0).integers(0, 30, 60).tolist()])
    assert min(place for place in held_out if place < 10_000) in starts
    assert batches(module.test_dataloader()) == batches(module.val_dataloader())
    parts = [batches(data(files, rank, 2).val_dataloader()) for rank in range(2)]
    together = [row[0] for part in parts for batch in part for row in batch]
    assert len(together) == len(set(together)) == len(held_out) // 2 * 2
    assert set(together) <= held_out


def test_validation_files(files: dict[str, float]) -> None:
    first, second = files
    module = data(first, validation_files=second, validation_fraction=None)
    assert {row[0] >= 10_000 for batch in batches(module.val_dataloader()) for row in batch} == {True}
    whole = sum(np.random.default_rng(0).integers(0, 30, 60).tolist()) // 8
    assert len(module.train_dataloader().dataset) == whole  # type: ignore[arg-type]


def test_patterns_and_what_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(3):
        write(tmp_path / f"part-{number}", [20, 0, 3, 10], first=100 * number)
    with caplog.at_level(logging.INFO, "lightning_d9d"):
        module = data(str(tmp_path / "part-*"), validation_fraction=0.01)
    assert len(module.train_dataloader().dataset) == 12  # type: ignore[arg-type]
    expected = "12 training rows, 12 in an epoch; 3 tokens at ends of files left out; 12 documents in its .idx, "
    assert f"{expected}6 longer than a row, which are split, 3 empty" in caplog.text


def test_files_without_an_index(tmp_path: Path) -> None:
    (tmp_path / "train.bin").write_bytes(np.array([1, 2, 3, 0] * 30, dtype=np.uint16).tobytes())
    module = data(str(tmp_path / "train.bin"), last_token=0)
    batch = next(iter(module.train_dataloader()))
    assert batch["document_ids"].tolist() == [[0] * 4 + [1] * 4] * 4
    with pytest.raises(ConfigError, match=r"train\.bin does not mark where documents begin"):
        data(str(tmp_path / "train.bin"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"files": []}, "files of TokenDataModule is empty"),
        ({"files": "nothing-*"}, r"no \.bin file matches 'nothing-\*'"),
        ({"files": "nothing"}, r"nothing\.bin cannot be read: it does not exist"),
        ({"weights": [0.0, 0.0]}, "sum to 0"),
        ({"weights": [1.0, -1.0]}, "must be finite numbers, at least 0"),
        ({"sequence_length": 10**6}, "does not have a whole row; give more text, or lower sequence_length"),
        (
            {"batch_size": 1000},
            r"training data of TokenDataModule have \d+ rows of sequence_length=8, but 1000 are needed",
        ),
        ({"validation_fraction": 1e-9}, "held-out data of TokenDataModule have 0 rows of sequence_length=8"),
        ({"validation_fraction": 1.5}, "validation_fraction=1.5 of TokenDataModule must be between"),
        ({"validation_files": "b"}, "both set the validation data"),
        ({"first_token": 1, "last_token": 2}, "both"),
        ({"last_token": 2, "borders": False}, "does not use the token 2"),
        ({"last_token": 2}, "the token 2 has no effect: all of .* store where documents begin"),
        ({"num_workers": -1}, "num_workers=-1 of TokenDataModule"),
        ({"global_batch_size": 4}, "both set the size of batches"),
        ({"vocab_size": 10_000}, r"b\.bin has the id \d+ at token \d+, but vocab_size=10000 of the model"),
    ],
)
def test_bad_input(files: dict[str, float], tmp_path: Path, options: dict[str, Any], message: str) -> None:
    if "weights" in options:
        files = dict(zip(files, options.pop("weights"), strict=True))
    given = options.pop("files", files)
    with pytest.raises(ConfigError, match=message):
        _read_all(data(given, **options))


def _read_all(module: TokenDataModule) -> None:
    batches(module.train_dataloader())
    batches(module.val_dataloader())


def test_the_same_file_twice(files: dict[str, float]) -> None:
    first = next(iter(files))
    with pytest.raises(ConfigError, match=r"names .*a\.bin more than once"):
        data([first, f"{first}.idx"])


def test_another_tokenizer(files: dict[str, float]) -> None:
    notes = Path(next(iter(files)) + ".json")
    notes.write_text(json.dumps({"tokenizer": "large", "vocab_size": 50_000}))
    data(files, vocab_size=50_000)
    with pytest.raises(ConfigError, match=r"made by the tokenizer 'large', whose ids go up to 49999.*vocab_size=40000"):
        data(files, vocab_size=40_000)


def test_a_file_larger_than_memory(tmp_path: Path) -> None:
    """128 GiB, of which the disk has nothing: neither tokens nor order are ever in memory as a whole."""
    path = tmp_path / "huge.bin"
    with path.open("wb") as file:
        file.truncate(1 << 37)
        file.seek((1 << 37) - 8)
        file.write(np.array([1, 2, 3, 4], dtype=np.uint16).tobytes())
    loader = data(str(path), borders=False, sequence_length=2048, batch_size=4).train_dataloader()
    assert len(loader) == int((1 << 36) * 0.9) // 2048 // 4
    batch = next(iter(loader))
    assert batch["input_ids"].shape == (4, 2048)
    rows = TokenRows("huge", [Span(TokenFile(path), 0, 1 << 36)], 2048, borders=False)
    assert rows[len(rows) - 1]["input_ids"][-4:].tolist() == [1, 2, 3, 4]


# Streams of jobs


def run(folder: Path, files: dict[str, float], num_ranks: int, num_workers: int = 0, **options: Any) -> list[Any]:
    folder.mkdir()
    run_job(num_ranks, folder, train, folder, partial(tokens, files, num_workers), num_ranks, options)
    return rows_of_steps(folder)


@pytest.mark.jobs
def test_steps_are_equal_on_any_number_of_ranks_and_after_resuming(tmp_path: Path, files: dict[str, float]) -> None:
    whole = run(tmp_path / "1", files, 1)
    assert len(whole) == 30  # more than two epochs
    assert {len(rows) for rows in whole} == {GLOBAL_BATCH}
    assert run(tmp_path / "2", files, 2, num_workers=1) == whole
    assert run(tmp_path / "accumulated", files, 1, accumulated=2, max_steps=5) == whole[:5]
    saved = tmp_path / "2" / "step=6.ckpt"
    resumed = run(tmp_path / "on 4", files, 4, resumed=saved)
    assert resumed == whole[6:]
    again = run(tmp_path / "on 1", files, 1, num_workers=4, resumed=tmp_path / "on 4" / "step=9.ckpt")
    assert again == whole[9:]
    for num_ranks, step in ((1, 6), (2, 21)):  # in the first epoch, and in the second
        saved = tmp_path / str(num_ranks) / f"step={step}.ckpt"
        assert run(tmp_path / f"from {step}", files, 1, resumed=saved) == whole[step:]


# Ranks


def refused(rank: RankContext, files: Any, length: int) -> list[BaseException]:
    """Train a model of 256 tokens on all ranks, and return what each of them raised."""
    trained = trainer(D9DStrategy(), rank.world_size, max_steps=20, limit_val_batches=0)
    data_ = TokenDataModule(files, sequence_length=length, batch_size=2)
    error: BaseException | None = None
    try:
        trained.fit(Qwen3MoePretraining(preset="tiny", warmup_steps=1), datamodule=data_)
    except (ConfigError, RankError) as raised:
        error = raised
    return rank.all_gather_object(error)


def file_of(path: Path, ids: tuple[int, ...]) -> str:
    writer = TokenFileWriter(path)
    writer.add([ids] * 20)
    writer.finish()
    path.with_suffix(".json").write_text('{"tokenizer": "large", "vocab_size": 50000}')
    return str(path)


@pytest.mark.ranks(2)
def test_all_ranks_refuse_another_tokenizer(rank: RankContext) -> None:
    errors = refused(rank, rank.from_first_rank(file_of, rank.tmp_dir / "text", (1, 2, 3, 4, 5)), length=8)
    assert [type(error) for error in errors] == [ConfigError] * 2
    assert str(errors[0]) == str(errors[1])
    assert "made by the tokenizer 'large', whose ids go up to 49999" in str(errors[0])


@pytest.mark.ranks(2)
def test_all_ranks_end_at_an_id_outside_of_the_vocabulary(rank: RankContext) -> None:
    path = rank.from_first_rank(file_of, rank.tmp_dir / "text", (1, 2, 3, 4, 256))
    if rank.rank == 0:
        Path(path + ".json").unlink()
    rank.barrier()
    errors = refused(rank, path, length=16)
    assert all("text.bin has the id 256 at token" in str(error) for error in errors)
