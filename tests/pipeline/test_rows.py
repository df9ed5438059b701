"""Rows are found in batches of any form, and batches are split by rows."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_d9d import ConfigError, D9DStrategy
from lightning_d9d.pipeline.rows import BatchRows
from lightning_d9d.pipeline.trees import copy_containers
from tests.harness.compare import assert_close_named
from tests.strategy.plain import trainer
from tests.strategy.staged import Recorded, staged_rows


def split(batch: Any, num_parts: int) -> list[Any]:
    return BatchRows().split(batch, num_parts)


def count(batch: Any) -> int:
    return BatchRows().count(batch)


def test_trees_are_cut_along_dim_0() -> None:
    batch = {"x": torch.arange(10).view(5, 2), "pair": (torch.arange(5), "name"), "scale": torch.tensor(2.0)}
    parts = split(batch, 3)
    assert [part["x"].shape[0] for part in parts] == [2, 2, 1]
    assert torch.equal(torch.cat([part["x"] for part in parts]), batch["x"])
    assert torch.equal(torch.cat([part["pair"][0] for part in parts]), torch.arange(5))
    assert all(part["pair"][1] == "name" and part["scale"] is batch["scale"] for part in parts)
    assert parts[0]["x"].untyped_storage().data_ptr() == batch["x"].untyped_storage().data_ptr()


class Features(UserDict):
    pass


@dataclass(frozen=True)
class Sample:
    x: Tensor
    name: str


def test_containers_of_any_class_are_cut() -> None:
    x = torch.arange(4)
    for batch in (Features(x=x), OrderedDict(x=x), defaultdict(list, x=x), MappingProxyType({"x": x})):
        assert count(batch) == 4
        parts = split(batch, 2)
        assert [part["x"].tolist() for part in parts] == [[0, 1], [2, 3]]
        assert {type(part) for part in parts} == {type(batch)}
    assert split(defaultdict(list, x=x), 2)[1]["y"] == []
    assert [part.x.tolist() for part in split(Sample(x, "name"), 2)] == [[0, 1], [2, 3]]
    assert [part["none"] for part in split({"x": x, "none": []}, 2)] == [[], []]


class Fixed(Mapping):
    """Cannot be made of a dictionary."""

    def __init__(self) -> None:
        self.x = torch.arange(4)

    def __getitem__(self, key: str) -> Tensor:
        return getattr(self, key)

    def __iter__(self) -> Iterator[str]:
        return iter(["x"])

    def __len__(self) -> int:
        return 1


def test_a_container_that_cannot_be_made_anew_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a batch has a Fixed, which cannot be built from new values.*split_batch"):
        split(Fixed(), 2)


def test_copies_of_containers_keep_their_leaves() -> None:
    batch = Features(x=torch.arange(4), pair=(torch.arange(2), "name"))
    copied = copy_containers(batch)
    copied["x"] = None
    assert batch["x"].tolist() == [0, 1, 2, 3]
    assert copied["pair"][0] is batch["pair"][0]
    for other in (Fixed(), Sample(torch.arange(4), "name")):
        assert copy_containers({"other": other})["other"] is other


def test_batches_without_rows_are_refused() -> None:
    for batch in (
        {"x": torch.zeros(2), "y": torch.zeros(3)},
        {"x": torch.zeros(2), "y": [torch.zeros(3), torch.zeros(3), torch.zeros(3)]},
    ):
        with pytest.raises(ConfigError, match=r"x: tensor float32 \[2\], y: .*share one first.*override split_batch"):
            count(batch)
    with pytest.raises(ConfigError, match="override split_batch"):
        count({"text": "abc", "scale": torch.tensor(1.0)})


# Lists


def texts(number: int) -> list[str]:
    return [f"text {index}" for index in range(number)]


def ragged(*lengths: int) -> list[Tensor]:
    return [torch.full((length,), index) for index, length in enumerate(lengths)]


class Pair(NamedTuple):
    x: Tensor
    names: list[str]


@pytest.mark.parametrize("kind", [list, tuple, deque])
@pytest.mark.parametrize("lengths", [(2, 5, 3, 1), (3, 3, 3, 3)], ids=str)
def test_a_list_of_one_entry_a_row_is_cut_with_the_rows(kind: Any, lengths: tuple[int, ...]) -> None:
    """This also holds if all tensors are equally long, as columns are."""
    batch = {"x": torch.arange(4), "text": kind(texts(4)), "tokens": kind(ragged(*lengths)), "boxes": kind([{}] * 4)}
    assert count(batch) == 4
    parts = split(batch, 2)
    for part, places in zip(parts, ([0, 1], [2, 3]), strict=True):
        assert part["x"].tolist() == places
        assert type(part["text"]) is type(part["tokens"]) is kind
        assert list(part["text"]) == [texts(4)[place] for place in places]
        assert [tokens[0].item() for tokens in part["tokens"]] == places
        assert [len(tokens) for tokens in part["tokens"]] == [lengths[place] for place in places]
        assert len(part["boxes"]) == 2


def test_parts_are_as_long_as_those_of_tensors() -> None:
    parts = split({"x": torch.arange(5), "text": texts(5)}, 3)
    assert [len(part["x"]) for part in parts] == [len(part["text"]) for part in parts] == [2, 2, 1]
    assert [text for part in parts for text in part["text"]] == texts(5)


def test_columns_and_what_all_rows_share() -> None:
    pair, names = [torch.arange(5), torch.arange(5) + 1], ["cat", "dog"]
    parts = split({"x": torch.arange(5), "pair": pair, "names": names, "none": [], "numbers": (1, 2.0)}, 2)
    assert [[column.tolist() for column in part["pair"]] for part in parts] == [
        [[0, 1, 2], [1, 2, 3]],
        [[3, 4], [4, 5]],
    ]
    assert all(part["names"] == names and part["none"] == [] and part["numbers"] == (1, 2.0) for part in parts)
    parts = split([torch.zeros(2, 3), torch.tensor([0, 1])], 2)  # two columns of two rows, of different dtypes
    assert [[column.shape[0] for column in part] for part in parts] == [[1, 1], [1, 1]]
    assert [part.names for part in split(Pair(torch.arange(2), texts(2)), 2)] == [["text 0"], ["text 1"]]
    assert [part[0].tolist() for part in split([torch.arange(4)], 2)] == [[0, 1], [2, 3]]


def test_a_list_of_rows_alone() -> None:
    assert [[len(row) for row in part] for part in split(ragged(3, 1, 4, 2), 2)] == [[3, 1], [4, 2]]
    batch = [{"ids": row, "text": "a"} for row in ragged(3, 1, 4)]
    assert [[len(row["ids"]) for row in part] for part in split(batch, 3)] == [[3], [1], [4]]
    images = (tuple(torch.zeros(3, 4 + i, 5) for i in range(4)), tuple({"boxes": torch.zeros(i, 4)} for i in range(4)))
    assert [[len(column) for column in part] for part in split(images, 2)] == [[2, 2], [2, 2]]


@pytest.mark.parametrize(
    "batch",
    [
        [torch.arange(3), torch.arange(3)],
        [{"ids": torch.arange(8)}, {"ids": torch.arange(8)}],
        {"x": torch.arange(2), "tokens": ragged(2, 2)},
        [torch.zeros(3, 4, 5), torch.zeros(3, 6, 5)],
    ],
)
def test_what_could_be_rows_or_columns_is_refused(batch: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"could have one entry for each row.*the batch is a .*dictionary.*split_batch"
    ):
        count(batch)
    assert BatchRows().count(batch, strict=False) in (2, 3, 8)  # of a batch that is not cut


def test_the_list_is_named() -> None:
    with pytest.raises(ConfigError, match=r": batch\['more'\]\['tokens'\] is a list"):
        count({"x": torch.arange(2), "more": {"tokens": ragged(2, 2)}})


def test_earlier_batches_tell_what_later_ones_do_not() -> None:
    """The last batch of an epoch is short: its lists may be as long as it."""
    rows = BatchRows()

    def batch(number: int) -> dict[str, Any]:
        return {
            "x": torch.arange(number),
            "columns": [torch.arange(number), torch.arange(number)],
            "tokens": ragged(*[2] * number),
            "names": ("cat", "dog"),
        }

    rows.split(batch(4), 2)
    for part in rows.split(batch(2), 2):
        assert [len(column) for column in part["columns"]] == [1, 1]
        assert [len(row) for row in part["tokens"]] == [2]
        assert part["names"] == ("cat", "dog")
    assert rows.count(batch(1)) == 1
    alone = BatchRows()
    assert alone.count(ragged(2, 3, 2)) == 3
    assert alone.count(ragged(3, 3)) == 2
    assert alone.count(ragged(3)) == 1


class Listed(Recorded):
    """A module whose batch has a list of one tensor for each row, all equally long."""

    def microbatch_inputs(self, microbatch: Any) -> Any:
        return super().microbatch_inputs({"x": torch.stack(microbatch["x"])})


def listed(rows: list[dict[str, Tensor]]) -> dict[str, Any]:
    return {"x": [row["x"] for row in rows], "y": torch.stack([row["y"] for row in rows])}


@pytest.mark.parametrize("mean", [False, True])
def test_a_list_of_rows_is_trained_on_as_a_tensor(mean: bool) -> None:
    modules = []
    for kind, collate in ((Recorded, None), (Listed, listed)):
        torch.manual_seed(0)
        module = kind(mean=mean)
        data: Any = DataLoader(staged_rows(10), 4, collate_fn=collate)  # type: ignore[arg-type]
        trainer(D9DStrategy(microbatch_size=2), max_epochs=1, precision="64-true").fit(module, data)
        modules.append(module)
    for name, weight in modules[0].state_dict().items():
        assert_close_named(name, modules[1].state_dict()[name], weight)


def test_a_list_that_was_taken_for_columns_and_has_rows_is_refused() -> None:
    """A mean over the batch weighs by rows, which are counted where nothing is split, too."""
    rows = BatchRows()
    assert rows.count(ragged(5, 5, 5), strict=False) == 5
    assert rows.count(ragged(4, 4, 4), strict=False) == 4
    with pytest.raises(
        ConfigError,
        match=r"is ambiguous, here or with an earlier batch. It could have one entry for each row, or tensors.*3 rows",
    ):
        rows.count(ragged(5, 7, 3), strict=False)
    rows = BatchRows()
    assert rows.count(ragged(5, 7, 3), strict=False) == 3
    assert rows.count(ragged(5, 5, 5), strict=False) == 3  # as before


def test_lists_are_refused_in_the_first_batch() -> None:
    pairs: Any = DataLoader(torch.utils.data.TensorDataset(torch.zeros(8, 8), torch.zeros(8, 8)), 4)
    module = Recorded()
    with pytest.raises(ConfigError, match=r"There are 2 or 4 rows"):
        trainer(D9DStrategy(microbatch_size=2), max_epochs=1).fit(module, pairs)
    assert not module.gradients
