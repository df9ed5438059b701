"""Updates inside the backward give the weights, losses and norms of one process on every mesh."""

from __future__ import annotations

import math
from typing import Any

import lightning as L
import pytest

from lightning_d9d import D9DStrategy
from lightning_d9d.strategy.step_in_backward import StepInBackward
from lightning_d9d.sync.buckets import GradSyncConfig
from tests.harness.compare import assert_close_named, assert_tensors_close
from tests.harness.ranks import RankContext
from tests.harness.tolerances import Kind, Tolerance
from tests.meshes.cases import LAST_LAYER, LAYERS, RECOMPUTED, TOKENS_8, Case
from tests.meshes.equality import Steps, Watched, on_one_process, whole
from tests.strategy.plain import trainer

STEPS, SEED = 5, 1
MANY_STEPS = Tolerance(relative=1e-9)
SMALL_PARTS = 0.002
"""Megabytes: several parts a layer."""

CASES = [
    Case("rep2", fast=True),
    Case("rep2", microbatch_size=2, accumulated=2, tied=True),
    Case("shard2", microbatch_size=2, accumulated=2, fast=True),
    Case("shard2", microbatch_size=2, reduce="every_microbatch", accumulated=2),
    Case("shard2", tied=True, parallel=RECOMPUTED[0]),
    Case("shard2", peft=LAYERS),
    Case("shard4"),
    Case("rep2 shard2"),
    Case("rep2 ep2"),
    Case("rep4 ep2"),
    Case("shard4 ep2"),
    Case("tp2"),
    Case("shard2 tp2", tied=True),
    Case("cp2", data=TOKENS_8, heads=(2, 2)),
    Case("pp2", microbatch_size=4),
    Case("pp2", schedule="zero_bubble_v", tied=True, fast=True),
    Case("pp2", schedule="zero_bubble_v", peft=LAST_LAYER),
    Case("pp2 shard2", schedule="zero_bubble_v", tied=True),
    Case("pp2 shard2", tied=True, accumulated=2),
    Case("pp2 rep2 ep2", schedule="dual_pipe_v", accumulated=2),
]


class Inside(Watched):
    """Looks at nothing between backward and step."""

    on_before_optimizer_step = L.LightningModule.on_before_optimizer_step
    optimizer_step = L.LightningModule.optimizer_step

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        if len(self.seen.weights) < self.global_step:
            self.seen.norms.append(self.trainer.callback_metrics["grad_norm"].cpu())
            self.seen.weights.append({n: whole(p.detach()) for n, p in self._named()})


def expected_of(case_model: Any, accumulated: int, data: Any, peft: Any) -> Steps:
    L.seed_everything(SEED, verbose=False)
    return on_one_process(case_model, STEPS, accumulated, data=data, peft=peft, clip=math.inf)


def fitted(rank: RankContext, case: Case) -> Steps:
    L.seed_everything(SEED, verbose=False)
    module = Inside(case.model, STEPS * case.accumulated, data=case.data, peft=case.peft)
    strategy = D9DStrategy(
        **{**case.strategy_options, "grad_sync": GradSyncConfig(reduce=case.reduce, bucket_mb=SMALL_PARTS)},
        step_in_backward=True,
    )
    settings = {"precision": "64-true", "max_epochs": 1, "use_distributed_sampler": False}
    run = trainer(strategy, rank.world_size, rank.device.type, accumulate_grad_batches=case.accumulated, **settings)
    run.fit(module)
    return module.seen


def cases() -> list:
    marks = {True: (), False: (pytest.mark.meshes,)}
    return [
        pytest.param(case, id=str(case), marks=[pytest.mark.ranks(case.num_ranks), *marks[case.fast]]) for case in CASES
    ]


@pytest.mark.parametrize("case", cases())
def test_a_mesh_trains_as_one_process_does(rank: RankContext, case: Case) -> None:
    expected = rank.from_first_rank(expected_of, case.model, case.accumulated, case.data, case.peft)
    num_updated = 0
    update = StepInBackward._update

    def counted(self: StepInBackward, parameters: Any, stream: Any) -> None:
        nonlocal num_updated
        num_updated += len(parameters)
        update(self, parameters, stream)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepInBackward, "_update", counted)
        actual = fitted(rank, case)
    assert len(actual.weights) == len(expected.weights)
    for step, weights in enumerate(actual.weights):
        assert_tensors_close(weights, {n: expected.weights[step][n] for n in weights}, tolerance=MANY_STEPS)
        assert_close_named(f"norm {step}", actual.norms[step], expected.norms[step], tolerance=MANY_STEPS)
    for index, (loss, theirs) in enumerate(zip(actual.losses, expected.losses, strict=True)):
        assert_close_named(f"loss {index}", loss, theirs, kind=Kind.LOSS, tolerance=MANY_STEPS)
    held = rank.all_gather_object((set(actual.weights[0]), num_updated))
    assert set().union(*(names for names, _ in held)) == set(expected.weights[0])
    assert any(number > 0 for _, number in held)
