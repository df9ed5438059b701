"""Bytes of each rank: what the parts of the package make on 64 and 4096 ranks, and a table computed by hand.

The model is the preset 30b-a3b with 16 of its 48 layers. Its sizes are written out here once more: nothing is asked of
the configuration.

    hidden 2048, 16 layers, vocabulary 151936, untied
    attention   q [32 * 128, 2048]  k [4 * 128, 2048]  v [4 * 128, 2048]  o [2048, 32 * 128]
    router      [128, 2048]
    norms       of a layer 2 * [2048] and, of queries and keys, 2 * [128]; behind the last layer [2048]
    experts     gate and up [128, 2 * 768, 2048]  down [128, 2048, 768]

Of n ranks that share a matrix each has the n-th part of its rows, rounded up as long as there are some; where there are
fewer rows than ranks, of its columns. The line of a rank says so: `512 * 2048` are 512 rows of 2048. Tensor ranks are
first: they share rows of q, k, v and the vocabulary, and columns of o.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from lightning_d9d.mesh import MeshConfig, MeshDomains
from lightning_d9d.mesh.groups import partition
from lightning_d9d.mesh.sharding import local
from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM
from lightning_d9d.models.qwen3_moe.plan import parallelize_qwen3_moe
from lightning_d9d.optim import parameter_groups
from lightning_d9d.parallel import ParallelConfig
from lightning_d9d.parallel.fsdp import fully_sharded
from lightning_d9d.pipeline.types import StageInfo
from lightning_d9d.sync.buckets import BucketGroup, GradientBuckets
from tests.mesh.fake_world import fake_world
from tests.meshes.cases import Case as MeshCase
from tests.parallel.meta import meta_stages

MODEL = dataclasses.replace(Qwen3MoeConfig.preset("30b-a3b"), num_hidden_layers=16)


class Held(NamedTuple):
    """How many elements a rank has, by what they are for."""

    attention: int
    router: int
    norms: int
    experts: int
    embedding: int = 0
    head: int = 0


PARTS = {
    ".self_attn.q_proj.": "attention",
    ".self_attn.k_proj.": "attention",
    ".self_attn.v_proj.": "attention",
    ".self_attn.o_proj.": "attention",
    ".mlp.gate.": "router",
    ".mlp.experts.": "experts",
    ".embed_tokens.": "embedding",
    "lm_head.": "head",
    "norm.": "norms",
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A mesh, and what some of its ranks hold."""

    mesh: MeshConfig
    held: dict[int, Held]
    stages_of_rank: Sequence[int] | None = None
    """The stages of a rank, in a pipeline with twice as many stages as ranks."""


CASES = {
    # 64 ranks
    "copies": Case(
        MeshConfig(data_parallel_replicate=64),
        {
            31: Held(
                attention=16 * (4096 * 2048 + 2 * 512 * 2048 + 2048 * 4096),
                router=16 * 128 * 2048,
                norms=16 * (2 * 2048 + 2 * 128) + 2048,
                experts=16 * 128 * (1536 * 2048 + 2048 * 768),
                embedding=151936 * 2048,
                head=151936 * 2048,
            )
        },
    ),
    "shards": Case(
        MeshConfig(data_parallel_shard=64),
        dict.fromkeys(
            (0, 63),
            Held(
                attention=16 * (64 * 2048 + 2 * 8 * 2048 + 32 * 4096),
                router=16 * 2 * 2048,
                norms=16 * (2 * 32 + 2 * 2) + 32,
                experts=16 * 2 * (1536 * 2048 + 2048 * 768),
                embedding=2374 * 2048,
                head=2374 * 2048,
            ),
        ),
    ),
    # 4 stages with 5, 5, 4 and 2 layers; weights over 8 ranks; 32 experts a rank, which two ranks share
    "experts within a replica": Case(
        MeshConfig(pipeline_parallel=4, data_parallel_replicate=2, data_parallel_shard=8, expert_parallel=4),
        {
            0: Held(
                attention=5 * (512 * 2048 + 2 * 64 * 2048 + 256 * 4096),
                router=5 * 16 * 2048,
                norms=5 * (2 * 256 + 2 * 16),
                experts=5 * 16 * (1536 * 2048 + 2048 * 768),
                embedding=18992 * 2048,
            ),
            31: Held(
                attention=5 * (512 * 2048 + 2 * 64 * 2048 + 256 * 4096),
                router=5 * 16 * 2048,
                norms=5 * (2 * 256 + 2 * 16),
                experts=5 * 16 * (1536 * 2048 + 2048 * 768),
            ),
            63: Held(
                attention=2 * (512 * 2048 + 2 * 64 * 2048 + 256 * 4096),
                router=2 * 16 * 2048,
                norms=2 * (2 * 256 + 2 * 16) + 256,
                experts=2 * 16 * (1536 * 2048 + 2048 * 768),
                head=18992 * 2048,
            ),
        },
    ),
    # the experts of a replica are spread over all of it: 32 a rank, shared with nobody
    "experts over a replica": Case(
        MeshConfig(pipeline_parallel=4, data_parallel_replicate=4, data_parallel_shard=4, expert_parallel=4),
        {
            32: Held(
                attention=4 * (1024 * 2048 + 2 * 128 * 2048 + 512 * 4096),
                router=4 * 32 * 2048,
                norms=4 * (2 * 512 + 2 * 32),
                experts=4 * 32 * (1536 * 2048 + 2048 * 768),
            ),
        },
    ),
    # 2 stages with 9 and 7 layers; 8 experts a rank
    "experts over two replicas": Case(
        MeshConfig(pipeline_parallel=2, data_parallel_replicate=4, data_parallel_shard=8, expert_parallel=16),
        {
            0: Held(
                attention=9 * (512 * 2048 + 2 * 64 * 2048 + 256 * 4096),
                router=9 * 16 * 2048,
                norms=9 * (2 * 256 + 2 * 16),
                experts=9 * 8 * (1536 * 2048 + 2048 * 768),
                embedding=18992 * 2048,
            ),
            63: Held(
                attention=7 * (512 * 2048 + 2 * 64 * 2048 + 256 * 4096),
                router=7 * 16 * 2048,
                norms=7 * (2 * 256 + 2 * 16) + 256,
                experts=7 * 8 * (1536 * 2048 + 2048 * 768),
                head=18992 * 2048,
            ),
        },
    ),
    # nothing is fully sharded; 16 experts a rank
    "experts over copies": Case(
        MeshConfig(pipeline_parallel=2, data_parallel_replicate=32, expert_parallel=8),
        {
            0: Held(
                attention=9 * (4096 * 2048 + 2 * 512 * 2048 + 2048 * 4096),
                router=9 * 128 * 2048,
                norms=9 * (2 * 2048 + 2 * 128),
                experts=9 * 16 * (1536 * 2048 + 2048 * 768),
                embedding=151936 * 2048,
            ),
        },
    ),
    # 8 stages with 3, 2, 2, 2, 2, 2, 2 and 1 layers, of which a rank has two; 16 experts a rank, which two ranks share
    "two stages a rank": Case(
        MeshConfig(pipeline_parallel=4, data_parallel_shard=16, expert_parallel=8),
        {
            0: Held(
                attention=(3 + 1) * (256 * 2048 + 2 * 32 * 2048 + 128 * 4096),
                router=(3 + 1) * 8 * 2048,
                norms=(3 + 1) * (2 * 128 + 2 * 8) + 128,
                experts=(3 + 1) * 8 * (1536 * 2048 + 2048 * 768),
                embedding=9496 * 2048,
                head=9496 * 2048,
            ),
        },
        stages_of_rank=(0, 7),
    ),
    # 8 tensor ranks share 4 heads of keys and values, two of them the same one; the rest is shared by 8 data ranks, and
    # the experts by all ranks
    "tensor and shards": Case(
        MeshConfig(tensor_parallel=8, data_parallel_shard=8),
        {
            29: Held(
                attention=16 * (64 * 2048 + 2 * 16 * 2048 + 256 * 512),
                router=16 * 16 * 2048,
                norms=16 * (2 * 256 + 2 * 16) + 256,
                experts=16 * 2 * (1536 * 2048 + 2048 * 768),
                embedding=2374 * 2048,
                head=2374 * 2048,
            ),
        },
    ),
    # 4 stages with 5, 5, 4 and 2 layers; 4 tensor ranks, and context ranks share what these have; 16 experts a rank
    "tensor and context": Case(
        MeshConfig(
            pipeline_parallel=4,
            data_parallel_replicate=2,
            context_parallel_shard=2,
            tensor_parallel=4,
            expert_parallel=8,
        ),
        {
            16: Held(
                attention=5 * (512 * 2048 + 2 * 64 * 2048 + 1024 * 1024),
                router=5 * 64 * 2048,
                norms=5 * (2 * 1024 + 2 * 64),
                experts=5 * 16 * (1536 * 2048 + 2048 * 768),
            ),
            63: Held(
                attention=2 * (512 * 2048 + 2 * 64 * 2048 + 1024 * 1024),
                router=2 * 64 * 2048,
                norms=2 * (2 * 1024 + 2 * 64) + 1024,
                experts=2 * 16 * (1536 * 2048 + 2048 * 768),
                head=18992 * 2048,
            ),
        },
    ),
    # 2 stages with 9 and 7 layers; nothing but tensor ranks cut; 4 experts a rank, spread over all of a stage
    "tensor and copies of context": Case(
        MeshConfig(
            pipeline_parallel=2,
            data_parallel_replicate=2,
            context_parallel_replicate=2,
            tensor_parallel=8,
            expert_parallel=32,
        ),
        {
            63: Held(
                attention=7 * (512 * 2048 + 2 * 128 * 2048 + 2048 * 512),
                router=7 * 128 * 2048,
                norms=7 * (2 * 2048 + 2 * 128) + 2048,
                experts=7 * 4 * (1536 * 2048 + 2048 * 768),
                head=18992 * 2048,
            ),
        },
    ),
    # 4096 ranks
    # 2 experts a rank, which 8 ranks share by their rows; 512 ranks share a matrix: of 128 rows they take columns, of
    # a norm with 128 weights only 128 ranks have one, and of the vocabulary the last rank has what is left
    "fewer experts than ranks": Case(
        MeshConfig(pipeline_parallel=8, data_parallel_shard=512, expert_parallel=64),
        {
            0: Held(
                attention=3 * (8 * 2048 + 2 * 1 * 2048 + 4 * 4096),
                router=3 * 128 * 4,
                norms=3 * (2 * 4 + 2 * 1),
                experts=3 * 2 * (192 * 2048 + 256 * 768),
                embedding=297 * 2048,
            ),
            511: Held(
                attention=3 * (8 * 2048 + 2 * 1 * 2048 + 4 * 4096),
                router=3 * 128 * 4,
                norms=3 * 2 * 4,
                experts=3 * 2 * (192 * 2048 + 256 * 768),
                embedding=(151936 - 511 * 297) * 2048,
            ),
            2048: Held(
                attention=2 * (8 * 2048 + 2 * 1 * 2048 + 4 * 4096),
                router=2 * 128 * 4,
                norms=2 * (2 * 4 + 2 * 1),
                experts=2 * 2 * (192 * 2048 + 256 * 768),
            ),
            4095: Held(
                attention=1 * (8 * 2048 + 2 * 1 * 2048 + 4 * 4096),
                router=1 * 128 * 4,
                norms=1 * 2 * 4 + 4,
                experts=1 * 2 * (192 * 2048 + 256 * 768),
                head=(151936 - 511 * 297) * 2048,
            ),
        },
    ),
    # all 128 experts of a layer on every rank, which 256 ranks share by their rows
    "no expert parallelism": Case(
        MeshConfig(pipeline_parallel=16, data_parallel_shard=256),
        {
            2048: Held(
                attention=1 * (16 * 2048 + 2 * 2 * 2048 + 8 * 4096),
                router=1 * 128 * 8,
                norms=1 * (2 * 8 + 2 * 1),
                experts=1 * 128 * (6 * 2048 + 8 * 768),
            ),
        },
    ),
    # one expert a rank, of a copy over two replicas
    "an expert a rank": Case(
        MeshConfig(data_parallel_replicate=64, data_parallel_shard=64, expert_parallel=128),
        {
            2048: Held(
                attention=16 * (64 * 2048 + 2 * 8 * 2048 + 32 * 4096),
                router=16 * 2 * 2048,
                norms=16 * (2 * 32 + 2 * 2) + 32,
                experts=16 * 1 * (1536 * 2048 + 2048 * 768),
                embedding=2374 * 2048,
                head=2374 * 2048,
            )
        },
    ),
    # 16 stages with a layer each; 16 experts a rank, which 8 ranks share
    "every axis": Case(
        MeshConfig(pipeline_parallel=16, data_parallel_replicate=4, data_parallel_shard=64, expert_parallel=8),
        {
            0: Held(
                attention=1 * (64 * 2048 + 2 * 8 * 2048 + 32 * 4096),
                router=1 * 2 * 2048,
                norms=1 * (2 * 32 + 2 * 2),
                experts=1 * 2 * (1536 * 2048 + 2048 * 768),
                embedding=2374 * 2048,
            ),
            4095: Held(
                attention=1 * (64 * 2048 + 2 * 8 * 2048 + 32 * 4096),
                router=1 * 2 * 2048,
                norms=1 * (2 * 32 + 2 * 2) + 32,
                experts=1 * 2 * (1536 * 2048 + 2048 * 768),
                head=2374 * 2048,
            ),
        },
    ),
    # 4 stages with 5, 5, 4 and 2 layers; what 8 tensor ranks have is shared by 16 * 2 ranks, of which the last has the
    # rest of its part of the vocabulary; 2 experts a rank, which 4 ranks share by their rows
    "every axis with tensor and context": Case(
        MeshConfig(
            pipeline_parallel=4,
            data_parallel_replicate=4,
            data_parallel_shard=16,
            context_parallel_shard=2,
            tensor_parallel=8,
            expert_parallel=64,
        ),
        {
            0: Held(
                attention=5 * (16 * 2048 + 2 * 4 * 2048 + 64 * 512),
                router=5 * 4 * 2048,
                norms=5 * (2 * 64 + 2 * 4),
                experts=5 * 2 * (384 * 2048 + 512 * 768),
                embedding=594 * 2048,
            ),
            4095: Held(
                attention=2 * (16 * 2048 + 2 * 4 * 2048 + 64 * 512),
                router=2 * 4 * 2048,
                norms=2 * (2 * 64 + 2 * 4) + 64,
                experts=2 * 2 * (384 * 2048 + 512 * 768),
                head=(151936 // 8 - 31 * 594) * 2048,
            ),
        },
    ),
    "an expert a rank over copies": Case(
        MeshConfig(pipeline_parallel=8, data_parallel_replicate=512, expert_parallel=128),
        {
            2048: Held(
                attention=2 * (4096 * 2048 + 2 * 512 * 2048 + 2048 * 4096),
                router=2 * 128 * 2048,
                norms=2 * (2 * 2048 + 2 * 128),
                experts=2 * 1 * (1536 * 2048 + 2048 * 768),
            ),
        },
    ),
}


def held_by(stages: Sequence[Qwen3MoeForCausalLM]) -> Held:
    counts: Counter[str] = Counter()
    for stage in stages:
        for name, parameter in stage.named_parameters():
            part = next(part for inside, part in PARTS.items() if inside in name)
            counts[part] += local(parameter).numel()
    return Held(**counts)


def gradient_bytes(stages: Sequence[Qwen3MoeForCausalLM]) -> int:
    """Return the bytes between backward and step: those that FSDP2 reduces, and buffers of the rest."""
    in_units, rest = 0, []
    for stage in stages:
        sharded = fully_sharded(stage)
        rest += [parameter for parameter in stage.parameters() if parameter not in sharded]
        units = [unit for unit in stage.modules() if isinstance(unit, FSDPModule)]
        for state in {unit._get_fsdp_state() for unit in units}:
            for group in [state._fsdp_param_group] if state._fsdp_param_group else []:
                num_elements = sum(local(each.sharded_param).numel() for each in group.fsdp_params)
                in_units += num_elements * state._mp_policy.reduce_dtype.itemsize
    return in_units + GradientBuckets([BucketGroup(rest, None)], at_least=torch.float32).num_bytes


def adamw_bytes(stages: Sequence[Qwen3MoeForCausalLM]) -> int:
    for stage in stages:
        for parameter in stage.parameters():
            parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW([g for stage in stages for g in parameter_groups(stage)])
    optimizer.step()
    tensors = [local(value) for state in optimizer.state.values() for value in state.values()]
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.bfloat16) for name in CASES),
        ("experts within a replica", torch.float32),
        ("experts over copies", torch.float32),
    ],
    ids=str,
)
def test_bytes_of_a_rank_are_those_of_the_table(name: str, dtype: torch.dtype) -> None:
    """bf16: 2 for a weight, 4 for its gradient, 2 * 2 for AdamW's two moments; float32: 4, 4 and 2 * 4.

    Besides, 4 a parameter for AdamW's count of steps and, in buckets, for the flag that it was used.
    """
    case = CASES[name]
    width = {torch.bfloat16: 2, torch.float32: 4}[dtype]
    for rank, held in case.held.items():
        with fake_world(rank, case.mesh.world_size):
            mesh = MeshDomains.build(case.mesh, "cpu")
            num_stages = mesh.sizes["pp"] * (1 if case.stages_of_rank is None else 2)
            stages = meta_stages(MODEL, mesh, indices=case.stages_of_rank, num_stages=num_stages, dtype=dtype)
            assert held_by(stages) == held
            parameters = [parameter for stage in stages for parameter in stage.parameters()]
            assert sum(local(p).numel() * p.itemsize for p in parameters) == width * sum(held)
            in_buckets = parameters if mesh.sizes["dp_cp_shard"] == 1 else []
            if mesh.sizes["ep_shard"] > 1 and case.mesh.expert_weights()["ep_fsdp"] == 1 and not in_buckets:
                in_buckets = [p for stage in stages for name, p in stage.named_parameters() if ".experts." in name]
            assert gradient_bytes(stages) == 4 * (sum(held) + len(in_buckets))
            assert adamw_bytes(stages) == 2 * width * sum(held) + 4 * len(parameters)


NARROW = Qwen3MoeConfig(
    vocab_size=100,
    hidden_size=64,
    moe_intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_experts=24,
    num_experts_per_tok=2,
)


@pytest.mark.parametrize(
    ("num_experts", "degrees"),
    [
        (20, "pp2 rep2 shard8"),  # 8 ranks share 20 experts: one has two
        (24, "rep2 shard16 ep8"),  # 2 ranks share 3 experts
        (32, "rep4 shard8 ep16"),  # over two replicas
        (24, "pp2 rep16 ep8"),
        (8, "shard32 ep4"),  # 8 ranks share 2 experts by their rows
        (24, "pp2 shard2 cp2 tp4 ep8"),  # 2 ranks share 3 experts
        (8, "shard4 cprep2 tp4 ep8"),  # 4 ranks share one expert by its rows
    ],
)
def test_ranks_that_share_a_copy_hold_each_element_once(num_experts: int, degrees: str) -> None:
    """Each of 32 ranks is built, with the numbers 0, 1, 2, ... as weights."""
    config = MeshCase(degrees).config
    pp = config.pipeline_parallel
    model = dataclasses.replace(NARROW, num_hidden_layers=pp, num_experts=num_experts)
    sizes: dict[str, int] = {}
    held: list[dict[str, Tensor]] = []
    for rank in range(32):
        with fake_world(rank, 32):
            mesh = MeshDomains.build(config, "cpu")
            stage = Qwen3MoeForCausalLM(model, StageInfo(mesh.coordinates["pp"], pp)).double()
            with torch.no_grad():
                for name, parameter in stage.named_parameters():
                    sizes[name] = parameter.numel()
                    parameter.copy_(torch.arange(parameter.numel()).view_as(parameter))
            parallelize_qwen3_moe(stage, mesh, ParallelConfig())
            held.append({name: local(parameter).detach().long() for name, parameter in stage.named_parameters()})
    assert sum(sizes.values()) == model.num_parameters
    for name, size in sizes.items():
        holders = {rank for rank in range(32) if name in held[rank]}
        assert len(holders) == 32 // pp
        for ranks in sharers(config, name):
            if ranks[0] in holders:
                together = torch.cat([held[rank][name].flatten() for rank in ranks])
                assert together.sort().values.tolist() == [*range(size)], name


def sharers(config: MeshConfig, name: str) -> Sequence[tuple[int, ...]]:
    """The ranks of each copy of a parameter."""
    part = next(part for inside, part in PARTS.items() if inside in name)
    if part == "experts":
        return partition(config.expert_weights(), ["ep_fsdp", "ep_shard"])
    if part in ("norms", "router"):
        return partition(config.domains()["dense"], ["dp_cp_shard"])
    num_parts = config.tensor_parallel
    if ".k_proj." in name or ".v_proj." in name:
        num_parts = min(num_parts, NARROW.num_key_value_heads)
    return partition(config.split_tensor(num_parts)["dense"], ["dp_cp_shard", "tp_shard"])
