"""Replicas that mix, with different numbers of batches: those with fewer take no step, and mix on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_d9d import ConfigError, D9DStrategy, MeshConfig
from lightning_d9d.errors import RankError
from lightning_d9d.mixing.rounds import Rounds
from tests.harness.ranks import RankContext
from tests.meshes.equality import whole
from tests.strategy.mixed import mixed_training
from tests.strategy.plain import Plain, trainer
from tests.strategy.staged import IGNORED, Staged, staged_rows

ROWS = 2
Rows = list[tuple[Tensor, Tensor]]


def rows_of(replica: int, num_batches: int) -> Rows:
    generator = torch.Generator().manual_seed(replica)
    return [
        (torch.randn(8, generator=generator, dtype=torch.float64), torch.tensor(index % 4))
        for index in range(num_batches * ROWS)
    ]


class Kept(Plain):
    """Keeps weights after each batch, which batches were dummies, and the weights that were validated."""

    def __init__(self) -> None:
        super().__init__("adamw", batch_norm=False)
        self.double()
        self.history: list[dict[str, Tensor]] = []
        self.validated: list[dict[str, Tensor]] = []
        self.dummies: list[bool] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        assert isinstance(self.trainer.strategy, D9DStrategy)
        self.dummies.append(self.trainer.strategy.is_dummy_batch)
        return self.loss(batch)

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.validated.append(self.weights())

    def on_train_batch_end(self, *args: Any) -> None:
        self.history.append(self.weights())

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach().to("cpu", copy=True) for name, p in self.named_parameters()}


def fresh() -> Kept:
    L.seed_everything(7, verbose=False)
    return Kept()


def fit(rank: RankContext, module: L.LightningModule, data: Any, sync: str, **options: Any) -> L.Trainer:
    strategy = D9DStrategy(replicate_sync=sync)
    defaults = {"precision": "64-true", "use_distributed_sampler": False}
    run = trainer(strategy, rank.world_size, rank.device.type, **{**defaults, **options})
    checkpoint = options.pop("ckpt_path", None)
    run.fit(module, DataLoader(data, ROWS), DataLoader(rows_of(9, 1), ROWS), ckpt_path=checkpoint)  # type: ignore[arg-type]
    return run


def windows_of(lengths: Sequence[int], accumulated: int, epochs: int) -> list[list[list[list[Tensor]]]]:
    """Return the batches of each replica for each step of all epochs: none where its data have ended."""
    batches = [
        [
            [torch.stack(part) for part in zip(*rows[start : start + ROWS], strict=True)]
            for start in range(0, len(rows), ROWS)
        ]
        for replica, length in enumerate(lengths)
        for rows in [rows_of(replica, length)]
    ]
    starts = range(0, max(lengths), accumulated)
    return [[own[start : start + accumulated] for own in batches] for start in starts] * epochs


def expected_of(lengths: Sequence[int], sync: str, accumulated: int, epochs: int) -> list[list[dict[str, Tensor]]]:
    windows = windows_of(lengths, accumulated, epochs)

    def loss_of(model: Any, batches: Sequence[list[Tensor]]) -> Tensor:
        nothing = sum(p.sum() for p in model.parameters()) * 0.0
        return sum((model.loss(batch) for batch in batches), nothing) / accumulated

    return mixed_training(
        fresh(),
        Rounds(sync, len(lengths)),
        windows,
        loss_of,
        lambda each: each.configure_optimizers(),
        skips=lambda step, replica: not windows[step][replica],
    )


def check(rank: RankContext, lengths: Sequence[int], sync: str, *, accumulated: int = 1) -> None:
    epochs, longest = 2, max(lengths)
    module = fresh()
    run = fit(rank, module, rows_of(rank.rank, lengths[rank.rank]), sync, accumulate_grad_batches=accumulated)
    expected = expected_of(lengths, sync, accumulated, epochs)
    num_own = lengths[rank.rank]
    assert module.dummies == ([False] * num_own + [True] * (longest - num_own)) * epochs
    assert run.global_step == len(expected)
    ends = [index for index in range(longest) if (index + 1) % accumulated == 0 or index + 1 == longest]
    ends = [epoch * longest + index for epoch in range(epochs) for index in ends]
    for end, of_step in zip(ends[:-1], expected[:-1], strict=True):
        for name, value in of_step[rank.rank].items():
            torch.testing.assert_close(module.history[end][name], value, atol=1e-12, rtol=0)
    for validated, of_step in zip(module.validated, (expected[len(expected) // 2 - 1], expected[-1]), strict=True):
        for name, value in validated.items():
            mean = torch.stack([own[name] for own in of_step]).mean(0)
            torch.testing.assert_close(value, mean, atol=1e-12, rtol=0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("lengths", "accumulated"), [((5, 3), 1), ((2, 5), 2)], ids=str)
def test_two_plain_replicas_of_unequal_lengths(rank: RankContext, lengths: Sequence[int], accumulated: int) -> None:
    """Validation and the end of the fit have the mean, and the second epoch goes on from own weights."""
    check(rank, lengths, "complete", accumulated=accumulated)


@pytest.mark.meshes
@pytest.mark.ranks(4)
@pytest.mark.parametrize("sync", ["ring", "one_peer_exp", "complete", "alternating_exp_ring"])
def test_four_plain_replicas_of_unequal_lengths(rank: RankContext, sync: str) -> None:
    check(rank, (6, 1, 4, 6), sync)


class Stream(IterableDataset):
    """Rows without a length."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(self.rows)


@pytest.mark.ranks(2)
def test_streams_of_unequal_lengths_end_all_replicas_with_an_error(rank: RankContext) -> None:
    """Nobody knows beforehand, so the shorter one is named."""

    class Stops(Kept):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            if batch_idx == 3:
                raise StopIteration  # else it mixes with nobody, until it is ended
            return super().training_step(batch, batch_idx)

    text = "rank 0 failed: its training data ended after 3 batches, those of rank 1 did not; give every rank the same"
    with pytest.raises(RankError, match=text):
        fit(rank, Stops(), Stream(rows_of(rank.rank, 3 + 2 * rank.rank)), "ring")


@pytest.mark.ranks(2)
def test_a_replica_without_a_batch_is_refused(rank: RankContext) -> None:
    module = fresh()
    module.allow_zero_length_dataloader_with_multiple_devices = True
    with pytest.raises(ConfigError, match="rank 0 has 0 training batches and rank 1 has 2"):
        fit(rank, module, rows_of(0, 2 * rank.rank), "ring")


class Saves(L.Callback):
    def __init__(self, path: Any, step: int) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("step", [pytest.param(2, marks=pytest.mark.meshes), 9], ids=["with data", "second epoch"])
def test_a_resumed_fit_equals_one_that_was_not_stopped(rank: RankContext, step: int) -> None:
    path = rank.tmp_dir / "saved.ckpt"
    data = rows_of(rank.rank, 6 - 2 * rank.rank)
    whole_run, resumed = fresh(), fresh()
    fit(rank, whole_run, data, "complete", callbacks=[Saves(path, step)])
    run = trainer(D9DStrategy(replicate_sync="complete"), 2, precision="64-true", use_distributed_sampler=False)
    run.fit(resumed, DataLoader(data, ROWS), ckpt_path=str(path))  # type: ignore[arg-type]
    assert run.global_step == 12
    for name, value in whole_run.history[-1].items():
        torch.testing.assert_close(resumed.history[-1][name], value, atol=1e-15, rtol=0)
    assert resumed.dummies == whole_run.dummies[step:]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("step", [4, 5], ids=["at their start", "inside"])
def test_resuming_in_idle_batches_is_refused(rank: RankContext, step: int) -> None:
    """Replica 1 has no batch left to repeat in the last two of the epoch."""
    path = rank.tmp_dir / "saved.ckpt"
    data = rows_of(rank.rank, 6 - 2 * rank.rank)
    fit(rank, fresh(), data, "complete", callbacks=[Saves(path, step)])
    run = trainer(D9DStrategy(replicate_sync="complete"), 2, precision="64-true", use_distributed_sampler=False)
    problem = (
        "^replica 1 has trained on all its 4 batches of an epoch of 6; resume from an earlier checkpoint or the end of "
        "an epoch$"
    )
    with pytest.raises(ConfigError, match=problem):
        run.fit(fresh(), DataLoader(data, ROWS), ckpt_path=str(path))  # type: ignore[arg-type]


class KeptStaged(Staged):
    def __init__(self, **options: Any) -> None:
        super().__init__(optimizer="adamw", **options)
        self.history: list[dict[str, Tensor]] = []
        """The weights at the start, and after each batch."""

    def on_train_start(self) -> None:
        self.on_train_batch_end()

    def on_train_batch_end(self, *args: Any) -> None:
        self.history.append({name: whole(p.detach()).clone() for name, p in self.named_parameters()})


class Built(nn.Module):
    """The stage of a `Staged`, by itself, with the weights that it had at the start."""

    def __init__(self, module: KeptStaged) -> None:
        super().__init__()
        self.stages = nn.ModuleList([module.configure_stage(None).double()])  # type: ignore[arg-type]
        self.load_state_dict(module.history[0])


def batches_of_ranks(lengths: Sequence[int]) -> list[list[list[dict[str, Tensor]]]]:
    """Return the batches of rows of each rank."""
    rows = staged_rows(sum(lengths) * ROWS)
    found = []
    for length in lengths:
        own, rows = rows[: length * ROWS], rows[length * ROWS :]
        found.append([own[start : start + ROWS] for start in range(0, len(own), ROWS)])
    return found


def check_staged(rank: RankContext, lengths: Sequence[int], **options: Any) -> None:
    """Two replicas of two ranks each, of which all four have lengths of their own."""
    num_replicas = 2
    size = rank.world_size // num_replicas
    batches = batches_of_ranks(lengths)
    of_step = [
        [[own[step] for own in batches[r * size : (r + 1) * size] if step < len(own)] for r in range(num_replicas)]
        for step in range(max(lengths))
    ]
    module = KeptStaged(**options)

    def loss_of(model: Any, parts: Sequence[list[dict[str, Tensor]]]) -> Tensor:
        losses, weight = [], 0
        for part in parts:
            x, y = torch.stack([row["x"] for row in part]), torch.stack([row["y"] for row in part])
            if module.mean:
                losses.append(nn.functional.cross_entropy(model.stages[0](x), y.clamp(min=0)))
                weight += 1
            else:
                losses.append(nn.functional.cross_entropy(model.stages[0](x), y, ignore_index=IGNORED, reduction="sum"))
                weight += int((y != IGNORED).sum())
        nothing = sum(p.sum() for p in model.parameters()) * 0.0
        return sum(losses, nothing) / max(weight, 1)

    def counts(step: int, replica: int) -> bool:
        parts = of_step[step][replica]
        return bool(parts) if module.mean else any(row["y"] != IGNORED for part in parts for row in part)

    mesh = MeshConfig(data_parallel_replicate=num_replicas, data_parallel_shard=size)
    strategy = D9DStrategy(mesh=mesh, replicate_sync="complete", microbatch_size=1)
    defaults: dict[str, Any] = {"precision": "64-true", "use_distributed_sampler": False, "max_epochs": 1}
    run = trainer(strategy, rank.world_size, **defaults)
    run.fit(module, DataLoader([row for batch in batches[rank.rank] for row in batch], ROWS))  # type: ignore[arg-type]
    expected = mixed_training(
        Built(module),
        Rounds("complete", num_replicas),
        of_step,
        loss_of,
        lambda each: torch.optim.AdamW(each.parameters(), lr=0.01),
        skips=lambda step, replica: not counts(step, replica),
    )
    assert run.global_step == max(lengths)
    assert strategy.num_empty_batches == sum(
        not counts(step, rank.rank // size) and bool(of_step[step][rank.rank // size]) for step in range(max(lengths))
    ) * (not module.mean)
    for step, of_replicas in enumerate(expected[:-1]):
        for name, value in of_replicas[rank.rank // size].items():
            torch.testing.assert_close(module.history[step + 1][name], value, atol=1e-12, rtol=0)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "options", [{}, pytest.param({"known_weight": True}, marks=pytest.mark.meshes), {"mean": True}], ids=str
)
def test_staged_replicas_of_ranks_of_unequal_lengths(rank: RankContext, options: dict[str, Any]) -> None:
    check_staged(rank, (13, 14, 2, 1), **options)  # more idle windows than empty ones in a row may be
