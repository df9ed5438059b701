"""Data ranks with different numbers of batches, where each batch gathers parameters and sends tokens to experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_d9d import D9DStrategy, ParallelConfig
from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoePretraining
from tests.harness.compare import assert_close_named, assert_tensors_close
from tests.harness.ranks import RankContext
from tests.harness.tolerances import Kind, Tolerance
from tests.meshes.cases import IN_HALVES, PEER, Case
from tests.meshes.equality import CLIP, CONFIG, ROWS, SMALL, Watched, batch_of, on_one_process
from tests.strategy.plain import trainer

SEVERAL_STEPS = Tolerance(relative=1e-9)
PADDED = ParallelConfig(pad_sequences=True)
NUM_SHORT, NUM_BATCHES = 3, 5
"""Batches of all data ranks but the last, which has all rows of those that follow."""


class Batches:
    """Batches without a length."""

    def __init__(self, batches: list[dict[str, Tensor]]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter(self.batches)


class Uneven(Watched):
    def train_dataloader(self) -> Any:
        strategy = self.trainer.strategy
        assert isinstance(strategy, D9DStrategy)
        part, size = strategy.mesh.dp_rank, strategy.mesh.dp_size
        rows = slice(part * ROWS // size, (part + 1) * ROWS // size)
        batches = [{k: v[rows] for k, v in batch_of(i).items()} for i in range(NUM_SHORT)]
        if part == size - 1:
            batches += map(batch_of, range(NUM_SHORT, self.num_batches))
        return Batches(batches)

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case("shard2 ep2", microbatch_size=2), marks=pytest.mark.ranks(2)),
        pytest.param(
            Case("pp2 shard2 ep2", schedule="zero_bubble_v"), marks=[pytest.mark.ranks(4), pytest.mark.meshes]
        ),
        *(
            pytest.param(
                Case("shard2 ep2", microbatch_size=2, parallel=parallel),
                marks=[pytest.mark.ranks(2), pytest.mark.meshes],
            )
            for parallel in (PEER, IN_HALVES)
        ),
        pytest.param(Case("shard2 tp2 ep4", microbatch_size=2), marks=[pytest.mark.ranks(4), pytest.mark.meshes]),
        pytest.param(Case("rep2 cp2", parallel=PADDED), marks=[pytest.mark.ranks(4), pytest.mark.meshes]),
    ],
    ids=str,
)
def test_three_and_five_batches(rank: RankContext, case: Case) -> None:
    L.seed_everything(1, verbose=False)
    config = CONFIG if case.config.pipeline_parallel > 1 else SMALL
    expected = on_one_process(config, steps=NUM_BATCHES)
    L.seed_everything(1, verbose=False)
    module = Uneven(config, NUM_BATCHES)
    options: dict[str, Any] = {"precision": "64-true", "max_epochs": 1, "gradient_clip_val": CLIP}
    strategy = D9DStrategy(**case.strategy_options)
    run = trainer(strategy, rank.world_size, rank.device.type, use_distributed_sampler=False, **options)
    run.fit(module)

    seen = module.seen
    assert len(seen.weights) == len(expected.weights) == NUM_BATCHES
    for step, weights in enumerate(seen.weights):
        gradients = seen.gradients[step]
        assert_tensors_close(gradients, {n: expected.gradients[step][n] for n in gradients}, tolerance=SEVERAL_STEPS)
        assert_tensors_close(weights, {n: expected.weights[step][n] for n in weights}, tolerance=SEVERAL_STEPS)
        assert_close_named(f"norm {step}", seen.norms[step], expected.norms[step], tolerance=SEVERAL_STEPS)
    for index, (loss, theirs) in enumerate(zip(seen.losses, expected.losses, strict=True)):
        assert_close_named(f"loss {index}", loss, theirs, kind=Kind.LOSS, tolerance=SEVERAL_STEPS)

    (result,) = run.validate(module, verbose=False)
    of_all = loss_of_all(expected.weights[-1], config)
    assert_close_named("val_loss", torch.tensor(result["val_loss"]), of_all, kind=Kind.LOSS)
    predicted = run.predict(module, module.train_dataloader())
    assert predicted is not None
    is_short = cast(D9DStrategy, run.strategy).mesh.dp_rank == 0
    assert len(predicted) == (NUM_SHORT if is_short else NUM_BATCHES)


def loss_of_all(weights: dict[str, Tensor], config: Qwen3MoeConfig) -> Tensor:
    alone = Qwen3MoePretraining(config)
    alone.configure_model()
    alone.double().load_state_dict(weights)
    total, count = torch.zeros((), dtype=torch.float64), 0
    with torch.no_grad():
        for batch in map(batch_of, range(NUM_BATCHES)):
            total += cast(Any, alone.model)(**batch, reduction="sum").loss
            count += int((batch["labels"] != -100).sum())
    return (total / count).float()
