"""Distribution of a stage of Qwen3-MoE over ranks."""

from __future__ import annotations

from torch import nn

from lightning_d9d.mesh import Axis, MeshDomains
from lightning_d9d.models.qwen3_moe.model import Qwen3MoeForCausalLM
from lightning_d9d.modules.balance import spread_sequences
from lightning_d9d.parallel import (
    ParallelConfig,
    TokenShard,
    blocks_of,
    capture_blocks,
    compile_blocks,
    recompute_activations,
    shard_context,
    shard_data,
    shard_experts,
    shard_tensors,
)


def parallelize_qwen3_moe(stage: Qwen3MoeForCausalLM, mesh: MeshDomains | None, parallel: ParallelConfig) -> None:
    """Spread a stage over the ranks, in place, in the order in which the kinds of parallelism must be applied.

    Each part can be used alone, on any module.

    Args:
        stage: Stage on the meta device, or with equal values on all ranks.
        mesh: Mesh of all ranks; None for one process, which applies only the settings for a single device.
        parallel: Settings of the distribution.

    Raises:
        ConfigError: Experts are to be spread over ranks, or their products are chosen, but the whole model has no
            experts.
    """
    if mesh is not None and mesh.sizes[Axis.EP_SHARD] > 1:
        stage.config.refuse_without_experts(f"MeshConfig.expert_parallel={mesh.sizes[Axis.EP_SHARD]}")
    if parallel.grouped_gemm != "auto":
        stage.config.refuse_without_experts(f"ParallelConfig.grouped_gemm={parallel.grouped_gemm!r}")
    layers = list(stage.model.layers.values())
    if parallel.shard_blocks is not None:
        layers = blocks_of(stage, parallel.shard_blocks)
    if mesh is not None:
        stage.model.tokens = TokenShard.of(mesh)
        shard_tensors(stage, mesh)
        shard_experts(stage, mesh, parallel)
        if mesh.sizes[Axis.CP] > 1:
            shard_context(stage, mesh.group(Axis.CP), parallel.context)
        spread_sequences(stage, mesh.group(Axis.CP, Axis.TP))
    compile_blocks(stage, parallel, layers)
    recompute_activations(stage, parallel, layers)
    capture_blocks(stage, parallel, mesh, layers)
    if mesh is not None:
        # hidden states are in the gathered dtype from the embedding on, and the losses of routers stay in their own
        shard_data(stage, _gathered_together(stage, layers), mesh, parallel, casts_inputs=False)


def _gathered_together(stage: Qwen3MoeForCausalLM, layers: list[nn.Module]) -> list[nn.Module | list[nn.Module]]:
    """Return the units for `shard_data`: each layer, the embedding, and the final norm with the head.

    Two modules use a tied embedding, so it is gathered with the stage and kept.
    """
    units: list[nn.Module | list[nn.Module]] = [*layers]
    if stage.config.tie_word_embeddings:
        return units
    if stage.stage.is_first:
        units.insert(0, stage.model.embed_tokens)
    if stage.stage.is_last:
        units.append([stage.model.norm, stage.lm_head])
    return units
