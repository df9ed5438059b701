"""Orders of rows, and rows: by hand, and for any lengths."""

from __future__ import annotations

from itertools import chain, pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_d9d import ConfigError
from lightning_d9d.data.epoch_sampler import EpochSampler
from lightning_d9d.data.packing import GroupedOrder, PackedOrder, packed_row, padded_rows

STABLE = settings(deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow])
LENGTHS = st.lists(st.integers(1, 20), max_size=60)


def test_best_fit_by_hand() -> None:
    order = PackedOrder([4, 7, 3, 6, 5, 1, 2], row_length=10)
    rows = order(seed=0, epoch=0)
    assert sorted(sorted(row) for row in rows) == [[0, 3], [1, 2], [4, 5, 6]]  # 6 + 4, 7 + 3, 5 + 2 + 1


def test_the_fullest_row_in_which_a_sample_fits_is_taken() -> None:
    rows = PackedOrder([8, 6, 2, 2], row_length=10)(seed=0, epoch=0)
    assert sorted(map(len, rows)) == [2, 2]  # 8 + 2 and 6 + 2


@STABLE
@given(LENGTHS, st.integers(0, 3))
def test_each_sample_is_in_one_row_of_an_epoch(lengths: list[int], epoch: int) -> None:
    order = PackedOrder(lengths, row_length=20)
    rows = order(seed=1, epoch=epoch)
    assert sorted(chain(*rows)) == list(range(len(lengths)))
    filled = sorted(sum(lengths[sample] for sample in row) for row in rows)
    assert len(rows) == len(order)
    assert all(0 < each <= 20 for each in filled)
    assert len(filled) < 2 or filled[0] + filled[1] > 20  # no two rows fit into one


def test_orders_follow_from_seed_and_epoch() -> None:
    lengths = torch.randint(1, 20, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    for order in (PackedOrder(lengths, 20), GroupedOrder(lengths, 8)):
        torch.manual_seed(5)
        first = order(seed=1, epoch=0)
        torch.manual_seed(6)
        assert order(seed=1, epoch=0) == first
        assert sorted(order(seed=1, epoch=1)) != sorted(first) or isinstance(order, GroupedOrder)
        assert order(seed=1, epoch=1) != first
        assert order(seed=2, epoch=0) != first
        assert type(order)(lengths, *order.description.values())(seed=1, epoch=0) == first


def test_a_sample_longer_than_a_row_is_refused() -> None:
    with pytest.raises(ConfigError, match="a sample has 11 tokens, but a row only 10"):
        PackedOrder([3, 11], row_length=10)


@STABLE
@given(LENGTHS, st.integers(1, 7))
def test_groups_have_neighbouring_lengths(lengths: list[int], size: int) -> None:
    rows = GroupedOrder(lengths, size)(seed=0, epoch=0)
    samples = list(chain(*rows))
    assert sorted(samples) == list(range(len(lengths)))
    groups = [samples[start : start + size] for start in range(0, len(samples) - size + 1, size)]
    spans = sorted((min(lengths[i] for i in group), max(lengths[i] for i in group)) for group in groups)
    assert all(before[1] <= after[0] for before, after in pairwise(spans))


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_data_ranks_share_each_global_batch(num_ranks: int) -> None:
    order = GroupedOrder(list(range(1, 42)), group_size=8)
    samplers = [EpochSampler(order, num_ranks, rank, seed=3) for rank in range(num_ranks)]
    for sampler in samplers:
        sampler.set_epoch(2)
    shares = [list(sampler) for sampler in samplers]
    assert [len(share) for share in shares] == [len(sampler) for sampler in samplers] == [41 // num_ranks] * num_ranks
    whole, size = order(seed=3, epoch=2), 8 // num_ranks
    for start in range(0, 40, 8):
        of_ranks = [share[start // num_ranks : start // num_ranks + size] for share in shares]
        assert sorted(chain(*of_ranks)) == sorted(whole[start : start + 8])


def test_an_order_that_is_not_shuffled_is_that_of_the_first_epoch() -> None:
    order = PackedOrder([3, 4, 5], 6)
    sampler = EpochSampler(order, 1, 0, seed=0, shuffle=False)
    sampler.set_epoch(4)
    assert list(sampler) == order(seed=0, epoch=0)


def sample(*ids: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(ids), torch.tensor([-100, *ids[2:], 99])


def test_a_packed_row() -> None:
    row = packed_row([sample(1, 2, 3), sample(4, 5)], row_length=7, padding_id=8)
    assert {name: values.tolist() for name, values in row.items()} == {
        "input_ids": [1, 2, 3, 4, 5, 8, 8],
        "labels": [-100, 3, 99, -100, 99, -100, -100],
        "document_ids": [0, 0, 0, 1, 1, 2, 2],
    }


@pytest.mark.parametrize(("multiple", "length"), [(1, 3), (4, 4)])
def test_padded_rows(multiple: int, length: int) -> None:
    rows = padded_rows([sample(1, 2, 3), sample(4, 5)], multiple, padding_id=8)
    assert [row["input_ids"].tolist() for row in rows] == [[1, 2, 3, 8][:length], [4, 5, 8, 8][:length]]
    assert [row["labels"].tolist() for row in rows] == [[-100, 3, 99, -100][:length], [-100, 99, -100, -100][:length]]
    assert set(rows[0]) == {"input_ids", "labels"}
