"""Weights, gradients and states of two models on 64 to 16,384 ranks, against tables computed by hand.

Nothing is asked of the package but the plan: sizes are written out here once more. A rank holds of a matrix the part
that tensor ranks or expert ranks leave it. Of n ranks that shard it each has the n-th part of the rows, rounded up;
where rows are fewer than ranks, of the columns. Weights take 2 bytes, sums of gradients 4, the states of AdamW 2 x 2
and 4 for each tensor.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest

from lightning_d9d import D9DStrategy, MeshConfig
from lightning_d9d.models.qwen3_moe import Qwen3MoePretraining
from lightning_d9d.plan import plan


class Model(NamedTuple):
    hidden: int
    layers: int
    queries: int
    keys: int
    inner: int
    vocabulary: int = 151936
    experts: int = 128
    head: int = 128


MODELS = {
    "30b-a3b": Model(hidden=2048, layers=48, queries=32 * 128, keys=4 * 128, inner=768),
    "235b-a22b": Model(hidden=4096, layers=94, queries=64 * 128, keys=4 * 128, inner=1536),
}


class Mesh(NamedTuple):
    """A mesh, and what follows from it by hand."""

    degrees: dict[str, int]
    tensor: int
    shards: int
    """Ranks that share weights outside of experts."""
    expert_parts: int
    expert_shards: int


MESHES = {
    64: Mesh({"data_parallel_replicate": 64, "expert_parallel": 8}, 1, 1, 8, 1),
    1024: Mesh({"pipeline_parallel": 2, "data_parallel_replicate": 512, "expert_parallel": 64}, 1, 1, 64, 1),
    4096: Mesh({"data_parallel_replicate": 64, "data_parallel_shard": 64, "expert_parallel": 32}, 1, 64, 32, 2),
    8192: Mesh({"pipeline_parallel": 8, "data_parallel_shard": 1024, "expert_parallel": 128}, 1, 1024, 128, 8),
    16384: Mesh(
        {
            "pipeline_parallel": 8,
            "tensor_parallel": 8,
            "data_parallel_replicate": 16,
            "data_parallel_shard": 16,
            "expert_parallel": 64,
        },
        8,
        16,
        64,
        2,
    ),
}


def shard(rows: int, columns: int, ranks: int) -> int:
    """Elements of a matrix on the rank that has most."""
    if rows < ranks and columns % ranks == 0:
        return rows * columns // ranks
    return math.ceil(rows / ranks) * columns


def tensors(model: Model, mesh: Mesh, layers: int, *, is_first: bool, is_last: bool) -> list[int]:
    """Elements of each tensor of the rank that has most of its stage."""
    hidden, queries, tp, n = model.hidden, model.queries // mesh.tensor, mesh.tensor, mesh.shards
    keys = model.keys // min(tp, model.keys // model.head)
    vector = math.ceil(hidden / n)
    experts = model.experts // mesh.expert_parts
    of_layer = [
        shard(queries, hidden, n),
        shard(keys, hidden, n),
        shard(keys, hidden, n),
        shard(hidden, queries, n),
        shard(model.experts, hidden, n),
        vector,
        vector,
        math.ceil(model.head / n),
        math.ceil(model.head / n),
        *(
            of_experts(experts, rows, width, mesh.expert_shards)
            for rows, width in ((2 * model.inner, hidden), (hidden, model.inner))
        ),
    ]
    vocabulary = shard(model.vocabulary // tp, hidden, n)
    return [*of_layer * layers, *[vocabulary] * is_first, *[vocabulary, vector] * is_last]


def of_experts(number: int, rows: int, columns: int, ranks: int) -> int:
    """Elements of a stack of matrices: whole experts for each rank, or rows of them where experts are too few."""
    if number < ranks and rows % ranks == 0:
        return number * (rows // ranks) * columns
    return math.ceil(number / ranks) * rows * columns


@pytest.mark.parametrize("ranks", MESHES)
@pytest.mark.parametrize("preset", MODELS)
def test_what_each_rank_of_the_pipeline_holds(preset: str, ranks: int) -> None:
    model, mesh = MODELS[preset], MESHES[ranks]
    stages = mesh.degrees.get("pipeline_parallel", 1)
    found = plan(
        Qwen3MoePretraining(preset=preset),  # type: ignore[arg-type]
        D9DStrategy(mesh=MeshConfig(**mesh.degrees), num_microbatches=2 * stages),
        ranks,
        "h200",
        rows=2 * stages,
        tokens=4096,
    )
    assert sum(each.layers for each in found.ranks) == model.layers
    for each in found.ranks:
        held = tensors(model, mesh, each.layers, is_first=each.rank == 0, is_last=each.rank == stages - 1)
        assert sum(each.elements.values()) == sum(held)
        assert each.peak.weights == 2 * sum(held)
        assert each.gradients == 4 * sum(held)
        assert each.peak.states == 4 * sum(held) + 4 * len(held)
