"""Random orders without memory: permutations, views, and what data ranks get of them."""

from __future__ import annotations

import pytest
import torch

from lightning_d9d.data.epoch_sampler import EpochSampler
from lightning_d9d.data.permutation import PermutedOrder


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 97, 5000, 12345])
def test_every_sample_once(size: int) -> None:
    assert sorted(PermutedOrder(size)(seed=3, epoch=0)) == list(range(size))
    assert sorted(PermutedOrder(size)(seed=3, epoch=5)) == list(range(5 * size, 6 * size))


def test_orders_of_seeds_and_epochs_differ() -> None:
    first = list(PermutedOrder(1000)(seed=0, epoch=0))
    assert first == list(PermutedOrder(1000)(seed=0, epoch=0))
    assert first != list(PermutedOrder(1000)(seed=1, epoch=0))
    assert first != [index - 1000 for index in PermutedOrder(1000)(seed=0, epoch=1)]


def test_samples_are_anywhere() -> None:
    """Each of 10 samples is about equally often at each of 10 places, and behind each other sample."""
    size, num_orders = 10, 300
    orders = torch.tensor([list(PermutedOrder(size)(seed=seed, epoch=0)) for seed in range(num_orders)])
    counts = torch.stack([torch.bincount(orders[:, place], minlength=size) for place in range(size)])
    expected = num_orders / size
    # Scaled as both margins are fixed: chi-square with 81 degrees of freedom, above 127 once in a thousand seeds.
    assert ((counts - expected) ** 2 / expected).sum().item() * (size - 1) / size < 127
    pairs = torch.bincount((orders[:, :-1] * size + orders[:, 1:]).flatten(), minlength=size**2)
    pairs = pairs.view(size, size)[~torch.eye(size, dtype=torch.bool)].double()
    expected = num_orders * (size - 1) / len(pairs)
    assert ((pairs - expected) ** 2 / expected).sum().item() < 137  # of 89


def test_slices_are_views() -> None:
    whole = list(PermutedOrder(10_000)(seed=1, epoch=2))
    order = PermutedOrder(10_000)(seed=1, epoch=2)
    assert list(order[10:9000:3][5:]) == whole[10:9000:3][5:]
    assert (order[17], order[-1], order[3:][0]) == (whole[17], whole[-1], whole[3])
    far = PermutedOrder(10**15)(seed=0, epoch=0)[10**14 :]
    assert len(far) == 9 * 10**14
    assert 0 <= far[10**14] < 10**15


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_ranks_share_each_global_batch(num_ranks: int) -> None:
    order, global_batch = PermutedOrder(1003), 16
    shares = [list(EpochSampler(order, num_ranks, rank, seed=5)) for rank in range(num_ranks)]
    assert {len(share) for share in shares} == {len(EpochSampler(order, num_ranks, 0))} == {1003 // num_ranks}
    size = global_batch // num_ranks
    alone = list(EpochSampler(order, 1, 0, seed=5))
    for batch in range(1003 // global_batch):
        together = {index for share in shares for index in share[batch * size : (batch + 1) * size]}
        assert together == set(alone[batch * global_batch : (batch + 1) * global_batch])


def test_epochs_of_a_sampler() -> None:
    sampler = EpochSampler(PermutedOrder(50), 1, 0)
    sampler.set_epoch(3)
    assert list(sampler) == list(PermutedOrder(50)(seed=0, epoch=3))
