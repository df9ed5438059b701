"""Dataloader workers that are forked from a process with groups."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from lightning_d9d import D9DStrategy
from tests.harness.ranks import RankContext
from tests.strategy.plain import Plain, rows, trainer


class Collecting(TensorDataset):
    """Rows whose reading collects garbage, as any Python code may."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        gc.collect()
        return super().__getitem__(index)


class Cycle:
    """What only the garbage collector ends."""

    def __init__(self, group: Any) -> None:
        self.group, self.itself = group, self


@contextmanager
def without_collecting() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.ranks(2)
def test_a_worker_leaves_the_groups_of_its_parent_alone(rank: RankContext) -> None:
    """A group of an earlier run, which nobody needs, waits for threads that a worker does not have."""
    data = DataLoader(Collecting(*rows(16).tensors), batch_size=4, num_workers=1)
    run = trainer(D9DStrategy(), rank.world_size, str(rank.device), max_epochs=1)
    with without_collecting():
        group: Any = dist.new_group([0, 1], backend="gloo")
        dist.all_reduce(torch.ones(1), group=group)
        Cycle(group)
        dist.destroy_process_group(group)
        del group
        run.fit(Plain(), data)
    assert run.global_step == 2
