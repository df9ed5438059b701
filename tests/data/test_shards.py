"""Shards of datasets, datasets sorted by length in parts, padded batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_d9d.data import BufferSortedDataset, ShardedDataset, pad_stack_1d
from lightning_d9d.errors import ConfigError, StateError


class Texts(list[int]):
    """Lengths, with a state that counts."""

    state = 0

    def sort_key(self, index: int) -> int:
        return self[index]

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict["state"]


def items(dataset: Any) -> list[int]:
    return [dataset[index] for index in range(len(dataset))]


@pytest.mark.parametrize("mode", ["sequential", "chunked"])
@pytest.mark.parametrize("num_items", [0, 1, 4, 5, 8, 9])
@pytest.mark.parametrize("num_shards", [1, 3, 4, 7])
def test_shards_have_each_item_once(mode: Any, num_items: int, num_shards: int) -> None:
    data = list(range(num_items))
    shards = [ShardedDataset(data, num_shards, shard, mode, False) for shard in range(num_shards)]
    assert sorted(item for shard in shards for item in items(shard)) == data
    padded = [ShardedDataset(data, num_shards, shard, mode) for shard in range(num_shards)]
    assert {len(shard) for shard in padded} == {-(-num_items // num_shards)}
    for own, filled in zip(shards, padded, strict=True):
        assert items(filled) == items(own) + data[-1:] * (len(filled) - len(own))


def test_where_items_lie() -> None:
    data = list(range(10))
    assert [items(ShardedDataset(data, 4, shard, "sequential", False)) for shard in range(4)] == [
        *([0, 4, 8], [1, 5, 9], [2, 6], [3, 7])
    ]
    assert [items(ShardedDataset(data, 4, shard, "chunked")) for shard in range(4)] == [
        *([0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 9, 9])
    ]
    assert len(ShardedDataset(range(5), 4, 3, "chunked", False)) == 0
    assert list(ShardedDataset(data, 4, 3, "chunked", False)) == [9]  # type: ignore[call-overload]


def test_a_state_leaves_the_shard_as_it_is() -> None:
    first, second = (ShardedDataset(Texts([1, 2, 3]), 2, shard) for shard in range(2))
    first.dataset.state = 5  # type: ignore[attr-defined]
    second.load_state_dict(first.state_dict())
    assert (second.current_shard, second.dataset.state) == (1, 5)  # type: ignore[attr-defined]
    with pytest.raises(StateError, match="the state is of 2 shards, but there are 3"):
        ShardedDataset([1], 3, 0).load_state_dict(first.state_dict())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((iter([1]), 2, 0), "list_iterator has no length"),
        (([1], 2, 2), "current_shard=2 must be at least 0 and less than total_shards=2"),
        (([1], 2, 0, "random"), "indexing_mode='random' must be"),
    ],
)
def test_bad_shards(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ShardedDataset(*arguments)
    with pytest.raises(IndexError, match="item 2 of 2 items of shard 1"):
        ShardedDataset([1, 2, 3], 2, 1)[2]


def lengths(count: int) -> Texts:
    return Texts(torch.randint(5, 500, (count,), generator=torch.Generator().manual_seed(0)).tolist())


def test_packs_have_neighbours_of_the_sorted_buffer() -> None:
    data = lengths(70)
    sorted_ = BufferSortedDataset(data, buffer_size=32, pack_size=8, seed=1)
    order = items(sorted_)
    for start, stop in ((0, 32), (32, 64), (64, 70)):
        expected = sorted(data[start:stop])
        packs = [sorted(order[place : min(place + 8, stop)]) for place in range(start, stop, 8)]
        wanted = [expected[place : place + 8] for place in range(0, stop - start, 8)]
        assert sorted(packs) == wanted
        assert start == 64 or packs != wanted  # in another order
    assert sorted(order) == sorted(data)


def test_a_last_pack_that_is_not_full_stays_last() -> None:
    data = lengths(30)
    for seed in range(5):
        order = items(BufferSortedDataset(data, 30, 8, seed))
        assert sorted(order[24:]) == sorted(data)[24:]


def test_the_order_follows_from_seed_and_epoch_alone() -> None:
    dataset = BufferSortedDataset(lengths(50), 16, 4, seed=2)
    order = items(dataset)
    assert [dataset[index] for index in reversed(range(50))] == order[::-1]
    again = BufferSortedDataset(lengths(50), 16, 4, seed=0)
    assert items(again) != order
    dataset.set_epoch(3)
    dataset.base.state = 4  # type: ignore[attr-defined]
    third = items(dataset)
    assert third != order
    again.load_state_dict(dataset.state_dict())
    assert items(again) == third
    assert again.base.state == 4  # type: ignore[attr-defined]
    with pytest.raises(IndexError, match="item 50 of 50"):
        again[50]
    with pytest.raises(ConfigError, match="buffer_size=4 and pack_size=0 must be"):
        BufferSortedDataset(lengths(3), 4, 0)


def test_equal_keys_are_shuffled() -> None:
    class Equal(Texts):
        def sort_key(self, index: int) -> int:
            return 0

    packs = {frozenset(items(BufferSortedDataset(Equal(range(8)), 8, 4, seed))[:4]) for seed in range(4)}
    assert len(packs) > 1


def test_pad_stack() -> None:
    rows = [torch.tensor([1, 2, 3]), torch.tensor([4]), torch.tensor([], dtype=torch.int64)]
    assert pad_stack_1d(rows, -100).tolist() == [[1, 2, 3], [4, -100, -100], [-100] * 3]
    assert pad_stack_1d(rows, 0, "left", 4).tolist() == [[0, 1, 2, 3], [0, 0, 0, 4], [0] * 4]
    assert pad_stack_1d(rows, 0, pad_to_multiple_of=3).shape == (3, 3)
    assert pad_stack_1d(rows, 0).dtype == torch.int64


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], 0), "at least one tensor"),
        (([torch.zeros(1)], 0, "right", 0), "pad_to_multiple_of=0 must be"),
        (([torch.zeros(1)], 0, "top"), "padding_side='top' must be"),
        (([torch.zeros(1, 2)], 0), r"takes tensors \[length\], not \[\[1, 2\]\]"),
    ],
)
def test_bad_stacks(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pad_stack_1d(*arguments)
