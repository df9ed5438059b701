"""Ranks whose data differ in length: training is refused or fails soon with a clear text, evaluation goes on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_d9d import ConfigError, D9DStrategy, TimeoutConfig
from lightning_d9d.errors import RankError
from tests.harness.ranks import RankContext
from tests.strategy.plain import Plain, loader, rows, trainer
from tests.strategy.staged import Staged, staged_rows


class Stream(IterableDataset):
    """Rows without a length, or with a wrong one."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        return (rows(self.num_rows)[i] for i in range(self.num_rows))


class SizedStream(Stream):
    def __len__(self) -> int:
        return 12


def run_trainer(rank: RankContext, **options: Any) -> L.Trainer:
    return trainer(
        D9DStrategy(timeouts=TimeoutConfig(shutdown_seconds=30)),
        rank.world_size,
        str(rank.device),
        use_distributed_sampler=False,
        **options,
    )


@pytest.mark.ranks(2)
@pytest.mark.parametrize("make", [Plain, Staged])
def test_unequal_numbers_of_training_batches_are_refused(rank: RankContext, make: Any) -> None:
    data: Any = rows if make is Plain else staged_rows
    train: DataLoader = DataLoader(data(8 + 4 * rank.rank), batch_size=4)
    text = r"rank 0 has 2 training batches and rank 1 has 3 .*False.*DistributedSampler.*limit_train_batches"
    with pytest.raises(ConfigError, match=text):
        run_trainer(rank).fit(make(), train)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", [{"limit_train_batches": 2}, {"overfit_batches": 1}])
def test_ranks_that_use_the_same_number_of_batches_train(rank: RankContext, options: dict[str, Any]) -> None:
    run = run_trainer(rank, **options)
    run.fit(Plain(), loader(8 + 4 * rank.rank), loader(8))
    assert rank.all_gather_object(run.global_step) == [run.global_step] * 2
    assert run.global_step >= 2


@pytest.mark.ranks(2)
def test_combined_loaders_of_equal_length_train(rank: RankContext) -> None:
    """What counts is how many batches training takes from all loaders."""

    class Both(Plain):
        def loss(self, batch: Any) -> Tensor:
            return super().loss(batch["long"]) + super().loss(batch["short"])

    both = CombinedLoader({"long": loader(12), "short": loader(4 + 4 * rank.rank)}, "max_size_cycle")
    run = run_trainer(rank)
    run.fit(Both(), both)
    assert run.global_step == 6


@pytest.mark.ranks(2)
def test_reloaded_data_are_compared_again(rank: RankContext) -> None:
    class Growing(Plain):
        def train_dataloader(self) -> DataLoader:
            return loader(8 + 4 * self.current_epoch * self.global_rank)

    run = run_trainer(rank, reload_dataloaders_every_n_epochs=1)
    with pytest.raises(ConfigError, match="rank 0 has 2 training batches and rank 1 has 3"):
        run.fit(Growing())
    assert run.current_epoch == 1


@pytest.mark.ranks(2)
def test_a_rank_without_training_batches_is_refused(rank: RankContext) -> None:
    """Lightning lets such a rank leave at once if the module allows it."""
    module = Plain()
    module.allow_zero_length_dataloader_with_multiple_devices = True
    with pytest.raises(ConfigError, match="rank 0 has 0 training batches and rank 1 has 1"):
        run_trainer(rank).fit(module, loader(4 * rank.rank))


@pytest.mark.ranks(2, record=False)
@pytest.mark.parametrize("stream", [Stream, SizedStream])
def test_data_that_end_early_without_a_word(rank: RankContext, stream: type[Stream]) -> None:
    """Rank 0 waits at the end of its epoch, so that nothing of its validation meets the other's third batch."""
    validated = []

    class Watch(Plain):
        def on_validation_start(self) -> None:
            validated.append(self.global_step)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                raise StopIteration  # instead of the gradient sum, in which the process would have to be ended

    train = DataLoader(stream(8 + 4 * rank.rank), batch_size=4)
    text = "rank 0 failed: its training data ended after 2 batches, those of rank 1 did not; give every rank"
    with pytest.raises(RankError, match=text):
        run_trainer(rank, max_time={"minutes": 5}).fit(Watch(), train, loader(8))  # a broadcast after each batch
    assert not validated


@pytest.mark.ranks(2)
def test_streams_of_equal_length_train(rank: RankContext) -> None:
    run = run_trainer(rank)
    run.fit(Plain(), DataLoader(Stream(12), batch_size=4), loader(8))
    assert run.global_step == 6


@pytest.mark.ranks(2)
def test_a_rank_without_validation_batches(rank: RankContext) -> None:
    """The other one's batch norm statistics follow rank 0's nevertheless, in a collective of both."""

    means_seen: list[Tensor] = []

    class Silent(Plain):
        def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
            means_seen.append(self.net.get_buffer("1.running_mean").clone())

    module = Silent()
    run = run_trainer(rank, max_epochs=1)
    generator = torch.Generator().manual_seed(rank.rank)
    train = DataLoader(rows(8), batch_size=4, sampler=torch.randperm(8, generator=generator).tolist())
    run.fit(module, train, DataLoader(Stream(8 * rank.rank), batch_size=4))
    means = rank.all_gather_object((means_seen, module.net.get_buffer("1.running_mean")))
    assert [len(seen) for seen, _ in means] == [0, 2]
    torch.testing.assert_close(means[1][0][0], means[0][1], rtol=0, atol=0)
