"""Replicas that mix, in a fit after one that errors have ended while a round was under way."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from tests.harness.ranks import RankContext
from tests.strategy.test_uneven_replicas import Kept, check, fit, rows_of

ROUND = "test_mixing_after_errors/first round"


class FailsInARound(Kept):
    """The first rank fails after it has begun the first round, and all others before."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.global_rank > 0:
            dist.distributed_c10d._get_default_store().wait([ROUND])
            raise ValueError("before its first round")
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *args: Any) -> None:
        dist.distributed_c10d._get_default_store().set(ROUND, "has begun")
        raise ValueError("after its first round")


def check_fits(rank: RankContext, sync: str) -> None:
    with pytest.raises(ValueError, match="its first round"):
        fit(rank, FailsInARound(), rows_of(rank.rank, 3), sync)
    check(rank, (3,) * rank.world_size, sync)


@pytest.mark.ranks(2, record=False)
def test_two_replicas_that_exchange_weights(rank: RankContext) -> None:
    check_fits(rank, "ring")


@pytest.mark.ranks(4, record=False)
def test_four_replicas_that_sum_weights(rank: RankContext) -> None:
    check_fits(rank, "complete")
