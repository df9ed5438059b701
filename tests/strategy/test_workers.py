"""Dataloader workers that are forked from a process with groups."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from lightning_d9d import D9DStrategy
from lightning_d9d.mesh.native_threads import guard_native_threads
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


class TakesLong:
    """Keeps the thread that lets go of it busy."""

    def __init__(self, begun: threading.Event, ended: threading.Event) -> None:
        self.begun, self.ended = begun, ended

    def __del__(self) -> None:
        self.begun.set()
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            pass
        self.ended.set()


@pytest.mark.ranks(2)
def test_a_fork_waits_for_threads_of_gloo(rank: RankContext) -> None:
    """One of them that is entering or leaving the interpreter may have a lock that the new process needs."""
    guard_native_threads()
    begun, ended, has_dropped = threading.Event(), threading.Event(), rank.tmp_dir / "has dropped"
    tensor = torch.ones(4)
    if rank.rank == 0:
        os.mkfifo(has_dropped)
    rank.barrier()
    if rank.rank == 1:
        has_dropped.read_bytes()
        dist.all_reduce(tensor)
        return
    tensor.takes_long = TakesLong(begun, ended)  # type: ignore[attr-defined]
    dist.all_reduce(tensor, async_op=True)
    del tensor  # the thread of gloo has the last reference, as the other rank has not come yet
    has_dropped.write_bytes(b"")
    assert begun.wait(60)
    process = os.fork()
    if process == 0:
        os._exit(0 if ended.is_set() else 3)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
