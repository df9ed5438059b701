"""Held-out rows that do not divide by the data ranks: validation, test and prediction take each of them once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, SubsetRandomSampler

from lightning_d9d import D9DStrategy, ParallelConfig
from lightning_d9d.callbacks import PredictionWriter
from lightning_d9d.data import TokenFileWriter
from lightning_d9d.datamodules import ByteTextDataModule, ChatDataModule, TokenDataModule
from lightning_d9d.datamodules.rows import RowsDataModule
from lightning_d9d.dtypes import default_dtype
from lightning_d9d.models.qwen3_moe import Qwen3MoeForCausalLM, Qwen3MoePretraining
from lightning_d9d.state import read_tensors
from tests.data.chats import make_tokenizer, write_chats
from tests.harness.compare import assert_close_named
from tests.harness.ranks import RankContext
from tests.harness.tolerances import Kind
from tests.meshes.cases import Case
from tests.meshes.equality import CONFIG
from tests.strategy.plain import Plain, trainer
from tests.strategy.plain import loader as plain_loader

MODEL = replace(CONFIG, vocab_size=512)
NUM_ROWS = 5
"""Held-out rows of each data module: data ranks get different numbers of rows, and two also of batches."""
Row = tuple[int, ...]


def tokens(folder: Path) -> TokenDataModule:
    files = [str(folder / name) for name in ("train", "held_out")]
    return TokenDataModule(files[0], 8, batch_size=2, validation_files=files[1])


def byte_text(folder: Path) -> ByteTextDataModule:
    return ByteTextDataModule(str(folder), "*.txt", 8, batch_size=2, validation_fraction=0.042)


def chats(folder: Path, packing: bool) -> ChatDataModule:
    options: dict[str, Any] = {"packing": True} if packing else {"packing": False, "pad_to_multiple_of": 8}
    return ChatDataModule(
        *(str(folder / "chats.jsonl"), make_tokenizer("chatml"), str(folder / f"held_out_{packing}.jsonl")),
        **{"sequence_length": 96, "batch_size": 2, "cache_folder": str(folder / "cache"), **options},
    )


DATA: dict[str, Callable[[Path], RowsDataModule]] = {
    "tokens": tokens,
    "bytes": byte_text,
    "packed chats": partial(chats, packing=True),
    "padded chats": partial(chats, packing=False),
}


def write(folder: Path) -> None:
    for name, number in (("train", 200), ("held_out", 8 * NUM_ROWS + 1)):
        writer = TokenFileWriter(folder / name)
        writer.add(np.random.default_rng(0).integers(0, 512, part) for part in (number // 3, number - number // 3))
        writer.finish()
    (folder / "a.txt").write_text("".join(f"line {number:04d}" for number in range(1000 // 9 + 1))[:999])
    write_chats(folder / "chats.jsonl", 40)
    write_chats(folder / "held_out_True.jsonl", 7)
    write_chats(folder / "held_out_False.jsonl", NUM_ROWS)


def without_padding(row: Tensor) -> Row:
    """Return a row without the zeros at its end: ranks pad to different lengths."""
    ids = row.tolist()
    return tuple(ids[: max((place + 1 for place, each in enumerate(ids) if each), default=0)])


class Seen(L.Callback):
    """Counts the rows that this rank has read."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def on_validation_batch_end(self, run: Any, module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        self.rows += map(without_padding, batch["input_ids"])

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end


def model_on_one_process() -> Qwen3MoeForCausalLM:
    L.seed_everything(1, verbose=False)
    module = Qwen3MoePretraining(MODEL)
    with default_dtype(torch.float64):
        module.configure_model()
    return cast(Qwen3MoeForCausalLM, module.model)


def rows_of(loader: Any) -> Iterator[dict[str, Tensor]]:
    """The rows of a loader, one by one."""
    for batch in loader:
        for index in range(len(batch["input_ids"])):
            yield {name: each[index : index + 1] for name, each in batch.items()}


@torch.no_grad()
def expected(data: RowsDataModule) -> tuple[Tensor, list[Row], list[tuple[Row, Tensor]]]:
    """The loss and the rows of an evaluation on one process, and each row of a prediction with its logits."""
    data.setup()
    model: Any = model_on_one_process()
    held_out, count = list(rows_of(data.val_dataloader())), 0
    total = torch.zeros((), dtype=torch.float64)
    for row in held_out:
        total += model(**row, reduction="sum").loss
        count += int((row["labels"] != -100).sum())
    predicted = []
    for row in rows_of(data.predict_dataloader() if has_predict(data) else ()):
        row = {name: each for name, each in row.items() if name != "labels"}
        predicted.append((without_padding(row["input_ids"][0]), model(**row).logits[0]))
    return total / count, [without_padding(row["input_ids"][0]) for row in held_out], predicted


def has_predict(data: RowsDataModule) -> bool:
    return type(data).predict_dataloader is not L.LightningDataModule.predict_dataloader


@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case("shard2 ep2"), marks=pytest.mark.ranks(2)),
        pytest.param(Case("rep2"), marks=[pytest.mark.ranks(2), pytest.mark.meshes]),
        pytest.param(Case("rep3"), marks=[pytest.mark.ranks(3), pytest.mark.meshes]),
        pytest.param(Case("pp2 rep2"), marks=[pytest.mark.ranks(4), pytest.mark.meshes]),
        pytest.param(
            Case("shard2 cp2", parallel=ParallelConfig(pad_sequences=True)),
            marks=[pytest.mark.ranks(4), pytest.mark.meshes],
        ),
    ],
    ids=str,
)
def test_each_row_counts_once(rank: RankContext, case: Case, kind: str) -> None:
    rank.from_first_rank(write, rank.tmp_dir)
    loss, rows, predicted = expected(DATA[kind](rank.tmp_dir))
    assert len(rows) == NUM_ROWS

    L.seed_everything(1, verbose=False)
    strategy, seen = D9DStrategy(**case.strategy_options), Seen()
    writer = PredictionWriter(rank.tmp_dir / "predicted")
    run = trainer(strategy, rank.world_size, rank.device.type, precision="64-true", callbacks=[seen, writer])
    module, data = Qwen3MoePretraining(MODEL), DATA[kind](rank.tmp_dir)

    def check_rows(expected_rows: list[Row]) -> None:
        by_rank = dict(rank.all_gather_object((strategy.mesh.dp_rank, seen.rows)))
        assert len({len(each) for each in by_rank.values()}) > 1
        assert Counter(row for each in by_rank.values() for row in each) == Counter(expected_rows)
        seen.rows = []

    (result,) = run.validate(module, data, verbose=False)
    check_rows(rows)
    assert_close_named("val_loss", torch.tensor(result["val_loss"]), loss.float(), kind=Kind.LOSS)
    (result,) = run.test(module, data, verbose=False)
    check_rows(rows)
    assert_close_named("test_loss", torch.tensor(result["test_loss"]), loss.float(), kind=Kind.LOSS)
    if not predicted:
        return
    run.predict(module, data, return_predictions=False)
    check_rows([row for row, _ in predicted])
    written = [row for _, tensor in read_tensors(rank.tmp_dir / "predicted") for row in tensor]
    assert len(written) == NUM_ROWS
    for index, (actual, (ids, logits)) in enumerate(zip(written, predicted, strict=True)):
        assert_close_named(f"row {index}", actual[: len(ids)], logits[: len(ids)], kind=Kind.OUTPUT)


class Rows(Dataset[dict[str, Tensor]]):
    """Rows of random ids, each with its number in front."""

    def __init__(self, number: int) -> None:
        self._ids = torch.randint(1, 500, (number, 9), generator=torch.Generator().manual_seed(0))
        self._ids[:, 0] = torch.arange(number) + 500

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._ids[index, :-1], "labels": self._ids[index, 1:]}


OWN_LOADERS: dict[str, Callable[[Rows], DataLoader[dict[str, Tensor]]]] = {
    "in order": lambda rows: DataLoader(rows, 2),
    "shuffled": lambda rows: DataLoader(rows, 2, shuffle=True),
    "a part": lambda rows: DataLoader(rows, 2, sampler=SubsetRandomSampler(range(len(rows)))),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", OWN_LOADERS)
def test_each_row_of_a_loader_of_the_users_own_counts_once(rank: RankContext, kind: str) -> None:
    """Between the batches of a fit as in a validation alone: Lightning's sampler would repeat the first row."""
    rows, model = Rows(NUM_ROWS), cast(Any, model_on_one_process())
    with torch.no_grad():
        total = sum(model(**row, reduction="sum").loss for row in rows_of(DataLoader(rows, 2)))
    loss, all_rows = total / (8 * NUM_ROWS), Counter(tuple(row["input_ids"].tolist()) for row in rows)

    def check(seen: Seen, losses: dict[str, Any]) -> None:
        assert sum((Counter(each) for each in rank.all_gather_object(seen.rows)), Counter()) == all_rows
        assert_close_named("val_loss", torch.as_tensor(losses["val_loss"]).float(), loss.float(), kind=Kind.LOSS)
        seen.rows = []

    L.seed_everything(1, verbose=False)
    seen, loader = Seen(), OWN_LOADERS[kind](rows)
    run = trainer(D9DStrategy(), 2, rank.device.type, precision="64-true", callbacks=[seen], max_epochs=1)
    module = Qwen3MoePretraining(MODEL, learning_rate=0.0, weight_decay=0.0)
    check(seen, run.validate(module, loader, verbose=False)[0])
    run.fit(module, DataLoader(Rows(8), 2), loader)
    check(seen, run.callback_metrics)


REPEATED: dict[str, tuple[Callable[[], Any], Callable[[], Any], str]] = {
    "a plain module": (
        lambda: Plain("adamw", batch_norm=False),
        lambda: plain_loader(5),
        "1 of 5 rows of a val_dataloader are repeated .*; make it a D9DModule, .* or evaluate on one rank",
    ),
    "fewer rows than ranks": (
        lambda: Qwen3MoePretraining(MODEL),
        lambda: DataLoader(Rows(1), 1),
        "1 of 1 rows of a val_dataloader are repeated .*; give at least 2 rows",
    ),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", REPEATED)
def test_rows_that_are_repeated_are_said(rank: RankContext, name: str) -> None:
    module, loader, message = REPEATED[name]
    with pytest.warns(UserWarning, match=message) if rank.rank == 0 else nullcontext():
        trainer(D9DStrategy(), 2, rank.device.type).validate(module(), loader(), verbose=False)
