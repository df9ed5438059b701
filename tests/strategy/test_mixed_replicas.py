"""`D9DStrategy(replicate_sync=...)`: replicas that mix their weights, against dense matrices in one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from lightning_d9d import ConfigError, D9DStrategy, MeshConfig, ParallelConfig
from lightning_d9d.callbacks import WeightAverages
from lightning_d9d.dtypes import default_dtype
from lightning_d9d.mesh.sharding import local
from lightning_d9d.mixing import ReplicaMixing
from lightning_d9d.mixing.rounds import Rounds
from lightning_d9d.models.qwen3_moe import Qwen3MoePretraining
from tests.harness.ranks import RankContext
from tests.harness.recorder import Recorder
from tests.harness.records import read
from tests.meshes.equality import CLIP, SMALL, Watched, batch_of, optimizer_of
from tests.meshes.equality import ROWS as BATCH
from tests.strategy.mixed import mixed_training
from tests.strategy.plain import Plain, TwoOptimizers, loader, trainer
from tests.strategy.staged import IGNORED, Staged, staged_rows

STEPS, ROWS = 6, 4


class Kept(Plain):
    """Keeps the weights after each step."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(optimizer, batch_norm=False)
        self.double()
        self.history: list[dict[str, Tensor]] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss([batch[0].double(), batch[1]])

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.validated = {name: p.detach().clone() for name, p in self.named_parameters()}
        self.log("val", self.loss([batch[0].double(), batch[1]]), sync_dist=True)

    def on_train_batch_end(self, *args: Any) -> None:
        self.history.append({name: p.detach().clone() for name, p in self.named_parameters()})


def rows_of(num: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(8, generator=generator), torch.tensor(index % 4)) for index in range(num)]


def batches_of(num_replicas: int, steps: int = STEPS) -> list[list[list[Tensor]]]:
    """Return batches as the sampler deals out rows: one after the other."""
    rows = rows_of(num_replicas * steps * ROWS)
    of_replicas = [rows[replica::num_replicas] for replica in range(num_replicas)]
    windows = []
    for step in range(steps):
        of_step = [own[step * ROWS : (step + 1) * ROWS] for own in of_replicas]
        windows.append(
            [[torch.stack([x for x, _ in own]).double(), torch.stack([y for _, y in own])] for own in of_step]
        )
    return windows


def fit(
    rank: RankContext,
    module: L.LightningModule,
    sync: Any,
    steps: int = STEPS,
    with_loaders: Any = None,
    **options: Any,
) -> L.Trainer:
    with_loaders = with_loaders or {}
    run = trainer(
        D9DStrategy(replicate_sync=sync),
        rank.world_size,
        rank.device.type,
        **{"max_epochs": 1, "precision": "64-true", **options},
    )
    rows: Any = rows_of(rank.world_size * steps * ROWS)
    dealt = DistributedSampler(rows, rank.world_size, rank.rank, shuffle=False)
    run.fit(module, DataLoader(rows, ROWS, sampler=dealt), **with_loaders)
    return run


def fresh(optimizer: str = "sgd") -> Kept:
    L.seed_everything(7, verbose=False)
    return Kept(optimizer)


def check(rank: RankContext, sync: str, optimizer: str = "sgd", *, peer_copies: bool = False, **options: Any) -> None:
    module = fresh(optimizer)
    initial = fresh(optimizer)
    fit(rank, module, ReplicaMixing(topology=sync, peer_copies=peer_copies), **options)
    rounds = Rounds(sync, rank.world_size)
    expected = mixed_training(
        initial,
        rounds,
        batches_of(rank.world_size),
        lambda each, batch: each.loss(batch),
        lambda each: each.configure_optimizers(),
        clip=options.get("gradient_clip_val"),
    )
    assert len(module.history) == STEPS
    for step, of_step in enumerate(expected[:-1]):  # in the last one all get the mean at the end of the fit
        for name, value in of_step[rank.rank].items():
            torch.testing.assert_close(module.history[step][name], value, atol=1e-12, rtol=0)
    for name, parameter in module.named_parameters():
        mean = torch.stack([own[name] for own in expected[-1]]).mean(0)
        torch.testing.assert_close(parameter.detach(), mean, atol=1e-12, rtol=0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("sync", ["complete", "ring", "one_peer_exp", "alternating_exp_ring"])
def test_two_replicas_equal_the_matrices(rank: RankContext, sync: str, optimizer: str) -> None:
    check(rank, sync, optimizer)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("sync", ["ring", "one_peer_exp", "alternating_exp_ring"])
@pytest.mark.parametrize("peer_copies", [False, True], ids=["messages", "copies"])
def test_four_replicas_equal_the_matrices(rank: RankContext, sync: str, peer_copies: bool) -> None:
    check(rank, sync, gradient_clip_val=0.05, peer_copies=peer_copies)


class Grouped(Watched):
    """Reads what its data rank among those of all replicas is to read, and keeps weights after each batch."""

    def train_dataloader(self) -> DataLoader:
        strategy = self.trainer.strategy
        assert isinstance(strategy, D9DStrategy)
        size, part = strategy.ranks.dp_size, strategy.ranks.dp_rank
        rows = BATCH // size
        data = [
            {name: value[row] for name, value in batch_of(index).items()}
            for index in range(self.num_batches)
            for row in range(part * rows, (part + 1) * rows)
        ]
        return DataLoader(data, rows)  # type: ignore[arg-type]


def of_replica(index: int, replica: int, num_replicas: int) -> dict[str, Tensor]:
    rows = slice(replica * BATCH // num_replicas, (replica + 1) * BATCH // num_replicas)
    return {name: value[rows] for name, value in batch_of(index).items()}


def check_mesh(
    rank: RankContext,
    config: Any,
    *,
    accumulated: int = 1,
    num_replicas: int = 2,
    peer_copies: bool = False,
    parallel: ParallelConfig | None = None,
    **degrees: int,
) -> None:
    steps = 2
    alone = Qwen3MoePretraining(config)
    with default_dtype(torch.float64):
        alone.configure_model()
    mesh = MeshConfig(data_parallel_replicate=num_replicas, **degrees)
    sync = ReplicaMixing(peer_copies=peer_copies)
    strategy = D9DStrategy(mesh=mesh, microbatch_size=2, parallel=parallel or ParallelConfig(), replicate_sync=sync)
    module = Grouped(config, steps * accumulated)
    options = {"precision": "64-true", "max_epochs": 1, "gradient_clip_val": CLIP, "use_distributed_sampler": False}
    run = trainer(strategy, rank.world_size, accumulate_grad_batches=accumulated, **options)
    run.fit(module)

    def loss_of(model: Any, batches: Sequence[dict[str, Tensor]]) -> Tensor:
        total = sum(model(**batch, reduction="sum").loss for batch in batches)
        return total / sum(int((batch["labels"] != IGNORED).sum()) for batch in batches)

    windows = [
        [
            [of_replica(step * accumulated + part, replica, num_replicas) for part in range(accumulated)]
            for replica in range(num_replicas)
        ]
        for step in range(steps)
    ]
    rounds = Rounds("one_peer_exp", num_replicas)
    expected = mixed_training(alone.model, rounds, windows, loss_of, optimizer_of, clip=CLIP)
    stage_size = rank.world_size // num_replicas // mesh.pipeline_parallel
    replica = rank.rank // stage_size % num_replicas
    for step, weights in enumerate(module.seen.weights):
        for name, value in weights.items():
            torch.testing.assert_close(value, expected[step][replica][name], atol=1e-9, rtol=0)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("inside", ["shard2", "pp2", "tp2", "shard2 ep2", "shard2 ep2 peer", "pp2 tied", "accumulated"])
@pytest.mark.parametrize("peer_copies", [False, True], ids=["messages", "copies"])
def test_replicas_of_two_ranks_equal_the_matrices(rank: RankContext, inside: str, peer_copies: bool) -> None:
    tied = "tied" in inside
    names = {
        "shard2": "data_parallel_shard",
        "pp2": "pipeline_parallel",
        "tp2": "tensor_parallel",
        "ep2": "expert_parallel",
    }
    degrees = {names[part]: 2 for part in inside.split() if part in names} or {"data_parallel_shard": 2}
    config = replace(SMALL, tie_word_embeddings=tied)
    parallel = ParallelConfig(expert_dispatch="peer", expert_capacity=1.0) if "peer" in inside else None
    accumulated = 2 if inside == "accumulated" else 1
    check_mesh(rank, config, accumulated=accumulated, peer_copies=peer_copies, parallel=parallel, **degrees)


def heard_of_others(path: Path, replicas: Sequence[set[int]]) -> dict[tuple[str, tuple[int, ...]], int]:
    """The collectives of this rank whose groups span replicas, and how often they were."""
    found: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for entry in read(path):
        if not any({*entry.ranks} <= own for own in replicas):
            found[entry.operator, entry.ranks] += 1
    return dict(found)


class Steady(L.Callback):
    """Records the collectives of the batches from the third to the sixth."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.recorder = Recorder()
            self.recorder.start(self.path)

    def on_train_batch_end(self, *args: Any) -> None:
        if args[-1] == 5:
            self.recorder.close()


@pytest.mark.ranks(4, record=False)
def test_no_collective_of_a_step_spans_replicas_but_the_mix(rank: RankContext) -> None:
    path = rank.tmp_dir / f"record{rank.rank}"
    mesh = MeshConfig(data_parallel_replicate=2, data_parallel_shard=2)
    module = Grouped(SMALL, 7)
    options: Any = {
        "precision": "64-true",
        "max_epochs": 1,
        "gradient_clip_val": CLIP,
        "use_distributed_sampler": False,
    }
    strategy = D9DStrategy(mesh=mesh, replicate_sync="ring", microbatch_size=2, skip_nonfinite=True)
    run = trainer(strategy, 4, callbacks=[Steady(path)], log_every_n_steps=50, **options)
    run.fit(module)
    found = heard_of_others(path, [{0, 1}, {2, 3}])
    ours = (rank.rank % 2, rank.rank % 2 + 2)
    assert {*found} == {("send", ours), ("receive", ours)}
    assert found["send", ours] == found["receive", ours]
    assert found["send", ours] % 4 == 0, "each of four steps has as many messages"


@pytest.mark.ranks(2, record=False)
def test_a_step_of_a_plain_module_sends_the_mix_alone(rank: RankContext) -> None:
    path = rank.tmp_dir / f"record{rank.rank}"
    module = fresh()
    fit(rank, module, "one_peer_exp", steps=7, callbacks=[Steady(path)], log_every_n_steps=50)
    entries = read(path)
    weights = [f"float64[{', '.join(map(str, parameter.shape))}]" for parameter in module.parameters()]
    step = [(operator, (0, 1), weight) for operator in ("send", "receive") for weight in weights]
    assert [(entry.operator, entry.ranks, entry.tensors) for entry in entries] == step * 4


class FreezesLater(Kept):
    """The last layer is frozen from the third batch on, and the first one trained: both are mixed to the end."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net[0].requires_grad_(batch_idx >= 2)
        self.net[3].requires_grad_(batch_idx < 2)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("peer_copies", [False, True], ids=["messages", "copies"])
def test_frozen_parameters_stay_and_those_frozen_later_are_mixed(rank: RankContext, peer_copies: bool) -> None:
    L.seed_everything(7, verbose=False)
    module = FreezesLater()
    initial = module.net[0].weight.detach().clone()
    fit(rank, module, ReplicaMixing(topology="complete", peer_copies=peer_copies), steps=8)
    assert torch.equal(module.history[1]["net.0.weight"], initial)
    assert not torch.equal(module.history[2]["net.0.weight"], initial)
    later = torch.stack(rank.all_gather_object(module.history[4]["net.3.weight"]))
    assert torch.equal(later[0], later[1]), "nothing but mixing changes what is frozen"
    earlier = torch.stack(rank.all_gather_object(module.history[1]["net.3.weight"]))
    assert not torch.equal(earlier[0], earlier[1])
    torch.testing.assert_close(later[0], earlier.mean(0), atol=1e-12, rtol=0)


class Infinite(Kept):
    """One replica has an infinite loss in the second step."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * torch.inf if batch_idx == 1 and self.global_rank == 1 else loss


@pytest.mark.ranks(2)
def test_a_replica_skips_its_own_step_alone(rank: RankContext) -> None:
    L.seed_everything(7, verbose=False)
    module = Infinite()
    rows: Any = rows_of(rank.world_size * STEPS * ROWS)
    strategy = D9DStrategy(replicate_sync="complete", skip_nonfinite=True)
    run = trainer(strategy, 2, max_epochs=1, precision="64-true")
    run.fit(module, DataLoader(rows, ROWS, sampler=DistributedSampler(rows, 2, rank.rank, shuffle=False)))
    assert strategy.num_skipped_steps == rank.rank
    expected = mixed_training(
        fresh(),
        Rounds("complete", 2),
        batches_of(2),
        lambda each, batch: each.loss(batch),
        lambda each: each.configure_optimizers(),
        skips=lambda step, replica: (step, replica) == (1, 1),
    )
    for step, of_step in enumerate(expected[:-1]):
        for name, value in of_step[rank.rank].items():
            torch.testing.assert_close(module.history[step][name], value, atol=1e-12, rtol=0)


class Quadratic(Kept):
    """Half the squared distance of weights to a target that each batch gives: the same curvature everywhere."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        return sum((0.5 * (p - batch[0].mean()) ** 2).sum() for p in self.parameters())  # type: ignore[return-value]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("sync", ["complete", "one_peer_exp", ReplicaMixing(topology="ring", adaptive=0.5)], ids=str)
def test_the_mean_is_that_of_all_reduce_where_curvature_is_equal(rank: RankContext, sync: Any) -> None:
    L.seed_everything(7, verbose=False)
    ours, theirs = Quadratic(), Quadratic()
    theirs.load_state_dict(ours.state_dict())
    fit(rank, ours, sync)
    fit(rank, theirs, "all_reduce")
    for (name, parameter), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(parameter, other, atol=1e-12, rtol=0, msg=name)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("peer_copies", [False, True], ids=["messages", "copies"])
def test_validation_has_the_mean_and_training_goes_on_from_own_values(rank: RankContext, peer_copies: bool) -> None:
    module, without = fresh(), fresh()
    validation = {"val_dataloaders": DataLoader(rows_of(4), 2)}  # type: ignore[arg-type]
    sync = ReplicaMixing(topology="ring", peer_copies=peer_copies)
    run = fit(rank, module, sync, with_loaders=validation, val_check_interval=2)
    fit(rank, without, "ring")
    for name, value in without.history[3].items():
        assert torch.equal(value, module.history[3][name]), "validation changes nothing"
    of_ranks = rank.all_gather_object(module.history[-1])
    assert any(not torch.equal(of_ranks[0][name], of_ranks[1][name]) for name in of_ranks[0])
    for name, value in module.validated.items():  # the last one
        mean = (of_ranks[0][name] + of_ranks[1][name]) / 2
        torch.testing.assert_close(value, mean, atol=1e-15, rtol=0)
    assert len({*rank.all_gather_object(run.callback_metrics["val"].item())}) == 1
    metrics = run.callback_metrics
    assert metrics["replicas/distance_to_centre_mean"] > 0
    assert metrics["replicas/distance_to_edge_most"] >= metrics["replicas/distance_to_edge_mean"] > 0
    assert metrics["replicas/edge_wait_seconds_most"] >= 0
    assert "replicas/norm_mean" not in metrics  # nothing clips
    assert all(value.isfinite() for name, value in metrics.items() if name.startswith("replicas/"))


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("mode", "peer_copies"), [("plain", False), ("plain", True), ("sharded", False)], ids=str)
def test_a_resumed_fit_equals_one_that_was_not_stopped(rank: RankContext, mode: str, peer_copies: bool) -> None:
    """Saved inside of a turn of rounds, with states of the optimizer and a round under way."""
    path = rank.tmp_dir / "saved.ckpt"
    num_steps = {"plain": 6, "sharded": 4}[mode]

    def make() -> tuple[Any, L.Trainer]:
        options: Any = {"precision": "64-true", "use_distributed_sampler": False, "max_epochs": 1}
        if mode == "plain":
            L.seed_everything(7, verbose=False)
            module: Any = Kept("adamw")
            rows: Any = rows_of(4 * num_steps * ROWS)
            module.train_dataloader = lambda: DataLoader(
                rows, ROWS, sampler=DistributedSampler(rows, 4, rank.rank, shuffle=False)
            )
            return module, trainer(D9DStrategy(replicate_sync=ReplicaMixing(peer_copies=peer_copies)), 4, **options)
        mesh = MeshConfig(data_parallel_replicate=2, data_parallel_shard=2)
        strategy = D9DStrategy(mesh=mesh, replicate_sync="ring", microbatch_size=2)
        return Grouped(SMALL, num_steps), trainer(strategy, 4, **options)

    def weights_of(module: Any) -> dict[str, Tensor]:
        return {name: local(p).detach().clone() for name, p in module.named_parameters()}

    seen: dict[tuple[str, int], dict[str, Tensor]] = {}

    class Saves(L.Callback):
        def __init__(self, name: str) -> None:
            self.name = name

        def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
            seen[self.name, trainer.global_step] = weights_of(pl_module)
            if self.name == "whole" and trainer.global_step == 3:
                trainer.save_checkpoint(path)
                assert all(map(torch.equal, weights_of(pl_module).values(), seen["whole", 3].values()))

    whole, run = make()
    run.callbacks.append(Saves("whole"))  # type: ignore[attr-defined]
    run.fit(whole)
    resumed, run = make()
    run.callbacks.append(Saves("resumed"))  # type: ignore[attr-defined]
    run.fit(resumed, ckpt_path=str(path))
    assert {step for name, step in seen if name == "resumed"} == {*range(4, num_steps + 1)}
    for step in range(4, num_steps + 1):
        for name, value in seen["whole", step].items():
            assert torch.equal(value, seen["resumed", step][name]), f"{name} after step {step}"


@pytest.mark.ranks(2)
def test_another_number_of_replicas_goes_on_from_the_mean(rank: RankContext) -> None:
    path = rank.tmp_dir / "saved.ckpt"
    module = fresh("adamw")

    class Saves(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
            if trainer.global_step == 3:
                self.own = rank.all_gather_object(
                    {name: p.detach().clone() for name, p in pl_module.named_parameters()}
                )
                trainer.save_checkpoint(path)

    saves = Saves()
    fit(rank, module, "ring", callbacks=[saves])
    saved = torch.load(path, weights_only=True)["state_dict"]
    for name, value in saved.items():
        torch.testing.assert_close(value, (saves.own[0][name] + saves.own[1][name]) / 2, atol=1e-15, rtol=0)
    first: dict[str, Tensor] = {}

    class Looks(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
            first.update({} if first else {name: p.detach().clone() for name, p in pl_module.named_parameters()})

    alone = fresh("adamw")
    rows: Any = rows_of(STEPS * ROWS)
    sampler = DistributedSampler(rows, 2, rank.rank, shuffle=False)
    run = trainer(D9DStrategy(), 2, max_steps=5, max_epochs=-1, precision="64-true", callbacks=[Looks()])
    run.fit(alone, DataLoader(rows, ROWS, sampler=sampler), ckpt_path=str(path))
    for name, value in saved.items():
        assert torch.equal(first[name], value)
    run.strategy.remove_checkpoint(path)
    rank.barrier()
    fit(rank, fresh("adamw"), "ring", callbacks=[Saves()])
    assert (rank.tmp_dir / "saved.ckpt.replicas").is_dir()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"callbacks": WeightAverages}, "with the callback WeightAverages"),
        ({"module": TwoOptimizers}, "steps its optimizers itself"),
        ({"step_in_backward": True}, "with step_in_backward=True"),
        ({"expert": 2}, "MeshConfig.expert_parallel=2 must divide the 1 ranks of a pipeline stage"),
    ],
    ids=str,
)
def test_what_cannot_be_beside_mixing_is_refused(rank: RankContext, options: dict[str, Any], message: str) -> None:
    module = options.get("module", fresh)()
    steps_in_backward = options.get("step_in_backward", False)
    if steps_in_backward or "expert" in options:
        module = Staged()
    mesh = MeshConfig(data_parallel_replicate=2, expert_parallel=options.get("expert", 1))
    strategy = D9DStrategy(mesh=mesh, replicate_sync="ring", step_in_backward=steps_in_backward)
    callbacks = [options["callbacks"]()] if "callbacks" in options else []
    with pytest.raises(ConfigError, match=message):
        trainer(strategy, 2, callbacks=callbacks).fit(module, loader(8))


@pytest.mark.ranks(3)
def test_a_number_of_replicas_that_does_not_fit_is_refused(rank: RankContext) -> None:
    with pytest.raises(ConfigError, match="must be even; let data_parallel_replicate be 2 or 4"):
        fit(rank, fresh(), "ring")


def test_one_replica_has_nobody_to_mix_with() -> None:
    with pytest.raises(ConfigError, match=r"D9DStrategy.replicate_sync=.* has no effect here: there is one replica"):
        trainer(D9DStrategy(replicate_sync="complete")).fit(Staged(), DataLoader(staged_rows(4), 2))  # type: ignore[arg-type]


def test_average_is_for_fits_that_mix() -> None:
    with pytest.raises(ConfigError, match="for a fit with D9DStrategy"):
        D9DStrategy().global_average()
