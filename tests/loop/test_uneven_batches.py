"""Data ranks with different numbers of batches train, evaluate and predict as one process with all of their data."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast
from unittest import mock

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BasePredictionWriter, ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_d9d import ConfigError, D9DStrategy, MeshConfig, StageInfo
from lightning_d9d.coordination.ahead import Agreement
from lightning_d9d.strategy.ranks import JobRanks
from tests.harness.compare import assert_bitwise_equal, assert_close_named, assert_tensors_close
from tests.harness.ranks import RankContext
from tests.harness.tolerances import Kind
from tests.strategy.pipelined import Mean, Pipelined, plain_steps, token_rows
from tests.strategy.plain import trainer
from tests.strategy.staged import Recorded, Staged, reference_gradients, staged_rows

ROWS = 4
"""The rows of a batch."""


class Meeting(torch.autograd.Function):
    """All ranks meet in its forward and in its backward, as where parameters are fully sharded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        dist.all_reduce(torch.zeros(1, device=x.device))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        dist.all_reduce(torch.zeros(2, device=gradient.device))
        return gradient.clone()


class Meet(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Meeting.apply(x)


class Collective(Recorded):
    """Keeps what hooks see, too."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.steps_left = -1
        self.dummies: list[bool] = []
        self.num_evaluated = 0
        self.callback_at: list[str] = []

    def configure_stage(self, stage: StageInfo) -> nn.Module:
        layers = cast(nn.Sequential, super().configure_stage(stage))
        meets = self._trainer is not None and self.trainer.world_size > 1
        return layers.append(Meet()) if meets else layers

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.dummies.append(cast(D9DStrategy, self.trainer.strategy).is_dummy_batch)

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.num_evaluated += len(batch["y"])

    def on_validation_start(self) -> None:
        self.callback_at.append(f"validation after {self.global_step}")

    def predict_output(self, output: Tensor) -> Tensor:
        return output


class SharedForwards(JobRanks):
    """Ranks of a mesh without a sharded axis, for a module whose forwards are collective nevertheless."""

    @property
    def needs_equal_batches(self) -> bool:
        return True


class Equal(D9DStrategy):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.ranks.__class__ = SharedForwards


class Stream(IterableDataset):
    """Rows without a length."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


class Sized(Stream):
    """A loader with the length of the longest one, whatever is there."""

    def __len__(self) -> int:
        return 5 * ROWS


LOADERS: dict[str, Any] = {"a stream": Stream, "a length": list, "a wrong length": Sized}


def batches_of(counts: list[list[int]]) -> list[list[list[dict[str, Tensor]]]]:
    """Return batches with these numbers of rows for each data rank."""
    rows = iter(staged_rows(sum(map(sum, counts))))
    return [[[next(rows) for _ in range(count)] for count in of_rank] for of_rank in counts]


def unions(batches: list[list[list[Any]]]) -> list[list[Any]]:
    """Return for each step the rows of the ranks that have any."""
    longest = max(map(len, batches))
    return [[row for of_rank in batches if i < len(of_rank) for row in of_rank[i]] for i in range(longest)]


def loader(batches: list[list[Any]], kind: Any = list) -> DataLoader:
    return DataLoader(kind([row for batch in batches for row in batch]), batch_size=ROWS)


def modules(**kwargs: Any) -> tuple[Collective, Collective]:
    L.seed_everything(7, verbose=False)
    module = Collective(**kwargs)
    alone = Collective(**kwargs)
    alone.configure_model()
    return module, alone.double()


def run_trainer(rank: RankContext, strategy: D9DStrategy, **options: Any) -> L.Trainer:
    return trainer(
        strategy,
        rank.world_size,
        rank.device.type,
        use_distributed_sampler=False,
        precision="64-true",
        **({"max_epochs": 1} | options),
    )


def check_fit(
    rank: RankContext, counts: list[Any], kind: Any, accumulate: int = 1, cut: int | None = None, **module_options: Any
) -> tuple[Collective, L.Trainer]:
    batches = batches_of(counts)
    module, alone = modules(**module_options)
    run = run_trainer(rank, Equal(microbatch_size=cut), accumulate_grad_batches=accumulate)
    L.seed_everything(7, verbose=False)
    run.fit(module, loader(batches[rank.rank], kind))
    steps = unions(batches)
    windows = [steps[i : i + accumulate] for i in range(0, len(steps), accumulate)]
    gradients, losses = reference_gradients(alone, windows, accumulate)
    for ours, expected in zip(module.gradients, gradients, strict=True):
        assert_tensors_close(ours, expected)
    for loss, expected in zip(module.losses, losses, strict=True):
        assert_close_named("loss", loss * accumulate, expected.to(loss), kind=Kind.LOSS)
    assert_tensors_close(module.state_dict(), alone.state_dict())
    num_own = len(counts[rank.rank])
    assert module.dummies == [False] * num_own + [True] * (len(steps) - num_own)
    return module, run


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("kind", "loss"), [*((kind, "tokens") for kind in LOADERS), ("a stream", "known tokens"), ("a length", "mean")]
)
def test_three_and_five_batches(rank: RankContext, kind: str, loss: str) -> None:
    options = {"mean": loss == "mean", "known_weight": loss == "known tokens"}
    for accumulate, cut in ((1, None), (1, 1), (2, None), (2, 2)):
        if kind == "a wrong length" and accumulate == 2:
            continue  # a window that is open when data end too soon is left, as Lightning does in one process
        check_fit(rank, [[ROWS] * 3, [ROWS] * 5], LOADERS[kind], accumulate, cut, **options)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["a stream", "a length"])
def test_last_batches_of_different_sizes(rank: RankContext, kind: str) -> None:
    """Such batches make different numbers of microbatches."""
    for counts in ([[ROWS, 1], [ROWS, ROWS, 2]], [[ROWS, ROWS], [ROWS, 1]], [[ROWS, 3], [ROWS, 3]]):
        check_fit(rank, counts, LOADERS[kind], cut=1)


@pytest.mark.ranks(2)
def test_a_window_of_dummies_alone(rank: RankContext) -> None:
    _, run = check_fit(rank, [[ROWS] * 6, [ROWS]], Stream, accumulate=2)
    assert run.global_step == 3


@pytest.mark.ranks(2)
def test_replicas_train_on_dummies_too(rank: RankContext) -> None:
    """Nothing in a batch is collective, but the sum of gradients is."""
    batches = batches_of([[ROWS] * 2, [ROWS] * 3])
    L.seed_everything(7, verbose=False)
    module, alone = Recorded(), Recorded()
    run = run_trainer(rank, D9DStrategy(microbatch_size=2))
    run.fit(module, loader(batches[rank.rank]))
    L.seed_everything(7, verbose=False)
    alone.configure_model()
    alone.double()
    reference_gradients(alone, [[step] for step in unions(batches)], 1)
    assert_tensors_close(module.state_dict(), alone.state_dict())


@pytest.mark.ranks(2)
def test_equal_lengths_send_nothing(rank: RankContext) -> None:
    batches = batches_of([[ROWS] * 3, [ROWS] * 3])
    with mock.patch.object(Agreement, "tell", autospec=True) as tell:
        for cut in (None, 1):
            module, _ = modules()
            run = run_trainer(rank, Equal(microbatch_size=cut), max_epochs=2)
            data = loader(batches[rank.rank])
            run.fit(module, data, data)
            run.predict(module, data)
    assert not tell.called


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["a stream", "a length"])
def test_evaluation_and_prediction(rank: RankContext, kind: str) -> None:
    """Hooks and results have a rank's own batches only."""
    batches = batches_of([[ROWS] * 3, [ROWS] * 4 + [1]])
    others = batches_of([[ROWS] * 4, [ROWS]])
    module, alone = modules()
    L.seed_everything(7, verbose=False)
    (stage,) = alone.stages
    losses = []
    for both in (batches, others):
        rows = [row for of_rank in both for batch in of_rank for row in batch]
        x, y = torch.stack([row["x"] for row in rows]), torch.stack([row["y"] for row in rows])
        losses.append(nn.functional.cross_entropy(stage(x), y, ignore_index=-100).detach())
    own = [loader(both[rank.rank], LOADERS[kind]) for both in (batches, others)]
    for cut in (None, 1):
        run = run_trainer(rank, Equal(microbatch_size=cut))
        module.num_evaluated = 0
        results = run.validate(module, own, verbose=False)
        for index, (result, loss) in enumerate(zip(results, losses, strict=True)):
            assert_close_named("val_loss", torch.tensor(result[f"val_loss/dataloader_idx_{index}"]), loss.float())
        assert module.num_evaluated == sum(map(len, batches[rank.rank])) + sum(map(len, others[rank.rank]))
        predicted = run.predict(module, own)
        assert predicted is not None
        for outputs, both in zip(predicted, (batches, others), strict=True):
            x = torch.stack([row["x"] for batch in both[rank.rank] for row in batch])
            assert_close_named("outputs", torch.cat(list(outputs)), stage(x).detach(), kind=Kind.OUTPUT)
        limited = run_trainer(rank, Equal(microbatch_size=cut), limit_test_batches=2, limit_predict_batches=4)
        limited.test(module, own[0], verbose=False)
        assert len(limited.predict(module, own[0]) or []) == min(4, len(batches[rank.rank]))


class Writer(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.indices: list[Any] = []
        self.at_end: Any = None

    def write_on_batch_end(self, trainer: Any, pl_module: Any, prediction: Any, batch_indices: Any, *_: Any) -> None:  # type: ignore[override]
        self.indices.append(batch_indices)

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
        self.at_end = predictions, batch_indices


@pytest.mark.ranks(2)
def test_a_prediction_writer_sees_no_dummies(rank: RankContext) -> None:
    batches = batches_of([[ROWS] * 3, [ROWS] * 5])
    module, _ = modules()
    writer = Writer()
    run_trainer(rank, Equal(), callbacks=[writer]).predict(module, loader(batches[rank.rank]))
    num_own = len(batches[rank.rank])
    assert writer.indices == [list(range(i * ROWS, (i + 1) * ROWS)) for i in range(num_own)]
    predictions, (indices,) = writer.at_end
    assert len(predictions) == num_own
    assert indices == writer.indices


@pytest.mark.ranks(2)
def test_validation_limits_and_epochs(rank: RankContext) -> None:
    """Intervals and limits count the batches that all ranks have."""
    batches = batches_of([[ROWS] * 3, [ROWS] * 5])
    for kind, options, expected in (
        (list, {"val_check_interval": 0.4}, [2, 4, 7, 9]),
        (Stream, {"val_check_interval": 2}, [2, 4, 7, 9]),
        (Stream, {"limit_train_batches": 4}, [4, 8]),
        (list, {"max_steps": 7, "max_epochs": -1}, [5]),
        (list, {"limit_train_batches": 1.0, "limit_val_batches": 2, "num_sanity_val_steps": 1}, [0, 5, 10]),
    ):
        module, _ = modules()
        run = run_trainer(rank, Equal(), **({"max_epochs": 2} | options))
        run.fit(module, loader(batches[rank.rank], kind), loader(batches[1 - rank.rank], kind))
        assert module.callback_at == [f"validation after {step}" for step in expected], options
        assert run.global_step == (7 if "max_steps" in options else 8 if 4 in options.values() else 10)


class Counted(IterableDataset):
    """A stream that goes on where it was."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows, self.place = rows, 0

    def __iter__(self) -> Iterator[Any]:
        while self.place < len(self.rows):
            self.place += 1
            yield self.rows[self.place - 1]
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.place = state["place"]


class CountedBatches:
    """Batches without a length, of a loader that is no DataLoader."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = Counted([torch.utils.data.default_collate(batch) for batch in batches])
        self.state_dict, self.load_state_dict = self.batches.state_dict, self.batches.load_state_dict

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


RESUMABLE: dict[str, Any] = {
    "a DataLoader": loader,
    "a StatefulDataLoader": lambda batches: StatefulDataLoader(Counted([r for b in batches for r in b]), ROWS),
    "with workers": lambda batches: StatefulDataLoader(cast(Any, [r for b in batches for r in b]), ROWS, num_workers=1),
    "counted batches": CountedBatches,
}


class Seen(Collective):
    """Keeps the first number of each batch, None for a dummy batch."""

    def __init__(self) -> None:
        super().__init__(optimizer="adamw")
        self.seen: list[float | None] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        is_dummy = cast(D9DStrategy, self.trainer.strategy).is_dummy_batch
        self.seen.append(None if is_dummy else float(batch["x"][0, 0]))


def check_resumed(make: Any, batches: list[Any], folder: Path, accumulate: int, devices: int, device: str) -> None:
    """Two epochs at once, and again from checkpoints: all of the first epoch, two of the second."""

    def fit(callbacks: list[Any], path: Path | None) -> Seen:
        L.seed_everything(7, verbose=False)
        module = Seen()
        options: dict[str, Any] = {"callbacks": callbacks, "enable_checkpointing": bool(callbacks), "max_epochs": 2}
        strategy = Equal() if devices > 1 else D9DStrategy()
        run = trainer(
            strategy,
            devices,
            device,
            precision="64-true",
            use_distributed_sampler=False,
            accumulate_grad_batches=accumulate,
            **options,
        )
        run.fit(module, make(batches), loader(batches[:1]), ckpt_path=path)
        return module

    saving = [
        ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1),
        ModelCheckpoint(folder, "{step}-validated", monitor="val_loss", save_top_k=-1),
        ModelCheckpoint(folder, "{step}-ended", every_n_epochs=1, save_on_train_epoch_end=True, save_top_k=-1),
    ]
    whole = fit(saving, None)
    paths = sorted(folder.glob("step=*.ckpt"))
    assert {path.stem.partition("-")[2] for path in paths} == {"", "validated", "ended"}
    steps = {path: int(path.stem.split("=")[1].split("-")[0]) for path in paths}
    for path in paths:
        if max(steps.values()) // 2 + 1 < steps[path] and not path.stem.endswith("ended"):
            continue
        resumed = fit([], path)
        assert resumed.seen == whole.seen[len(whole.seen) - len(resumed.seen) :], path.name
        for name, weight in resumed.state_dict().items():
            assert_bitwise_equal(f"{path.name} {name}", weight, whole.state_dict()[name])


@pytest.mark.ranks(2, timeout_seconds=240)
@pytest.mark.parametrize(
    ("make", "num_batches", "accumulate"),
    [
        *((make, 2, 1) for make in RESUMABLE),
        *((make, 1, 2) for make in ("a DataLoader", "counted batches")),
        pytest.param("a StatefulDataLoader", 1, 2, marks=pytest.mark.meshes),  # restored in the place of the others
    ],
)
def test_a_run_goes_on_in_the_middle_of_an_epoch(
    rank: RankContext, make: str, num_batches: int, accumulate: int
) -> None:
    """It resumes before and after the end of the data of rank 0, also within a window, and between epochs."""
    own = batches_of([[ROWS] * num_batches, [ROWS] * 4])[rank.rank]
    check_resumed(RESUMABLE[make], own, rank.tmp_dir, accumulate, 2, rank.device.type)


@pytest.mark.parametrize("make", ["a StatefulDataLoader", "counted batches"])
def test_a_stream_in_one_process_goes_on(tmp_path: Path, make: str) -> None:
    """Lightning reads ahead where there is no length, and would save a state that is one batch too far."""
    check_resumed(RESUMABLE[make], batches_of([[], [ROWS] * 4])[1], tmp_path, 1, 1, "cpu")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["a stream", "a length"])
@pytest.mark.parametrize("run", ["fit", "validate", "predict"])
def test_a_rank_without_a_batch_is_refused(rank: RankContext, kind: str, run: str) -> None:
    batches = batches_of([[], [ROWS]])
    module, _ = modules()
    with pytest.raises(ConfigError, match=r"rank 0 had no batch|no batch on rank 0"):
        getattr(run_trainer(rank, Equal()), run)(module, loader(batches[rank.rank], LOADERS[kind]))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("run", ["fit", "validate", "test"])
def test_an_evaluation_of_replicas_with_a_rank_without_a_batch_is_refused(rank: RankContext, run: str) -> None:
    """Their forwards are not collective, but the end of the evaluation is, which Lightning would leave out there."""
    empty = loader(batches_of([[], [ROWS]])[rank.rank], list)
    it = trainer(D9DStrategy(), 2, rank.device.type, max_epochs=1, use_distributed_sampler=False)
    data = [loader(batches_of([[ROWS], [ROWS]])[rank.rank], list), empty] if run == "fit" else [empty]
    with pytest.raises(ConfigError, match=r"no batch on rank 0"):
        getattr(it, run)(modules()[0], *data)


@pytest.mark.ranks(2)
def test_replicas_predict_also_where_a_rank_has_no_rows(rank: RankContext) -> None:
    module, data = Staged(), DataLoader(staged_rows(4 * rank.rank), batch_size=2)  # type: ignore[arg-type]
    module.allow_zero_length_dataloader_with_multiple_devices = True
    it = trainer(D9DStrategy(), 2, rank.device.type, use_distributed_sampler=False)
    predictions = it.predict(module, data)
    assert len(predictions or []) == 2 * rank.rank


@pytest.mark.ranks(2)
def test_a_length_on_one_rank_only_is_refused(rank: RankContext) -> None:
    module, _ = modules()
    data = loader([staged_rows(8)], (list, Stream)[rank.rank])
    with pytest.raises(ConfigError, match="a length on rank 0 and none on rank 1"):
        run_trainer(rank, Equal()).fit(module, data)


@pytest.mark.ranks(2)
def test_a_stream_that_is_empty_in_later_epochs(rank: RankContext) -> None:
    """Its rank fills up with the batches that it had before."""

    class Once(Stream):
        def __iter__(self) -> Iterator[Any]:
            rows, self.rows = self.rows, self.rows[: len(self.rows) * rank.rank]
            return iter(rows)

    batches = batches_of([[ROWS] * 2, [ROWS] * 2])
    module, _ = modules()
    run = run_trainer(rank, Equal(), max_epochs=3)
    run.fit(module, loader(batches[rank.rank], Once))
    assert run.global_step == 6
    assert module.dummies == [False] * 2 + [rank.rank == 0] * 4


@pytest.mark.ranks(2)
def test_loaders_that_are_combined(rank: RankContext) -> None:
    """The shorter loader of a rank begins again, as ever; it is the number of combined batches that is made equal."""

    class Both(Collective):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            a, b = batch.pop("a"), batch.pop("b")
            return {key: torch.cat([a[key], b[key]]) for key in ("x", "y")}

    lengths = [(2, 3), (5, 1)][rank.rank]
    a, b = (batches_of([[ROWS] * length, []])[0] for length in lengths)
    L.seed_everything(7, verbose=False)
    module = Both()
    run = run_trainer(rank, Equal())
    run.fit(module, CombinedLoader({"a": loader(a), "b": loader(b)}, "max_size_cycle"))
    assert module.dummies == [False] * max(lengths) + [True] * (5 - max(lengths))
    assert len({str(loss) for loss in rank.all_gather_object(module.losses)}) == 1


@pytest.mark.ranks(2)
def test_a_hook_that_changes_the_number_of_rows_is_refused(rank: RankContext) -> None:
    class Doubles(Collective):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return {key: torch.cat([value, value]) for key, value in batch.items()}

    batches = batches_of([[ROWS] * 2, [ROWS] * 3])
    with pytest.raises(ConfigError, match=r"makes 8 microbatches, but .* no rank had more than 4"):
        run_trainer(rank, Equal(microbatch_size=1)).fit(Doubles(), loader(batches[rank.rank]))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("make", [Pipelined, Mean])
def test_two_pipelines(rank: RankContext, make: type[Pipelined]) -> None:
    rows, batch_size = token_rows(16), 2
    of_ranks = [[rows[i : i + batch_size] for i in range(start, end, batch_size)] for start, end in ((0, 6), (6, 16))]
    mesh = MeshConfig(pipeline_parallel=2, data_parallel_replicate=2)
    for schedule in ("1f1b", "interleaved_1f1b"):
        L.seed_everything(7, verbose=False)
        module = make()
        run = run_trainer(rank, Equal(mesh=mesh, schedule=schedule))
        own = of_ranks[rank.rank % 2]
        run.fit(module, DataLoader(Stream([row for batch in own for row in batch]), batch_size=batch_size))
        L.seed_everything(7, verbose=False)
        expected = plain_steps(module, [[step] for step in unions(of_ranks)], clip=1e9)
        for ours, theirs in zip(module.gradients, expected.gradients, strict=True):
            assert_tensors_close(ours, {name: theirs[name] for name in ours})
        assert_close_named("losses", torch.stack(module.losses), torch.stack(expected.losses), kind=Kind.LOSS)
        (result,) = run.validate(
            copy.deepcopy(module),
            DataLoader(Stream([row for batch in own for row in batch]), batch_size=3),
            verbose=False,
        )
        assert len({str(each) for each in rank.all_gather_object(result)}) == 1
