"""Stages of Qwen3-MoE of any size, as one rank of any world has them: on the meta device, spread over the mesh."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_d9d.mesh import MeshDomains
from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM
from lightning_d9d.models.qwen3_moe.plan import parallelize_qwen3_moe
from lightning_d9d.parallel import ParallelConfig
from lightning_d9d.pipeline.types import StageInfo


def meta_stages(
    config: Qwen3MoeConfig,
    mesh: MeshDomains,
    *,
    indices: Sequence[int] | None = None,
    num_stages: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> list[Qwen3MoeForCausalLM]:
    """The rank's stages; by default one, as many as the pipeline has ranks."""
    stages = []
    for index in indices or [mesh.coordinates["pp"]]:
        with torch.device("meta"):
            stage = Qwen3MoeForCausalLM(config, StageInfo(index, num_stages or mesh.sizes["pp"])).to(dtype)
        parallelize_qwen3_moe(stage, mesh, ParallelConfig())
        stages.append(stage)
    return stages
