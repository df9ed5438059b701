"""A step of a pipeline equals plain torch, whatever the schedule, and everything around it is the same on all ranks."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from lightning_d9d import D9DStrategy, MeshConfig
from tests.harness.compare import assert_close_named, assert_tensors_close
from tests.harness.ranks import RankContext
from tests.harness.tolerances import Kind
from tests.strategy.pipelined import Pipelined, plain_steps, token_rows
from tests.strategy.plain import trainer

SCHEDULES = ["gpipe", "1f1b", "looped_bfs", "interleaved_1f1b", "zero_bubble", "zero_bubble_v", "dual_pipe_v"]
KINDS: dict[str, dict[str, Any]] = {
    "all trained": {},
    "half frozen": {"frozen": ("embedding", "layers.0", "layers.1", "layers.2", "layers.3")},
    "shared": {"shared": True},
    "tied": {"tied": True},
}
CLIP = 0.05


def check_fit(
    rank: RankContext, mesh: MeshConfig, rows: Any, batch_size: int, accumulate: int = 1, **options: Any
) -> None:
    module_options = options.pop("module", {})
    L.seed_everything(7, verbose=False)
    module = Pipelined(**module_options)
    data_ranks = mesh.data_parallel_replicate
    run = trainer(
        D9DStrategy(mesh=mesh, **options),
        rank.world_size,
        rank.device.type,
        precision="64-true",
        max_epochs=2,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=CLIP,
    )
    sampler = DistributedSampler(rows, data_ranks, rank.rank % data_ranks, shuffle=False)  # deals rows out one by one
    run.fit(module, DataLoader(rows, batch_size=batch_size, sampler=sampler))
    batches = [rows[i : i + batch_size * data_ranks] for i in range(0, len(rows), batch_size * data_ranks)]
    windows = [batches[i : i + accumulate] for i in range(0, len(batches), accumulate)] * 2
    L.seed_everything(7, verbose=False)
    expected = plain_steps(module, windows, CLIP)
    assert len(module.gradients) == len(expected.gradients) == run.global_step
    for ours, whole, norm, expected_norm in zip(
        module.gradients, expected.gradients, module.norms[accumulate - 1 :: accumulate], expected.norms, strict=True
    ):
        factor = (CLIP / (expected_norm + 1e-6)).clamp(max=1)
        assert_tensors_close(ours, {name: whole[name] for name in ours})
        assert_close_named("norm", norm, expected_norm)
        del factor
    held = set().union(*rank.all_gather_object(set(module.gradients[0])))
    assert held == set(expected.gradients[0])
    for loss, plain in zip(module.losses, expected.losses, strict=True):
        assert_close_named("loss", loss * accumulate, plain, kind=Kind.LOSS)
    ours = module.state_dict()
    assert_tensors_close(ours, {name: expected.weights[name] for name in ours})


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_stages_of_ranks_equal_plain_torch(rank: RankContext, schedule: str, kind: str) -> None:
    check_fit(rank, MeshConfig(pipeline_parallel=2), token_rows(8), 4, schedule=schedule, module=KINDS[kind])
