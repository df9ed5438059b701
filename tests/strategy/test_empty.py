"""Batches, windows and epochs in which nothing counts."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate

from lightning_d9d import ConfigError, D9DStrategy, MeshConfig
from lightning_d9d.errors import RankError
from lightning_d9d.models.qwen3_moe import Qwen3MoePretraining
from lightning_d9d.strategy.empty import EmptyBatches
from tests.harness.compare import assert_bitwise_equal
from tests.harness.ranks import RankContext
from tests.models.test_qwen3_moe_module import CONFIG
from tests.strategy.plain import Plain, trainer
from tests.strategy.staged import IGNORED, Recorded, Staged, staged_rows

BATCH, WINDOW, EPOCH = "a training batch has nothing", "an optimizer step is left out", "an epoch had nothing"


def rows(counting: Sequence[bool], batch_size: int = 2) -> list[dict[str, Tensor]]:
    """Batch i counts if entry i says so."""
    data = staged_rows(len(counting) * batch_size, ignored_every=None)
    for index, row in enumerate(data):
        row["y"] = torch.tensor(index % 4 if counting[index // batch_size] else IGNORED)
    return data


def fit(counting: Sequence[bool], strategy: Any = None, module: Any = None, **options: Any) -> tuple[Any, list[str]]:
    """The Trainer, and what it said."""
    data: Any = DataLoader(rows(counting), 2)  # type: ignore[arg-type]
    run = trainer(strategy or D9DStrategy(), **{"max_epochs": 1, **options})
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run.fit(module or Recorded(), data)
    texts = [str(each.message) for each in said]
    return run, [text for text in (BATCH, WINDOW, EPOCH) for each in texts if text in each]


@pytest.mark.parametrize("microbatch_size", [None, 1])
def test_each_kind_is_said_once_and_counted(microbatch_size: int | None) -> None:
    def strategy() -> D9DStrategy:
        return D9DStrategy(microbatch_size=microbatch_size)

    run, said = fit([True] * 4, strategy())
    assert (said, run.strategy.num_empty_batches) == ([], 0)
    run, said = fit([True, False, False, True], strategy(), accumulate_grad_batches=2)
    assert (said, run.strategy.num_empty_batches, run.strategy.num_skipped_steps) == ([BATCH], 2, 0)
    run, said = fit([False, True, False], strategy())
    assert (said, run.strategy.num_empty_batches, run.strategy.num_skipped_steps) == ([BATCH, WINDOW], 2, 2)
    run, said = fit([False] * 3, strategy(), max_epochs=2)
    assert (said, run.strategy.num_empty_batches, run.strategy.num_skipped_steps) == ([BATCH, WINDOW, EPOCH], 6, 6)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_ten_windows_in_a_row_end_the_run(accumulate: int) -> None:
    module = Recorded()
    counting = [True] * accumulate + [False] * 12 * accumulate
    with pytest.raises(ConfigError, match=r"10 consecutive optimizer steps counted nothing:.*\(-100\).*collate_fn"):
        fit(counting, module=module, accumulate_grad_batches=accumulate)
    assert len(module.losses) == 11 * accumulate - 1


def test_nine_windows_in_a_row_do_not() -> None:
    run, _ = fit([*[False] * 9, True, *[False] * 9])
    assert run.strategy.num_empty_batches == 18


def test_a_mean_counts_always() -> None:
    run, said = fit([False] * 12, module=Recorded(mean=True))
    assert (said, run.strategy.num_empty_batches) == ([], 0)


@pytest.mark.parametrize("method", ["validate", "test"])
def test_a_batch_of_evaluation_in_which_nothing_counts_is_said_once(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    def evaluate(counting: Sequence[bool]) -> list[str]:
        caplog.clear()
        data: Any = DataLoader(rows(counting), 2)  # type: ignore[arg-type]
        with caplog.at_level(logging.WARNING, logger="lightning_d9d"):
            getattr(trainer(D9DStrategy()), method)(Recorded(), data)
        return [record.getMessage() for record in caplog.records if record.name == "lightning_d9d"]

    assert evaluate([True] * 3) == []
    (said,) = evaluate([True, False, False])
    name = "val" if method == "validate" else "test"
    assert said.startswith(f"a batch of {name} has nothing that counts: microbatch_loss gave the weight 0")
    assert said.endswith(f"{name}_loss is nan")


def test_labels_of_qwen3_moe() -> None:
    ids = torch.randint(32, (12, 8), generator=torch.Generator().manual_seed(0))
    data: Any = DataLoader([{"input_ids": row, "labels": torch.full_like(row, -100)} for row in ids])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="10 consecutive optimizer steps counted nothing:"):
        trainer(D9DStrategy(), max_epochs=1).fit(Qwen3MoePretraining(CONFIG), data)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mesh", [{"data_parallel_replicate": 2}, {"data_parallel_shard": 2}], ids=str)
def test_a_batch_counts_if_it_does_on_some_rank(rank: RankContext, mesh: dict[str, int]) -> None:
    """Rows alternate between the ranks, so that rank 1 has none that counts."""

    class Half(Recorded):
        def microbatch_loss(self, output: Tensor, microbatch: Any) -> Any:
            labels = microbatch["y"] if self.global_rank == 0 else torch.full_like(microbatch["y"], IGNORED)
            return super().microbatch_loss(output, {**microbatch, "y": labels})

    options = {"devices": 2, "device": rank.device.type}
    run, said = fit([True] * 24, D9DStrategy(mesh=MeshConfig(**mesh)), Half(), **options)
    assert (said, run.strategy.num_empty_batches) == ([], 0)
    with pytest.raises(ConfigError, match="10 consecutive optimizer steps"):
        fit([False] * 24, D9DStrategy(mesh=MeshConfig(**mesh)), Half(), **options)


@pytest.mark.gpu
def test_cuda_tells_late_and_never_waits() -> None:
    empty, weight = EmptyBatches(torch.device("cuda")), torch.zeros((), device="cuda")
    empty.add_window(weight)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(8):
            empty.add_batch(weight)
            empty.add_window(weight)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_bitwise_equal("counts", empty._counts.cpu(), torch.tensor([8, 9, 0, 9]))
    empty.add_window(weight)
    with pytest.raises(ConfigError, match="10 consecutive optimizer steps"):
        empty.finish()


class Endless(IterableDataset):
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while True:
            yield from staged_rows(8)


class MostlyNone:
    """A `collate_fn` that gives None for all batches but some, whatever the epoch."""

    def __init__(self, num_batches: int, *others: int) -> None:
        self.num_batches, self.others, self.called = num_batches, others, 0

    def __call__(self, parts: list[Any]) -> Any:
        place, self.called = self.called % self.num_batches, self.called + 1
        return default_collate(parts) if place in self.others else None


def nothing(parts: list[Any]) -> None:
    """A `collate_fn` without a `return`."""


def fit_nones(data: Any, collate_fn: Any, module: Any = None, path: Path | None = None, **options: Any) -> Any:
    run = trainer(D9DStrategy(), **options)
    run.fit(module or Staged(), DataLoader(data, 2, collate_fn=collate_fn), ckpt_path=path)
    return run


@pytest.mark.parametrize("options", [{}, {"limit_train_batches": 3, "accumulate_grad_batches": 2}])
def test_an_epoch_of_nones_is_refused(options: dict[str, Any]) -> None:
    """Lightning leaves them out, and would look for a step for ever."""
    number = options.get("limit_train_batches", 4)
    text = rf"all training batches of epoch 0 were None \({number} in a row.; let collate_fn \(.*test_empty.nothing\)"
    with pytest.raises(ConfigError, match=text):
        fit_nones(staged_rows(8), nothing, max_steps=2, max_epochs=-1, **options)


def test_nones_without_an_end_are_refused() -> None:
    text = r"1,000 training batches in a row were None; let collate_fn \(<.*MostlyNone object.*\) return a batch"
    with pytest.raises(ConfigError, match=text):
        fit_nones(Endless(), MostlyNone(10**9, 0, 3), max_steps=3, max_epochs=-1)
    assert fit_nones(Endless(), MostlyNone(900, 1), max_steps=2, max_epochs=-1).global_step == 2


def test_some_nones_are_left_out(tmp_path: Path) -> None:
    """They are also left out if a run resumes before the rest of an epoch, and this rest has nothing else."""
    assert fit_nones(staged_rows(8), MostlyNone(4, 1), max_epochs=3).global_step == 3
    saver = ModelCheckpoint(tmp_path, "step", every_n_train_steps=1)
    fit_nones(staged_rows(8), MostlyNone(4, 0), max_epochs=1, callbacks=[saver], enable_checkpointing=True)
    again = fit_nones(staged_rows(8), nothing, path=tmp_path / "step.ckpt", max_epochs=1)
    assert (again.global_step, again.current_epoch) == (1, 1)
    assert again.fit_loop.epoch_loop.batch_progress.total.ready == 4


def test_nones_of_a_plain_module_are_lightnings_affair() -> None:
    assert fit_nones(staged_rows(8), nothing, Plain(), max_epochs=2).current_epoch == 2


@pytest.mark.ranks(2)
def test_several_ranks_need_data_for_every_batch(rank: RankContext) -> None:
    run = trainer(D9DStrategy(), 2, str(rank.device), max_steps=2, max_epochs=-1)
    with pytest.raises(RankError, match=r"returned None for training batch 1 .* let collate_fn keep one row"):
        run.fit(Staged(), DataLoader(staged_rows(8), 2, collate_fn=nothing))  # type: ignore[arg-type]
