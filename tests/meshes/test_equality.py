"""Every mesh trains as one process does: losses, all gradients, the norm, and the weights after each step."""

from __future__ import annotations

import lightning as L
import pytest
import torch

from lightning_d9d import D9DStrategy
from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig
from lightning_d9d.peft import PeftMethod
from tests.harness.compare import assert_close_named, assert_tensors_close
from tests.harness.ranks import RankContext
from tests.harness.tolerances import Kind, Tolerance
from tests.meshes.cases import CASES, Case, parameters
from tests.meshes.equality import Data, Steps, on_mesh, on_one_process

SEVERAL_STEPS = Tolerance(relative=1e-9)
SEED = 1


def expected_of(config: Qwen3MoeConfig, accumulated: int, data: Data, peft: PeftMethod | None = None) -> Steps:
    L.seed_everything(SEED, verbose=False)
    return on_one_process(config, accumulated=accumulated, data=data, peft=peft)


@pytest.mark.parametrize("case", parameters(CASES))
def test_a_mesh_trains_as_one_process_does(rank: RankContext, case: Case) -> None:
    expected = rank.from_first_rank(expected_of, case.model, case.accumulated, case.data, case.peft)
    L.seed_everything(SEED, verbose=False)
    options = {"accumulate_grad_batches": case.accumulated}
    actual = on_mesh(rank, D9DStrategy(**case.strategy_options), case.model, data=case.data, peft=case.peft, **options)

    assert len(actual.weights) == len(expected.weights)
    for step, weights in enumerate(actual.weights):
        gradients = actual.gradients[step]
        assert gradients.keys() == weights.keys() & expected.gradients[step].keys()
        assert_tensors_close(gradients, {n: expected.gradients[step][n] for n in gradients}, tolerance=SEVERAL_STEPS)
        assert_tensors_close(weights, {n: expected.weights[step][n] for n in weights}, tolerance=SEVERAL_STEPS)
        assert_close_named(f"norm {step}", actual.norms[step], expected.norms[step], tolerance=SEVERAL_STEPS)
    for index, (loss, theirs) in enumerate(zip(actual.losses, expected.losses, strict=True)):
        assert_close_named(f"loss {index}", loss, theirs, kind=Kind.LOSS, tolerance=SEVERAL_STEPS)
    held = rank.all_gather_object(set(actual.weights[0]))
    assert set().union(*held) == set(expected.weights[0])
    assert all(torch.isfinite(norm) for norm in actual.norms)
