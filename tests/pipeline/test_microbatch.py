from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import pytest
import torch
from torch import Tensor

from lightning_d9d import ConfigError
from lightning_d9d.pipeline.microbatch import MicrobatchCount, num_rows, split_rows
from lightning_d9d.pipeline.trees import copy_containers


def test_trees_are_cut_along_dim_0() -> None:
    batch = {"x": torch.arange(10).view(5, 2), "pair": (torch.arange(5), "name"), "scale": torch.tensor(2.0)}
    parts = split_rows(batch, 3)
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
        assert num_rows(batch) == 4
        parts = split_rows(batch, 2)
        assert [part["x"].tolist() for part in parts] == [[0, 1], [2, 3]]
        assert {type(part) for part in parts} == {type(batch)}
    assert split_rows(defaultdict(list, x=x), 2)[1]["y"] == []
    assert [part.x.tolist() for part in split_rows(Sample(x, "name"), 2)] == [[0, 1], [2, 3]]
    assert [part["none"] for part in split_rows({"x": x, "none": []}, 2)] == [[], []]


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
    with pytest.raises(ConfigError, match=r"a batch has a Fixed, which cannot be made of new values.*split_batch"):
        split_rows(Fixed(), 2)


def test_copies_of_containers_keep_their_leaves() -> None:
    batch = Features(x=torch.arange(4), pair=(torch.arange(2), "name"))
    copied = copy_containers(batch)
    copied["x"] = None
    assert batch["x"].tolist() == [0, 1, 2, 3]
    assert copied["pair"][0] is batch["pair"][0]
    for other in (Fixed(), Sample(torch.arange(4), "name")):
        assert copy_containers({"other": other})["other"] is other


def test_tensors_that_disagree_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"shapes \[\(2,\), \(3,\)\].*override split_batch"):
        num_rows([torch.zeros(2), torch.zeros(3)])
    with pytest.raises(ConfigError, match="override split_batch"):
        num_rows({"text": "abc"})


@pytest.mark.parametrize(
    ("size", "number", "rows", "expected"), [(2, None, 6, 3), (2, None, 5, 3), (None, 4, 8, 4), (None, 4, 3, 3)]
)
def test_number_of_microbatches(size: int | None, number: int | None, rows: int, expected: int) -> None:
    assert MicrobatchCount(size, number).of(rows) == expected


def test_check_names_what_divides() -> None:
    MicrobatchCount(4, None).check(8)
    MicrobatchCount(None, 4).check(8)
    with pytest.raises(ConfigError, match=r"6 rows, which microbatch_size=4 does not divide.*\[1, 2, 3, 6\]"):
        MicrobatchCount(4, None).check(6)
