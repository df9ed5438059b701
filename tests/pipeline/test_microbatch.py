from __future__ import annotations

import pytest
import torch

from lightning_d9d import ConfigError
from lightning_d9d.pipeline.microbatch import MicrobatchCount, num_rows, split_rows


def test_trees_are_cut_along_dim_0() -> None:
    batch = {"x": torch.arange(10).view(5, 2), "pair": (torch.arange(5), "name"), "scale": torch.tensor(2.0)}
    parts = split_rows(batch, 3)
    assert [part["x"].shape[0] for part in parts] == [2, 2, 1]
    assert torch.equal(torch.cat([part["x"] for part in parts]), batch["x"])
    assert torch.equal(torch.cat([part["pair"][0] for part in parts]), torch.arange(5))
    assert all(part["pair"][1] == "name" and part["scale"] is batch["scale"] for part in parts)
    assert parts[0]["x"].untyped_storage().data_ptr() == batch["x"].untyped_storage().data_ptr()


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
