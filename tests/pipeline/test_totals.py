"""Sums over microbatches in a dtype that is wide enough."""

from __future__ import annotations

import pytest
import torch

from lightning_d9d.pipeline.totals import BatchTotals, as_weighted
from lightning_d9d.pipeline.types import WeightedLoss


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_narrow_values_are_added_up_in_float32_at_least(dtype: torch.dtype) -> None:
    """bfloat16 counts to 256 and float16 to 2048, by ones."""
    totals = BatchTotals()
    one = torch.ones(1, dtype=dtype)
    for _ in range(2500):
        totals.add_loss(as_weighted(WeightedLoss(one, one), 1, "loss"), is_mean=False)
        totals.add_metrics({"mean": one, "sum": WeightedLoss(one, one)}, rows=3)
    wide = torch.promote_types(dtype, torch.float32)
    assert totals.loss is not None
    pairs = {"loss": totals.loss, **totals.metrics}
    assert {name: value.item() for name, (value, _) in pairs.items()} == {"loss": 2500, "mean": 7500, "sum": 2500}
    assert {name: weight.item() for name, (_, weight) in pairs.items()} == {"loss": 2500, "mean": 7500, "sum": 2500}
    assert {value.dtype for value, _ in pairs.values()} == {wide}


def test_integers_stay_exact() -> None:
    totals = BatchTotals()
    for count in (2**24, 1):
        tensor = torch.tensor(count)
        totals.add_loss(as_weighted(WeightedLoss(tensor, tensor), 1, "loss"), is_mean=False)
    assert totals.loss is not None
    assert [each.item() for each in totals.loss] == [2**24 + 1] * 2
