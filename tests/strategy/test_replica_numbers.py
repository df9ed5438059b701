"""Other numbers of replicas go on from the mean of those before: weights, states of the optimizer, what follows."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_d9d import D9DStrategy, MeshConfig
from lightning_d9d.dtypes import default_dtype
from lightning_d9d.mixing.rounds import Rounds
from lightning_d9d.models.qwen3_moe import Qwen3MoePretraining
from tests.harness.ranks import RankContext
from tests.meshes.equality import SMALL, optimizer_of, whole
from tests.strategy.mixed import mixed_training
from tests.strategy.plain import trainer
from tests.strategy.staged import IGNORED
from tests.strategy.test_mixed_replicas import Grouped, of_replica

STEPS, SAVED_AT = 5, 3


class Kept(NamedTuple):
    weights: dict[str, Tensor]
    states: dict[str, dict[str, Tensor]]


def kept(module: Grouped) -> Kept:
    """What a replica has, whole. Collective over the replica."""
    (optimizer,) = module.trainer.optimizers
    named = dict(module._named())
    states = {name: {key: whole(each) for key, each in optimizer.state[p].items()} for name, p in named.items()}
    return Kept({name: whole(p.detach()) for name, p in named.items()}, states)


class Watches(L.Callback):
    """Saves, with what each replica has then; or keeps what a resumed fit begins with."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.found: Kept | None = None

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        if self.path is None and self.found is None:
            self.found = kept(pl_module)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        if self.path is not None and trainer.global_step == SAVED_AT:
            self.found = kept(pl_module)
            trainer.save_checkpoint(self.path)


def fit(rank: RankContext, sync: str, num_replicas: int, watches: Watches, **options: Any) -> Grouped:
    mesh = MeshConfig(data_parallel_replicate=num_replicas, data_parallel_shard=rank.world_size // num_replicas)
    module = Grouped(SMALL, STEPS)
    strategy = D9DStrategy(mesh=mesh, replicate_sync=sync)
    defaults: dict[str, Any] = {"precision": "64-true", "max_epochs": 1, "use_distributed_sampler": False}
    run = trainer(strategy, rank.world_size, callbacks=[watches], gradient_clip_val=1e9, **defaults)
    run.fit(module, **options)
    return module


def mean_of(values: list[Tensor]) -> Tensor:
    return torch.stack(values).double().mean(0)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("before", "after"), [(4, 2), pytest.param(2, 4, marks=pytest.mark.meshes)], ids=["4 to 2", "2 to 4"]
)
def test_training_goes_on_from_the_mean(rank: RankContext, before: int, after: int) -> None:
    path = rank.tmp_dir / "saved.ckpt"
    saves, begins = Watches(path), Watches()
    fit(rank, "ring", before, saves)
    module = fit(rank, "ring", after, begins, ckpt_path=str(path))
    assert saves.found is not None
    assert begins.found is not None
    of_ranks: list[Kept] = rank.all_gather_object(saves.found)
    start = begins.found
    assert any(not torch.equal(of_ranks[0].weights[name], of_ranks[-1].weights[name]) for name in start.weights)
    for name, value in start.weights.items():
        torch.testing.assert_close(value, mean_of([each.weights[name] for each in of_ranks]), atol=1e-12, rtol=0)
        for key, state in start.states[name].items():
            mean = mean_of([each.states[name][key] for each in of_ranks]).to(state.dtype)
            torch.testing.assert_close(state, mean, atol=1e-12, rtol=0)

    alone = Qwen3MoePretraining(SMALL)
    with default_dtype(torch.float64):
        alone.configure_model()
    alone.model.load_state_dict(start.weights)

    def optimizer_with_states(model: torch.nn.Module) -> torch.optim.Optimizer:
        optimizer = optimizer_of(model)
        for name, parameter in model.named_parameters():
            optimizer.state[parameter] = {key: each.clone() for key, each in start.states[name].items()}
        return optimizer

    def loss_of(model: Any, batch: dict[str, Tensor]) -> Tensor:
        return model(**batch, reduction="sum").loss / (batch["labels"] != IGNORED).sum()

    windows = [[of_replica(step, each, after) for each in range(after)] for step in range(SAVED_AT, STEPS)]
    rounds = Rounds("ring", after)
    expected = mixed_training(
        alone.model, rounds, windows, loss_of, optimizer_with_states, first_round=SAVED_AT
    )  # rounds are counted on; that of the third step was over with the mean
    assert len(module.seen.weights) == STEPS - SAVED_AT
    replica = rank.rank // (rank.world_size // after)
    for step, weights in enumerate(module.seen.weights):
        for name, value in weights.items():
            torch.testing.assert_close(value, expected[step][replica][name], atol=1e-9, rtol=0)
