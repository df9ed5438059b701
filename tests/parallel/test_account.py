"""Bytes of each rank: what the parts of the package make on 64 and 4096 ranks, and a table computed by hand.

The model is the preset 30b-a3b. Its sizes are written out here once more: nothing is asked of the configuration.

    hidden 2048, 48 layers, vocabulary 151936, untied
    attention   q [32 * 128, 2048]  k [4 * 128, 2048]  v [4 * 128, 2048]  o [2048, 32 * 128]
    router      [128, 2048]
    norms       of a layer 2 * [2048] and, of queries and keys, 2 * [128]; behind the last layer [2048]
    experts     gate and up [128, 2 * 768, 2048]  down [128, 2048, 768]

Of n ranks that share a matrix each has the n-th part of its rows, rounded up as long as there are some; where there are
fewer rows than ranks, of its columns. The line of a rank says so: `512 * 2048` are 512 rows of 2048.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard

from lightning_d9d.mesh import MeshConfig, MeshDomains
from lightning_d9d.mesh.sharding import local
from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM
from lightning_d9d.models.qwen3_moe.plan import parallelize_qwen3_moe
from lightning_d9d.optim import parameter_groups
from lightning_d9d.parallel import ParallelConfig
from lightning_d9d.parallel.plan import fully_sharded
from lightning_d9d.pipeline.types import StageInfo
from lightning_d9d.sync.buckets import GradientBuckets, Part
from tests.mesh.fake_world import fake_world
from tests.parallel.meta import meta_stages

MODEL = Qwen3MoeConfig.preset("30b-a3b")


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
    """In a pipeline with twice as many stages as ranks."""


CASES = {
    # 64 ranks
    "copies": Case(
        MeshConfig(data_parallel_replicate=64),
        {
            31: Held(
                attention=48 * (4096 * 2048 + 2 * 512 * 2048 + 2048 * 4096),
                router=48 * 128 * 2048,
                norms=48 * (2 * 2048 + 2 * 128) + 2048,
                experts=48 * 128 * (1536 * 2048 + 2048 * 768),
                embedding=151936 * 2048,
                head=151936 * 2048,
            )
        },
    ),
    "shards": Case(
        MeshConfig(data_parallel_shard=64),
        dict.fromkeys(
            (0, 31, 63),
            Held(
                attention=48 * (64 * 2048 + 2 * 8 * 2048 + 32 * 4096),
                router=48 * 2 * 2048,
                norms=48 * (2 * 32 + 2 * 2) + 32,
                experts=48 * 2 * (1536 * 2048 + 2048 * 768),
                embedding=2374 * 2048,
                head=2374 * 2048,
            ),
        ),
    ),
    # 4 stages with 14, 13, 13 and 8 layers; weights over 8 ranks; 32 experts a rank, which two ranks share
    "experts within a replica": Case(
        MeshConfig(pipeline_parallel=4, data_parallel_replicate=2, data_parallel_shard=8, expert_parallel=4),
        {
            0: Held(
                attention=14 * (512 * 2048 + 2 * 64 * 2048 + 256 * 4096),
                router=14 * 16 * 2048,
                norms=14 * (2 * 256 + 2 * 16),
                experts=14 * 16 * (1536 * 2048 + 2048 * 768),
                embedding=18992 * 2048,
            ),
            31: Held(
                attention=13 * (512 * 2048 + 2 * 64 * 2048 + 256 * 4096),
                router=13 * 16 * 2048,
                norms=13 * (2 * 256 + 2 * 16),
                experts=13 * 16 * (1536 * 2048 + 2048 * 768),
            ),
            63: Held(
                attention=8 * (512 * 2048 + 2 * 64 * 2048 + 256 * 4096),
                router=8 * 16 * 2048,
                norms=8 * (2 * 256 + 2 * 16) + 256,
                experts=8 * 16 * (1536 * 2048 + 2048 * 768),
                head=18992 * 2048,
            ),
        },
    ),
    # the experts of a replica are spread over all of it: 32 a rank, shared with nobody
    "experts over a replica": Case(
        MeshConfig(pipeline_parallel=4, data_parallel_replicate=4, data_parallel_shard=4, expert_parallel=4),
        {
            32: Held(
                attention=13 * (1024 * 2048 + 2 * 128 * 2048 + 512 * 4096),
                router=13 * 32 * 2048,
                norms=13 * (2 * 512 + 2 * 32),
                experts=13 * 32 * (1536 * 2048 + 2048 * 768),
            ),
        },
    ),
    # 2 stages with 27 and 21 layers; 8 experts a rank
    "experts over two replicas": Case(
        MeshConfig(pipeline_parallel=2, data_parallel_replicate=4, data_parallel_shard=8, expert_parallel=16),
        {
            0: Held(
                attention=27 * (512 * 2048 + 2 * 64 * 2048 + 256 * 4096),
                router=27 * 16 * 2048,
                norms=27 * (2 * 256 + 2 * 16),
                experts=27 * 8 * (1536 * 2048 + 2048 * 768),
                embedding=18992 * 2048,
            ),
            63: Held(
                attention=21 * (512 * 2048 + 2 * 64 * 2048 + 256 * 4096),
                router=21 * 16 * 2048,
                norms=21 * (2 * 256 + 2 * 16) + 256,
                experts=21 * 8 * (1536 * 2048 + 2048 * 768),
                head=18992 * 2048,
            ),
        },
    ),
    # nothing is fully sharded; 16 experts a rank
    "experts over copies": Case(
        MeshConfig(pipeline_parallel=2, data_parallel_replicate=32, expert_parallel=8),
        {
            0: Held(
                attention=27 * (4096 * 2048 + 2 * 512 * 2048 + 2048 * 4096),
                router=27 * 128 * 2048,
                norms=27 * (2 * 2048 + 2 * 128),
                experts=27 * 16 * (1536 * 2048 + 2048 * 768),
                embedding=151936 * 2048,
            ),
        },
    ),
    # 8 stages with 7, 7, 7, 7, 7, 6, 6 and 1 layers, of which a rank has two; 16 experts a rank, which two ranks share
    "two stages a rank": Case(
        MeshConfig(pipeline_parallel=4, data_parallel_shard=16, expert_parallel=8),
        {
            0: Held(
                attention=(7 + 1) * (256 * 2048 + 2 * 32 * 2048 + 128 * 4096),
                router=(7 + 1) * 8 * 2048,
                norms=(7 + 1) * (2 * 128 + 2 * 8) + 128,
                experts=(7 + 1) * 8 * (1536 * 2048 + 2048 * 768),
                embedding=9496 * 2048,
                head=9496 * 2048,
            ),
        },
        stages_of_rank=(0, 7),
    ),
    # 4096 ranks
    # 2 experts a rank, which 8 ranks share by their rows; 512 ranks share a matrix: of 128 rows they take columns, of
    # a norm with 128 weights only 128 ranks have one, and of the vocabulary the last rank has what is left
    "fewer experts than ranks": Case(
        MeshConfig(pipeline_parallel=8, data_parallel_shard=512, expert_parallel=64),
        {
            0: Held(
                attention=7 * (8 * 2048 + 2 * 1 * 2048 + 4 * 4096),
                router=7 * 128 * 4,
                norms=7 * (2 * 4 + 2 * 1),
                experts=7 * 2 * (192 * 2048 + 256 * 768),
                embedding=297 * 2048,
            ),
            511: Held(
                attention=7 * (8 * 2048 + 2 * 1 * 2048 + 4 * 4096),
                router=7 * 128 * 4,
                norms=7 * 2 * 4,
                experts=7 * 2 * (192 * 2048 + 256 * 768),
                embedding=(151936 - 511 * 297) * 2048,
            ),
            2048: Held(
                attention=7 * (8 * 2048 + 2 * 1 * 2048 + 4 * 4096),
                router=7 * 128 * 4,
                norms=7 * (2 * 4 + 2 * 1),
                experts=7 * 2 * (192 * 2048 + 256 * 768),
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
                attention=3 * (16 * 2048 + 2 * 2 * 2048 + 8 * 4096),
                router=3 * 128 * 8,
                norms=3 * (2 * 8 + 2 * 1),
                experts=3 * 128 * (6 * 2048 + 8 * 768),
            ),
        },
    ),
    # one expert a rank, of a copy over two replicas
    "an expert a rank": Case(
        MeshConfig(data_parallel_replicate=64, data_parallel_shard=64, expert_parallel=128),
        {
            2048: Held(
                attention=48 * (64 * 2048 + 2 * 8 * 2048 + 32 * 4096),
                router=48 * 2 * 2048,
                norms=48 * (2 * 32 + 2 * 2) + 32,
                experts=48 * 1 * (1536 * 2048 + 2048 * 768),
                embedding=2374 * 2048,
                head=2374 * 2048,
            )
        },
    ),
    # 16 stages with 4, 4, 3, ..., 3 and 1 layers; 16 experts a rank, which 8 ranks share
    "every axis": Case(
        MeshConfig(pipeline_parallel=16, data_parallel_replicate=4, data_parallel_shard=64, expert_parallel=8),
        {
            0: Held(
                attention=4 * (64 * 2048 + 2 * 8 * 2048 + 32 * 4096),
                router=4 * 2 * 2048,
                norms=4 * (2 * 32 + 2 * 2),
                experts=4 * 2 * (1536 * 2048 + 2048 * 768),
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
    "an expert a rank over copies": Case(
        MeshConfig(pipeline_parallel=8, data_parallel_replicate=512, expert_parallel=128),
        {
            2048: Held(
                attention=7 * (4096 * 2048 + 2 * 512 * 2048 + 2048 * 4096),
                router=7 * 128 * 2048,
                norms=7 * (2 * 2048 + 2 * 128),
                experts=7 * 1 * (1536 * 2048 + 2048 * 768),
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
    """Between backward and step: what FSDP2 reduces, and buffers of the rest."""
    in_units, rest = 0, []
    for stage in stages:
        sharded = fully_sharded(stage)
        rest += [parameter for parameter in stage.parameters() if parameter not in sharded]
        units = [unit for unit in stage.modules() if isinstance(unit, FSDPModule)]
        for group in {fully_shard.state(unit)._fsdp_param_group for unit in units} - {None}:  # type: ignore[attr-defined]
            num_elements = sum(local(each.sharded_param).numel() for each in group.fsdp_params)
            in_units += num_elements * group.mp_policy.reduce_dtype.itemsize
    return in_units + GradientBuckets([Part(rest, None)], at_least=torch.float32).num_bytes


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
    ("num_experts", "degrees", "sharers", "expert_sharers"),
    [
        (24, (2, 2, 16, 1), 16, 16),  # 16 ranks share 24 experts: 12 have two
        (24, (1, 4, 16, 8), 16, 16),  # 2 ranks share 3 experts
        (32, (1, 4, 16, 32), 16, 32),
        (24, (2, 32, 1, 8), 1, 8),
        (8, (1, 1, 64, 4), 64, 64),  # 16 ranks share 2 experts
    ],
    ids=["no expert parallelism", "within a replica", "over two replicas", "over copies", "by their rows"],
)
def test_ranks_that_share_a_copy_hold_each_element_once(
    num_experts: int, degrees: tuple[int, int, int, int], sharers: int, expert_sharers: int
) -> None:
    """Each run of `sharers` ranks holds a copy of its stage's weights, and of `expert_sharers` ranks one of experts.

    Of 64 ranks each is built, with the numbers 0, 1, 2, ... as weights.
    """
    pp, replicate, shard, ep = degrees
    config = MeshConfig(
        pipeline_parallel=pp, data_parallel_replicate=replicate, data_parallel_shard=shard, expert_parallel=ep
    )
    model = dataclasses.replace(NARROW, num_hidden_layers=pp, num_experts=num_experts)
    sizes: dict[str, int] = {}
    held: list[dict[str, Tensor]] = []
    for rank in range(64):
        with fake_world(rank, 64):
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
        holders = [rank for rank in range(64) if name in held[rank]]
        assert len(holders) == 64 // pp
        num_ranks = expert_sharers if ".experts." in name else sharers
        for first in holders[::num_ranks]:
            together = torch.cat([held[rank][name].flatten() for rank in range(first, first + num_ranks)])
            assert together.sort().values.tolist() == [*range(size)]
