"""Ranks of plain modules whose data differ in length: training is refused or fails soon with a clear text, evaluation
goes on. D9DModules are in `test_uneven_batches.py`."""

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
def test_unequal_numbers_of_training_batches_are_refused(rank: RankContext) -> None:
    text = r"rank 0 has 2 training batches and rank 1 has 3 .*False.*DistributedSampler.*limit_train_batches"
    with pytest.raises(ConfigError, match=text):
        run_trainer(rank).fit(Plain(), loader(8 + 4 * rank.rank))


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


@pytest.mark.ranks(2)
@pytest.mark.parametrize("run", ["fit", "validate", "test"])
def test_a_rank_without_evaluation_batches_is_refused(rank: RankContext, run: str) -> None:
    """Lightning leaves the evaluation out there, and others wait at its end."""
    module = Plain()
    module.allow_zero_length_dataloader_with_multiple_devices = True
    data = [loader(8), loader(4 * rank.rank)] if run == "fit" else [loader(4 * rank.rank)]
    with pytest.raises(ConfigError, match="DataLoader of Plain has no batch on rank 0: its dataset is empty"):
        getattr(run_trainer(rank), run)(module, *data)


@pytest.mark.ranks(2, record=False)
@pytest.mark.parametrize("stream", [Stream, SizedStream])
def test_data_that_end_early_without_a_word(rank: RankContext, stream: type[Stream]) -> None:
    """Rank 0 waits at the end of its epoch, so that nothing of its validation meets the other's third batch."""
    validated = []

    class Watch(Plain):
        def on_validation_start(self) -> None:
            validated.append(self.global_step)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if batch_idx == 2:
                raise StopIteration  # instead of the gradient sum, in which the process would have to be ended
            return super().training_step(batch, batch_idx)

    train = DataLoader(stream(8 + 4 * rank.rank), batch_size=4)
    text = "rank 0 failed: its training data ended after 2 batches, those of rank 1 did not; give every rank"
    with pytest.raises(RankError, match=text):
        run_trainer(rank, max_time={"minutes": 5}).fit(
            Watch(batch_norm=False), train, loader(8)
        )  # a broadcast after each
    assert not validated


@pytest.mark.ranks(2, record=False)
def test_a_later_epoch_without_batches(rank: RankContext) -> None:
    """Rank 0's generator is exhausted after one epoch. Its second epoch ends where the first one did."""

    class Once(Stream):
        def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
            yield from super().__iter__()
            self.num_rows = 0 if rank.rank == 0 else self.num_rows

    class Watch(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if self.current_epoch == 1:
                raise StopIteration  # as above
            return super().training_step(batch, batch_idx)

    with pytest.raises(RankError, match="rank 0 failed: its training data ended after 2 batches, those of rank 1 did"):
        run_trainer(rank).fit(Watch(batch_norm=False), DataLoader(Once(8), batch_size=4))


@pytest.mark.ranks(2, record=False)
def test_a_batch_of_none_on_one_rank(rank: RankContext) -> None:
    """Lightning leaves the step out; the rank's next gradient sum would meet another batch's."""

    def collate(parts: list[Any]) -> Any:
        return None if rank.rank == 1 and parts[0][1] is None else torch.utils.data.default_collate(parts)

    class Watch(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if batch_idx == 1:
                raise StopIteration  # instead of the gradient sum that the other rank left out
            return super().training_step(batch, batch_idx)

    data: Any = [*rows(4), *([(torch.zeros(8), None)] * 4 if rank.rank == 1 else rows(4))]
    text = "the DataLoader of rank 1 returned None for training batch 2 "
    with pytest.raises(RankError, match=text):
        run_trainer(rank).fit(Watch(batch_norm=False), DataLoader(data, batch_size=4, collate_fn=collate))


class NamesDiffer(Staged):
    """A module with a metric of another name on rank 1 in the first batch, or on every rank in a later one."""

    def __init__(self, from_batch: int) -> None:
        super().__init__()
        self.from_batch = from_batch

    def microbatch_metrics(self, output: Tensor, microbatch: Any) -> dict[str, Any]:
        batch = self.trainer.fit_loop.epoch_loop.batch_idx
        other = batch >= self.from_batch > 0 or (self.from_batch == 0 and self.global_rank == 1)
        return {"b" if other else "a": output.mean()}


@pytest.mark.ranks(2, record=False)
@pytest.mark.parametrize("from_batch", [0, 1])
def test_training_metrics_of_unequal_names_are_refused(rank: RankContext, from_batch: int) -> None:
    with pytest.raises(ConfigError, match=r"'(a|b)'.*WeightedLoss\(0, 0\)"):
        run_trainer(rank).fit(NamesDiffer(from_batch), DataLoader(staged_rows(8), batch_size=4))  # type: ignore[arg-type]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("run", ["validate", "test"])
def test_a_rank_that_evaluates_nothing_and_logs_nothing(rank: RankContext, run: str) -> None:
    class Rows(IterableDataset):
        def __iter__(self) -> Iterator[dict[str, Tensor]]:
            return iter(staged_rows(8 * rank.rank))

    with pytest.raises(
        RankError, match=r"rank 0 logged \[\] in evaluation, but rank 1 logged \['.*loss.*give every rank at"
    ):
        getattr(run_trainer(rank), run)(Staged(), DataLoader(Rows(), batch_size=4))


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
            means_seen.append(self.net.get_buffer("1.running_mean").cpu().clone())

    module = Silent()
    run = run_trainer(rank, max_epochs=1)
    generator = torch.Generator().manual_seed(rank.rank)
    train = DataLoader(rows(8), batch_size=4, sampler=torch.randperm(8, generator=generator).tolist())
    run.fit(module, train, DataLoader(Stream(8 * rank.rank), batch_size=4))
    means = rank.all_gather_object((means_seen, module.net.get_buffer("1.running_mean").cpu()))
    assert [len(seen) for seen, _ in means] == [0, 2]
    torch.testing.assert_close(means[1][0][0], means[0][1], rtol=0, atol=0)
