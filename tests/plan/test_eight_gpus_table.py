"""The table of plans for eight GPUs of docs/how-to/train-the-30b.md, with the rates of the H200's table."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from lightning_d9d import D9DStrategy, GradSyncConfig, MeshConfig, ParallelConfig
from lightning_d9d.models.qwen3_moe import Qwen3MoePretraining
from lightning_d9d.optim import StochasticAdamW
from lightning_d9d.plan import Plan, machine_of, plan

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "train-the-30b.md"
MACHINE = machine_of("h200")
KINDS = ("none", "selective", "every_2", "every_3", "3_of_4", "full")
MICROBATCHES = 8


def planned(recompute: str, **mesh: int) -> Plan:
    """Four rows of 4096 tokens at a time on each GPU; a pipeline has several such microbatches."""
    is_pipeline = "pipeline_parallel" in mesh
    strategy = D9DStrategy(
        mesh=MeshConfig(**mesh),
        schedule="zero_bubble_v" if is_pipeline else "1f1b",
        num_microbatches=MICROBATCHES if is_pipeline else None,
        parallel=ParallelConfig(recompute=recompute),
        grad_sync=GradSyncConfig(dtype="bfloat16"),
    )
    optimizer = partial(StochasticAdamW, lr=1e-5, state_dtype=torch.bfloat16)
    module = Qwen3MoePretraining(preset="30b-a3b", optimizer=optimizer)
    return plan(module, strategy, 8, MACHINE, rows=4 * (MICROBATCHES if is_pipeline else 1), tokens=4096)


@pytest.mark.parametrize(
    "mesh",
    [
        *({"data_parallel_shard": 8, "expert_parallel": experts} for experts in (1, 2, 4, 8)),
        *({"data_parallel_replicate": 8, "expert_parallel": experts} for experts in (2, 4, 8)),
        {"pipeline_parallel": 2, "data_parallel_replicate": 4, "expert_parallel": 4},
        {"pipeline_parallel": 2, "data_parallel_shard": 4, "expert_parallel": 4},
    ],
    ids=lambda mesh: " ".join(f"{axis}={degree}" for axis, degree in mesh.items()),
)
def test_the_page_has_the_fastest_plan_of_each_mesh(mesh: dict[str, int]) -> None:
    fitting = {kind: found for kind in KINDS if (found := planned(kind, **mesh)).missing <= 0}
    kind, found = max(fitting.items(), key=lambda each: each[1].tokens_per_second)
    pipeline, shards, replicas, experts = (
        mesh.get(axis, 1)
        for axis in ("pipeline_parallel", "data_parallel_shard", "data_parallel_replicate", "expert_parallel")
    )
    needed = found.most.needed / 2**30
    row = (
        f"| {pipeline} | {replicas} | {shards} | {experts} | `{kind}` | {found.tokens_per_second:,.0f} | {needed:.0f} |"
    )
    assert row in PAGE.read_text()
