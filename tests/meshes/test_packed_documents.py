"""Loss and gradients of each document of a batch are those of the document alone, on every kind of mesh.

Documents are chats, packed or padded, or those of a file of tokens, where rows cut them.
"""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from lightning_d9d import D9DStrategy, MeshConfig
from lightning_d9d.data import (
    ChatTokenizer,
    PackedOrder,
    PackedRows,
    PaddedRows,
    Samples,
    Span,
    TokenFile,
    TokenFileWriter,
    TokenRows,
)
from lightning_d9d.dtypes import default_dtype
from lightning_d9d.models.qwen3_moe import Qwen3MoePretraining
from tests.data.chats import chat, make_tokenizer
from tests.harness.compare import assert_close_named, assert_tensors_close
from tests.harness.ranks import RankContext
from tests.harness.tolerances import Kind, Tolerance
from tests.meshes.equality import SMALL, Watched
from tests.strategy.plain import trainer

TOLERANCE = Tolerance(relative=1e-9)
MODEL = dataclasses.replace(SMALL, vocab_size=320)
CHATS = [
    chat("Hi", "I am well."),
    chat("How are you?", "Well", "And", "It is five."),
    chat("Sum", "5", system="Be brief."),
    chat("a", "I am well, thank you. " * 2),
    chat("What is the sum of two and three?", "It is five."),
    chat("b", ""),
]
ROW_LENGTH = 64
MESHES = {
    "one process": {},
    "cp": {"context_parallel_shard": 2},
    "tp": {"tensor_parallel": 2},
    "pp": {"pipeline_parallel": 2},
}


def samples() -> Samples:
    tokenize = ChatTokenizer(make_tokenizer("chatml"))
    return Samples(sample for index, each in enumerate(CHATS) for sample in tokenize(each, f"chat {index}"))


def batches(packing: bool) -> list[dict[str, Tensor]]:
    """All chats, and in the batch of each only its labels."""
    chats, found = samples(), []
    rows = PackedOrder(chats.lengths, ROW_LENGTH)(seed=0, epoch=0) if packing else [(i,) for i in range(len(chats))]
    data = PackedRows(chats, ROW_LENGTH, 0) if packing else PaddedRows(chats, 8, 0)
    items = [data[row] for row in rows] if isinstance(data, PackedRows) else data.__getitems__(rows)
    whole = default_collate(items)
    for index in range(len(chats)):
        labels = torch.full_like(whole["labels"], -100)
        row = next(place for place, each in enumerate(rows) if index in each)
        start = sum(chats.lengths[each] for each in rows[row][: rows[row].index(index)])
        places = (row, slice(start, start + chats.lengths[index]))
        labels[places] = whole["labels"][places]
        found.append({**whole, "labels": labels})
    return found


def rows_of_tokens() -> dict[str, Tensor]:
    """Four rows of a file of documents, of which some are longer than a row."""
    numbers = torch.Generator().manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        writer = TokenFileWriter(Path(folder, "tokens"))
        writer.add(torch.randint(320, (size,), generator=numbers).tolist() for size in (20, 5, 90, 1, 30, 3, 60, 70))
        writer.finish()
        file = TokenFile(writer.path)
        rows = TokenRows("tokens", [Span(file, 0, len(file))], ROW_LENGTH, borders=True)
        return default_collate([rows[index] for index in range(4)])


def documents(whole: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Tokens and labels of the part of each document that a row has, if any counts."""
    parts = [(row, whole["document_ids"][row] == number) for row, number in _numbered(whole)]
    return [(whole["input_ids"][row][place], whole["labels"][row][place]) for row, place in parts]


def batches_of_tokens(whole: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """All rows, and in the batch of each document only its labels."""
    found = []
    for row, number in _numbered(whole):
        labels = torch.full_like(whole["labels"], -100)
        place = whole["document_ids"][row] == number
        labels[row][place] = whole["labels"][row][place]
        found.append({**whole, "labels": labels})
    return found


def _numbered(whole: dict[str, Tensor]) -> list[tuple[int, int]]:
    """Row and number of each document that has a label."""
    rows = zip(whole["document_ids"], whole["labels"], strict=True)
    return [(row, number) for row, (ids, labels) in enumerate(rows) for number in ids[labels != -100].unique().tolist()]


def test_several_chats_share_a_row() -> None:
    packed = batches(packing=True)[0]["document_ids"]
    assert len(packed) % 2 == 0
    assert sorted(int(row.max()) for row in packed)[-1] > 1


class OneAtATime(Watched):
    """Takes steps that change nothing."""

    def __init__(self, data: list[dict[str, Tensor]]) -> None:
        super().__init__(MODEL, len(data))
        self.batches = data

    def train_dataloader(self) -> DataLoader:
        rows = [{name: value[row] for name, value in each.items()} for each in self.batches for row in range(self.rows)]
        return DataLoader(rows, self.rows)  # type: ignore[arg-type]

    @property
    def rows(self) -> int:
        return len(self.batches[0]["labels"])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def alone(given: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Loss and gradients of each document in one process, with nothing beside it."""
    L.seed_everything(1, verbose=False)
    module = Qwen3MoePretraining(MODEL)
    with default_dtype(torch.float64):
        module.configure_model()
    found = []
    for input_ids, labels in given:
        module.model.zero_grad()
        loss = module.model(input_ids[None], labels[None], reduction="sum").loss / (labels != -100).sum()
        loss.backward()
        gradients = {
            name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
            for name, parameter in module.model.named_parameters()
        }
        found.append((loss.detach(), gradients))
    return found


def chats_alone() -> list[tuple[Tensor, dict[str, Tensor]]]:
    return alone(list(samples()))


def documents_alone() -> list[tuple[Tensor, dict[str, Tensor]]]:
    return alone(documents(rows_of_tokens()))


ON_MESHES = [pytest.param(mesh, marks=pytest.mark.ranks(2 if MESHES[mesh] else 1)) for mesh in MESHES]


@pytest.mark.parametrize("packing", [True, pytest.param(False, marks=pytest.mark.meshes)])
@pytest.mark.parametrize("mesh", ON_MESHES)
def test_each_chat_is_as_alone(rank: RankContext, mesh: str, packing: bool) -> None:
    compare(rank, mesh, rank.from_first_rank(chats_alone), batches(packing))


@pytest.mark.parametrize("mesh", ON_MESHES)
def test_each_document_of_a_file_of_tokens_is_as_alone(rank: RankContext, mesh: str) -> None:
    whole = rows_of_tokens()
    assert len(documents(whole)) == 10  # of eight: one has no label, and three are in two rows
    compare(rank, mesh, rank.from_first_rank(documents_alone), batches_of_tokens(whole))


def compare(
    rank: RankContext,
    mesh: str,
    expected: list[tuple[Tensor, dict[str, Tensor]]],
    steps: list[dict[str, Tensor]],
) -> None:
    """Compare the step of each document with the document alone."""
    L.seed_everything(1, verbose=False)
    module = OneAtATime(steps)
    strategy = D9DStrategy(mesh=MeshConfig(**MESHES[mesh]))
    run = trainer(strategy, rank.world_size, rank.device.type, precision="64-true", max_epochs=1, gradient_clip_val=1e9)
    run.fit(module)
    assert len(module.seen.losses) == len(expected)
    for index, (loss, gradients) in enumerate(expected):
        actual = module.seen.gradients[index]
        assert_close_named(f"loss {index}", module.seen.losses[index], loss, kind=Kind.LOSS, tolerance=TOLERANCE)
        assert_tensors_close(actual, {name: gradients[name] for name in actual}, tolerance=TOLERANCE)
    held = rank.all_gather_object(set(module.seen.gradients[0]))
    assert set().union(*held) == set(expected[0][1])
