"""Loaders go on in the middle of an epoch: the batches of an uninterrupted one, without reading the first again."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from lightning_d9d.data import can_resume_by_sampler, make_resumable

ROWS, BATCH = 31, 4


class Numbers(Dataset[int]):
    """Remembers what was read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        return index


class ShuffledBatches(BatchSampler):
    """Batches of neighbours in an order that Python and NumPy draw, as for rows of similar length."""

    def __iter__(self) -> Iterator[list[int]]:
        batches = list(super().__iter__())
        random.shuffle(batches)
        return iter([batches[i] for i in np.random.permutation(len(batches))])


def weighted_by_own_generator() -> WeightedRandomSampler:
    generator = torch.Generator().manual_seed(torch.initial_seed())
    return WeightedRandomSampler(range(ROWS), 60, generator=generator)


Make = Callable[[Dataset[int]], DataLoader]
LOADERS: dict[str, Make] = {
    "in order": lambda data: DataLoader(data, batch_size=BATCH),
    "single rows": lambda data: DataLoader(data, batch_size=None),
    "short last batch dropped": lambda data: DataLoader(data, batch_size=BATCH, drop_last=True),
    "shuffled": lambda data: DataLoader(data, batch_size=BATCH, shuffle=True),
    "shuffled rows": lambda data: DataLoader(data, batch_size=None, sampler=RandomSampler(Numbers())),
    "own generator": lambda data: DataLoader(
        data, batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(torch.initial_seed())
    ),
    "with replacement": lambda data: DataLoader(
        data, batch_size=BATCH, sampler=RandomSampler(Numbers(), replacement=True, num_samples=70)
    ),
    "weighted": lambda data: DataLoader(data, batch_size=BATCH, sampler=WeightedRandomSampler(range(ROWS), 30)),
    "subset": lambda data: DataLoader(data, batch_size=BATCH, sampler=SubsetRandomSampler(range(3, ROWS))),
    "a rank's": lambda data: DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(Numbers(), 2, 1)),
    "own batches": lambda data: DataLoader(
        data, batch_sampler=BatchSampler(RandomSampler(Numbers()), BATCH, drop_last=False)
    ),
    "batches shuffled": lambda data: DataLoader(
        data, batch_sampler=ShuffledBatches(SequentialSampler(Numbers()), BATCH, drop_last=False)
    ),
    "any sampler, a rank's": lambda data: DataLoader(
        data, batch_size=BATCH, sampler=DistributedSamplerWrapper(weighted_by_own_generator(), num_replicas=2, rank=1)
    ),
    "workers": lambda data: DataLoader(data, batch_size=BATCH, shuffle=True, num_workers=2),
    "workers that stay": lambda data: DataLoader(
        data, batch_size=BATCH, shuffle=True, num_workers=1, persistent_workers=True
    ),
}


def seed(number: int) -> None:
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


def as_lists(loader: DataLoader) -> list[Any]:
    return [torch.as_tensor(batch).tolist() for batch in loader]


@pytest.mark.parametrize("num_read", [1, 2])
@pytest.mark.parametrize("name", LOADERS)
def test_goes_on(name: str, num_read: int) -> None:
    seed(1)
    loader, count = LOADERS[name](Numbers()), 0
    make_resumable(loader, lambda: count)
    as_lists(loader)  # an epoch before
    batches, numbers = [], torch.get_rng_state()
    for count, batch in enumerate(loader, 1):
        batches.append(torch.as_tensor(batch).tolist())
        if count == num_read:
            state = loader.state_dict()  # type: ignore[attr-defined]
            numbers = torch.get_rng_state()
    count = 0
    seed(2)
    data = Numbers()
    resumed = LOADERS[name](data)
    make_resumable(resumed, lambda: num_read + count)
    resumed.load_state_dict(state)  # type: ignore[attr-defined]
    torch.set_rng_state(numbers)
    seen = []
    for count, batch in enumerate(resumed, 1):
        seen.append(torch.as_tensor(batch).tolist())
        if count == 1:  # saved again in the same epoch
            again = resumed.state_dict()  # type: ignore[attr-defined]
    assert seen == batches[num_read:]
    if resumed.num_workers == 0:
        flat = [row for batch in batches[num_read:] for row in (batch if isinstance(batch, list) else [batch])]
        assert data.read == flat
    third = LOADERS[name](Numbers())
    make_resumable(third, lambda: 0)
    third.load_state_dict(again)  # type: ignore[attr-defined]
    assert as_lists(third) == batches[num_read + 1 :]
    assert len(as_lists(resumed)) == len(batches)  # the next epoch is whole


def test_the_next_epoch_has_the_order_of_an_uninterrupted_run() -> None:
    """The order of an epoch that goes on is drawn from the past; then random numbers go on where they were."""
    torch.manual_seed(1)
    loader, count = LOADERS["shuffled"](Numbers()), 0
    make_resumable(loader, lambda: count)
    numbers = torch.get_rng_state()
    for count, _ in enumerate(loader, 1):
        if count == 2:
            state, numbers = loader.state_dict(), torch.get_rng_state()  # type: ignore[attr-defined]
    following = as_lists(loader)
    resumed = LOADERS["shuffled"](Numbers())
    make_resumable(resumed, lambda: 0)
    resumed.load_state_dict(state)  # type: ignore[attr-defined]
    batches = iter(resumed)
    torch.set_rng_state(numbers)
    assert len(list(batches)) == len(resumed) - 2
    assert as_lists(resumed) == following


@pytest.mark.parametrize("name", ["own generator", "any sampler, a rank's"])
def test_an_epoch_after_a_whole_one_follows_from_an_own_generator(name: str) -> None:
    torch.manual_seed(1)
    loader = LOADERS[name](Numbers())
    make_resumable(loader, lambda: 0)
    first = as_lists(loader)
    state = loader.state_dict()  # type: ignore[attr-defined]
    following = as_lists(loader)
    assert following != first
    torch.manual_seed(2)
    resumed = LOADERS[name](Numbers())
    make_resumable(resumed, lambda: 0)
    as_lists(resumed)
    resumed.load_state_dict(state)  # type: ignore[attr-defined]
    assert as_lists(resumed) == following


@pytest.mark.parametrize("num_read", [0, 2])
def test_the_seed_of_an_order_is_the_saved_one(num_read: int) -> None:
    """Lightning takes it from `seed_everything`, which a job that goes on may call otherwise."""

    def make(number: int) -> DataLoader:
        loader = DataLoader(Numbers(), batch_size=BATCH, sampler=DistributedSampler(Numbers(), 2, 1, seed=number))
        make_resumable(loader, lambda: num_read)
        return loader

    loader, resumed = make(1), make(2)
    assert as_lists(loader) != as_lists(resumed)
    resumed.load_state_dict(loader.state_dict())  # type: ignore[attr-defined]
    assert as_lists(resumed) == as_lists(loader)[num_read:]
    assert as_lists(resumed) == as_lists(loader)


def test_it_can_be_undone() -> None:
    loader = LOADERS["shuffled"](Numbers())
    sampler = loader.batch_sampler
    undo = make_resumable(loader, lambda: 0)
    assert not can_resume_by_sampler(loader)
    assert loader.batch_sampler is not sampler
    assert len(loader) == 8
    assert loader.batch_sampler.batch_size == BATCH  # type: ignore[union-attr]
    undo()
    assert loader.batch_sampler is sampler
    assert can_resume_by_sampler(loader)


def test_a_shorter_loader_that_begins_again() -> None:
    loader = LOADERS["in order"](Numbers())  # 8 batches
    make_resumable(loader, lambda: 10)
    loader.load_state_dict(loader.state_dict())  # type: ignore[attr-defined]
    assert as_lists(loader)[0] == [8, 9, 10, 11]


def test_a_shorter_loader_at_its_end_does_not_begin_again_by_itself() -> None:
    """Who combines loaders decides: a cycle begins it again, and draws then; others leave it."""
    loader = LOADERS["shuffled"](Numbers())
    make_resumable(loader, lambda: 8)
    as_lists(loader)
    loader.load_state_dict(loader.state_dict())  # type: ignore[attr-defined]
    assert as_lists(loader) == []
    assert len(as_lists(loader)) == 8


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        yield 1


class Endless(BatchSampler):
    def __len__(self) -> int:
        raise TypeError


def test_loaders_that_it_is_not_for() -> None:
    assert not can_resume_by_sampler(DataLoader(Stream()))
    assert not can_resume_by_sampler([1, 2])
    endless = Endless(RandomSampler(Numbers()), BATCH, drop_last=False)
    assert not can_resume_by_sampler(DataLoader(Numbers(), batch_sampler=endless))
