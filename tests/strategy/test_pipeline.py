"""A step of a pipeline equals plain torch, whatever the schedule, and everything around it is the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from lightning_d9d import ConfigError, D9DStrategy, MeshConfig
from lightning_d9d.schedule import Interleaved1F1B
from tests.harness.compare import assert_close_named, assert_tensors_close
from tests.harness.ranks import RankContext
from tests.harness.tolerances import Kind
from tests.strategy.pipelined import KnownWeight, Mean, Pipelined, plain_steps, token_rows
from tests.strategy.plain import Plain, loader, trainer

SCHEDULES = ["gpipe", "1f1b", "looped_bfs", "interleaved_1f1b", "zero_bubble", "zero_bubble_v", "dual_pipe_v"]
FIRST_HALF = ("embedding", "layers.0", "layers.1", "layers.2", "layers.3")
CLIP, EPOCHS = 0.05, 2
_OF_STRATEGY = ("schedule", "microbatch_size", "num_microbatches")
TWO_STAGES = MeshConfig(pipeline_parallel=2)


class Freeze(L.Callback):
    """Freezes what `frozen` says of the epoch, and nothing else."""

    def __init__(self, frozen: Callable[[int], tuple[str, ...]]) -> None:
        self.frozen = frozen

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        names = self.frozen(trainer.current_epoch)
        for name, parameter in pl_module.named_parameters():
            parameter.requires_grad_(not (names and name.split(".", 2)[2].startswith(names)))


def fit(
    rank: RankContext, module: Pipelined, mesh: MeshConfig, rows: Any, batch_size: int, accumulate: int, **options: Any
) -> L.Trainer:
    """Data ranks get rows by turns."""
    run = trainer(
        D9DStrategy(mesh=mesh, **{key: options.pop(key) for key in _OF_STRATEGY if key in options}),
        rank.world_size,
        rank.device.type,
        precision="64-true",
        accumulate_grad_batches=accumulate,
        gradient_clip_val=CLIP,
        **({"max_epochs": EPOCHS} | options),
    )
    data_ranks = mesh.data_parallel_replicate
    sampler = DistributedSampler(rows, data_ranks, rank.rank % data_ranks, shuffle=False)
    run.fit(module, DataLoader(rows, batch_size=batch_size, sampler=sampler))
    return run


def check_fit(
    rank: RankContext,
    mesh: MeshConfig,
    rows: Any,
    batch_size: int,
    accumulate: int = 1,
    module: Pipelined | None = None,
    frozen: Callable[[int], tuple[str, ...]] | None = None,
    **options: Any,
) -> None:
    """Gradients, norms, losses and weights of every step are those of plain torch, and equal on all ranks."""
    L.seed_everything(7, verbose=False)
    module = module or Pipelined()
    if frozen is not None:
        options["callbacks"] = [Freeze(frozen)]
    run = fit(rank, module, mesh, rows, batch_size, accumulate, **options)
    rows_of_batch = batch_size * mesh.data_parallel_replicate
    batches = [rows[i : i + rows_of_batch] for i in range(0, len(rows), rows_of_batch)]
    windows = [batches[i : i + accumulate] for i in range(0, len(batches), accumulate)]
    of_steps = [frozen(e) if frozen is not None else module.frozen for e in range(EPOCHS) for _ in windows]
    L.seed_everything(7, verbose=False)
    expected = plain_steps(module, windows * EPOCHS, CLIP, of_steps)
    assert len(module.gradients) == len(expected.gradients) == run.global_step == len(windows) * EPOCHS
    for step, (ours, whole) in enumerate(zip(module.gradients, expected.gradients, strict=True)):
        assert_tensors_close(ours, {name: whole[name] for name in ours})
        assert set().union(*rank.all_gather_object(set(ours))) == set(whole), f"step {step}"
    steps_after = [i for i in range(len(batches)) if (i + 1) % accumulate == 0 or i == len(batches) - 1]
    norms = [module.norms[e * len(batches) + i - (accumulate - 1)] for e in range(EPOCHS) for i in steps_after]
    for norm, expected_norm in zip(norms, expected.norms, strict=True):
        assert_close_named("norm", norm, expected_norm)
    for loss, plain in zip(module.losses, expected.losses, strict=True):
        assert_close_named("loss", loss * accumulate, plain, kind=Kind.LOSS)
    ours = {name: value.cpu() for name, value in module.state_dict().items()}
    assert_tensors_close(ours, {name: expected.weights[name] for name in ours})
    seen = {name: value.item() for name, value in run.callback_metrics.items()}
    assert set(seen) == {"train_loss", "train_accuracy", "grad_norm"}
    seen |= {"losses": [float(loss) for loss in module.losses], "norms": [float(norm) for norm in module.norms]}
    assert all(theirs == seen for theirs in rank.all_gather_object(seen))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_stages_of_ranks_equal_plain_torch(rank: RankContext, schedule: str) -> None:
    """Embedding and head are one parameter; every other batch has longer rows."""
    rows = token_rows(16, lengths=(5, 5, 5, 5, 3, 3, 3, 3))
    check_fit(rank, TWO_STAGES, rows, 4, module=Pipelined(tied=True), schedule=schedule)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble_v"])
def test_four_ranks_of_stages_equal_plain_torch(rank: RankContext, schedule: str) -> None:
    """Two accumulated batches a step, the last of an epoch alone and short."""
    mesh = MeshConfig(pipeline_parallel=4)
    check_fit(rank, mesh, token_rows(11), 4, 2, module=Pipelined(shared=True, recompute=True), schedule=schedule)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("schedule", "make", "options", "accumulate"),
    [
        (Interleaved1F1B(4), Pipelined, {"tied": True}, 2),
        ("dual_pipe_v", KnownWeight, {"tied": True}, 1),
        ("zero_bubble", Mean, {"tied": True}, 1),
        ("1f1b", Pipelined, {"frozen": FIRST_HALF}, 1),
    ],
    ids=["interleaved", "known weight", "mean", "frozen"],
)
def test_replicas_of_pipelines_equal_plain_torch(
    rank: RankContext, schedule: Any, make: type[Pipelined], options: dict[str, Any], accumulate: int
) -> None:
    """The last batch of an epoch is short: too short for one schedule, which runs dummies then."""
    mesh = MeshConfig(pipeline_parallel=2, data_parallel_replicate=2)
    rows = token_rows(16 if make is Mean else 20)  # a mean counts short batches as full ones
    check_fit(rank, mesh, rows, 4, accumulate, module=make(**options), schedule=schedule)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble_v"])
def test_layers_are_frozen_and_thawed_between_epochs(rank: RankContext, schedule: str) -> None:
    """The tied embedding on both ranks, and all of the first one's layers."""
    check_fit(
        rank,
        TWO_STAGES,
        token_rows(8),
        4,
        module=Pipelined(tied=True),
        frozen=lambda epoch: (FIRST_HALF, ())[epoch % 2],
        schedule=schedule,
    )
    check_fit(rank, TWO_STAGES, token_rows(4), 4, frozen=lambda epoch: ((), FIRST_HALF)[epoch % 2], schedule=schedule)


@pytest.mark.ranks(2)
def test_tied_parameters_are_frozen_on_all_stages_or_none(rank: RankContext) -> None:
    class FrozenHere(Pipelined):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1 and rank.rank == 0:
                self.stages[0].get_submodule("embedding").requires_grad_(False)

    with pytest.raises(ConfigError, match=r"'embedding.weight' is on several stages but frozen only on some of them;"):
        fit(rank, FrozenHere(tied=True), TWO_STAGES, token_rows(4), 4, 1)


@pytest.mark.ranks(2)
def test_so_they_are_where_a_run_resumes_in_an_epoch(rank: RankContext) -> None:
    class FrozenHere(Pipelined):
        def on_train_start(self) -> None:
            super().on_train_start()
            if self.global_step == 1 and rank.rank == 0:
                self.stages[0].get_submodule("embedding").requires_grad_(False)

    def runs_until(step: int) -> L.Trainer:
        return trainer(D9DStrategy(mesh=TWO_STAGES), 2, rank.device.type, max_steps=step, use_distributed_sampler=False)

    path = str(rank.tmp_dir / "in an epoch")
    data = DataLoader(token_rows(8), batch_size=4)  # type: ignore[arg-type]
    first = runs_until(1)
    first.fit(FrozenHere(tied=True), data)
    first.save_checkpoint(path)
    resumed = runs_until(2)
    with pytest.raises(ConfigError, match=r"'embedding.weight' is on several stages but frozen only on some of them;"):
        resumed.fit(FrozenHere(tied=True), data, ckpt_path=path)
    assert resumed.global_step == 1


@pytest.mark.ranks(2)
def test_ranks_of_a_pipeline_read_the_same_data(rank: RankContext) -> None:
    text = rf"rank {rank.rank}: ranks \[0, 1\] read different first train batches"
    with pytest.raises(ConfigError, match=text):
        fit(rank, Pipelined(), TWO_STAGES, token_rows(8)[rank.rank :], 4, 1)


@pytest.mark.ranks(2)
def test_plain_modules_have_no_stages(rank: RankContext) -> None:
    with pytest.raises(
        ConfigError, match=r"pipeline_parallel=2: Plain is a plain LightningModule, which has neither stages"
    ):
        trainer(D9DStrategy(mesh=TWO_STAGES), 2, rank.device.type).fit(Plain(), loader(8))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b"])
def test_a_batch_that_is_one_microbatch(rank: RankContext, schedule: str) -> None:
    """The rank of the last stage knows the weight of the batch before its backward, others know it afterwards."""
    mesh = MeshConfig(pipeline_parallel=2, data_parallel_replicate=2)
    check_fit(rank, mesh, token_rows(16), 4, module=Pipelined(tied=True), schedule=schedule, num_microbatches=1)


@pytest.mark.ranks(2)
def test_a_module_keeps_the_stages_it_was_built_with(rank: RankContext) -> None:
    module, validation = Pipelined(), DataLoader(token_rows(4), batch_size=4)
    schedules = ["interleaved_1f1b", "interleaved_1f1b", "zero_bubble_v"]
    runs = [
        trainer(D9DStrategy(mesh=TWO_STAGES, schedule=each), 2, rank.device.type, precision="64-true")
        for each in schedules
    ]
    for run in runs[:2]:
        run.validate(module, validation, verbose=False)
    with pytest.raises(ConfigError, match=rf"index={rank.rank + 2}, .* of an earlier run\. This run has .*new module"):
        runs[2].validate(module, validation, verbose=False)
