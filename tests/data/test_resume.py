"""Loaders go on in the middle of an epoch: the batches of an uninterrupted one, without reading the first again."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.data import _replace_dunder_methods
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

from lightning_d9d import StateError
from lightning_d9d.data import (
    DataRank,
    EpochSampler,
    GroupedOrder,
    PackedOrder,
    PermutedOrder,
    can_replay,
    can_resume_by_sampler,
    make_replayed,
    make_resumable,
    resumes_at,
    seed_workers,
)

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


@pytest.mark.parametrize("kind", ["resumable", "replayed", "workers"])
def test_what_lightning_records_of_a_loader_is_not_what_was_put_there_for_a_run(kind: str) -> None:
    """Lightning records while a hook returns a loader, and continues after a hook that raised."""
    with _replace_dunder_methods(DataLoader, "dataset"):
        loader = LOADERS["shuffled"](Numbers())
        before = copy.copy(vars(loader))
        undo = {
            "resumable": lambda: make_resumable(loader, lambda: 0),
            "replayed": lambda: make_replayed(loader, lambda: 0),
            "workers": lambda: seed_workers(loader, 1, {"dp": 0}),
        }[kind]()
        undo()
        assert vars(loader) == before
        assert type(loader) is DataLoader


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


# Other data ranks


def dealt(num_ranks: int, size: int, drop_last: bool = False, shuffle: bool = True) -> list[DataLoader]:
    """The loaders of all data ranks, as Lightning makes them."""
    options = {"batch_size": size, "drop_last": drop_last}
    if num_ranks == 1:
        return [DataLoader(Numbers(), shuffle=shuffle, **options)]
    samplers = [DistributedSampler(Numbers(), num_ranks, rank, shuffle=shuffle, seed=3) for rank in range(num_ranks)]
    return [DataLoader(Numbers(), sampler=sampler, **options) for sampler in samplers]


def read_on(loaders: list[DataLoader], states: list[Any] | None, num_steps: int | None) -> tuple[list[set[int]], Any]:
    """The samples of each step of all ranks together, and a state after so many."""
    counts, passes = [0] * len(loaders), []
    for rank, loader in enumerate(loaders):
        make_resumable(loader, lambda rank=rank: counts[rank], DataRank(rank, len(loaders)))
        if states is not None:
            loader.load_state_dict(states[0])  # type: ignore[attr-defined]
            place = resumes_at(loader)
            counts[rank] = states[0]["num_read"] if place is None else place
        passes.append(iter(loader))
    steps: list[set[int]] = []
    while num_steps is None or len(steps) < num_steps:
        batches = [next(each, None) for each in passes]
        if any(batch is None for batch in batches):
            assert batches == [None] * len(loaders)  # all have as many
            assert {len(loader) for loader in loaders} == set(counts)  # and the epoch as many as any other
            break
        counts = [count + 1 for count in counts]
        steps.append({row for batch in batches for row in torch.as_tensor(batch).tolist()})
    return steps, [loader.state_dict() for loader in loaders]  # type: ignore[attr-defined]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(
    "chain", [((2, 2), (1, 4)), ((1, 4), (2, 2)), ((4, 1), (2, 3)), ((2, 3), (3, 1)), ((1, 4), (3, 2), (3, 2), (1, 1))]
)
def test_the_rest_of_an_epoch_is_dealt_out_to_other_ranks(chain: tuple[tuple[int, int], ...], shuffle: bool) -> None:
    """Ranks and rows of a batch of each: every sample once, but for what fills up the last step."""
    torch.manual_seed(1)
    expected, _ = read_on(dealt(*chain[0], shuffle=shuffle), None, None)
    torch.manual_seed(1)
    states, seen = None, []
    for number, (num_ranks, size) in enumerate(chain):
        steps, states = read_on(dealt(num_ranks, size, shuffle=shuffle), states, 2 if number + 1 < len(chain) else None)
        seen += steps
        torch.manual_seed(7 + number)
    assert set().union(*seen) == set(range(ROWS))
    assert sum(map(len, seen)) <= ROWS + chain[-1][0]
    if len({num_ranks * size for num_ranks, size in chain}) == 1:
        assert seen[:-1] == expected[:-1]


class Rows(Numbers):
    """Asked for single samples, or for rows of them."""

    def __getitem__(self, index: int | tuple[int, ...]) -> int:
        return super().__getitem__(index if isinstance(index, int) else index[0])


LEAVING_OUT: dict[str, Callable[[int, int], DistributedSampler]] = {
    "torch's": lambda num_ranks, rank: DistributedSampler(Rows(), num_ranks, rank, seed=3, drop_last=True),
    "permuted": lambda num_ranks, rank: EpochSampler(PermutedOrder(ROWS), num_ranks, rank, seed=3),
    "grouped": lambda num_ranks, rank: EpochSampler(GroupedOrder(range(1, ROWS + 1), 4), num_ranks, rank, seed=3),
    "packed": lambda num_ranks, rank: EpochSampler(PackedOrder([9] * ROWS, 10), num_ranks, rank, seed=3),
}
"""Samplers that leave out samples which do not divide by ranks."""


@pytest.mark.parametrize("chain", [((1, 4), (4, 1)), ((4, 1), (2, 2), (1, 4)), ((2, 2), (2, 2), (4, 1))])
@pytest.mark.parametrize("name", LEAVING_OUT)
def test_steps_of_samplers_that_leave_out_the_rest_stay(name: str, chain: tuple[tuple[int, int], ...]) -> None:
    def loaders(num_ranks: int, size: int) -> list[DataLoader]:
        samplers = [LEAVING_OUT[name](num_ranks, rank) for rank in range(num_ranks)]
        return [DataLoader(Rows(), size, sampler=sampler, drop_last=True) for sampler in samplers]

    expected, _ = read_on(loaders(*chain[0]), None, None)
    states, seen = None, []
    for number, (num_ranks, size) in enumerate(chain):
        steps, states = read_on(loaders(num_ranks, size), states, 2 if number + 1 < len(chain) else None)
        seen += steps
    assert len(expected) == ROWS // 4
    assert seen == expected


def test_other_ranks_and_samples_that_nobody_knows_how_to_deal_out() -> None:
    def make(length: int) -> DataLoader:
        return DataLoader(Numbers(), batch_sampler=ShuffledBatches(range(length), BATCH, drop_last=False))

    loader = make(ROWS)
    make_resumable(loader, lambda: 2, DataRank(0, 2))
    state = loader.state_dict()  # type: ignore[attr-defined]
    same, other = make(ROWS), make(2 * ROWS)
    make_resumable(same, lambda: 2, DataRank(0, 4))
    same.load_state_dict(state)  # type: ignore[attr-defined]  # whoever deals out has as many steps: batches fit
    make_resumable(other, lambda: 2, DataRank(0, 1))
    with pytest.raises(StateError, match=r"2 data-parallel ranks saved .* 1 resume, .*use_distributed_sampler"):
        other.load_state_dict(state)  # type: ignore[attr-defined]


def test_other_ranks_with_data_of_their_own() -> None:
    """If each data rank has its own part, ranks have the steps in common."""
    first, second = (DataLoader(range(length), batch_size=BATCH) for length in (24, 48))  # type: ignore[arg-type]
    make_resumable(first, lambda: 2)
    make_resumable(second, lambda: 2, DataRank(0, 2))
    second.load_state_dict(first.state_dict() | {"num_batches": 12})  # type: ignore[attr-defined]
    assert as_lists(second)[0] == [8, 9, 10, 11]
    with pytest.raises(StateError, match="1 data-parallel ranks saved"):
        second.load_state_dict(first.state_dict())  # type: ignore[attr-defined]


# Streams


class Drawn(IterableDataset):
    """Counts, and draws when an epoch begins."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(12).tolist())


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_stream_is_read_again(num_workers: int) -> None:
    def make() -> DataLoader:
        return DataLoader(Drawn(), batch_size=2, num_workers=num_workers)

    seed(1)
    loader, count = make(), 0
    assert can_replay(loader)
    undo = make_replayed(loader, lambda: count)
    batches = []
    for count, batch in enumerate(loader, 1):
        batches.append(batch.tolist())
        if count == 2:
            state = loader.state_dict()  # type: ignore[attr-defined]
    seed(2)
    resumed = make()
    make_replayed(resumed, lambda: 2)
    resumed.load_state_dict(state)  # type: ignore[attr-defined]
    numbers = torch.get_rng_state()
    assert as_lists(resumed) == batches[2:]
    assert torch.equal(torch.get_rng_state(), numbers)
    assert len(as_lists(resumed)) == 6
    other = make()
    make_replayed(other, lambda: 2, DataRank(1, 2))
    with pytest.raises(StateError, match="1 data-parallel ranks saved"):
        other.load_state_dict(state)  # type: ignore[attr-defined]
    undo()
    assert type(loader) is DataLoader
    assert not hasattr(loader, "state_dict")
