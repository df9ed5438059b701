"""Steps of one Qwen3-MoE on the same ranks, spread over them in several ways, with and without sums of gradients.

The peer is a whole copy on each rank, `ep1`. What a step is and what stands beside it: `training`.

*Exposed* is by what share of itself a step is longer than the same step without sums, in which AdamW takes zeros where
FSDP2 leaves no gradients. A contender with and without sums is one object: they share weights, gradients and states.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from lightning_d9d import MeshConfig
from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig
from tests.benchmarks.frame import Case
from tests.benchmarks.training import ON_CPU, QUICK, Steps, Way, Work, account, accounts, fitting, num_gpus
from tests.benchmarks.training import table as table
from tests.benchmarks.training import write as write

PEER = "ep1"
WITHOUT = ", no sums"
MOST_EXPOSED = 0.10
LEAST_OF_PEER = 0.70
"""Tokens/s of experts over all ranks, of those of whole copies."""
WORK = Work(
    config=replace(Qwen3MoeConfig.preset("30b-a3b"), vocab_size=8192),
    dtype=torch.bfloat16,
    num_rows=4,
    sequence_length=4096,
)
"""The work of all layers of `30b-a3b`, or of as many as fit, with 8192 ids: the head computes as much as a third of a
layer."""


def ways(num_ranks: int) -> dict[str, Way]:
    """Return the ways of the contenders."""
    copies = {"data_parallel_replicate": num_ranks}
    shards = {"data_parallel_shard": num_ranks}
    degrees = {PEER: copies, "ep": copies | {"expert_parallel": num_ranks}}
    degrees |= {"fsdp": shards, "fsdp+ep": shards | {"expert_parallel": num_ranks}}
    if num_ranks >= 4:
        degrees["hsdp"] = {"data_parallel_replicate": 2, "data_parallel_shard": num_ranks // 2}
    return {name: Way(MeshConfig(**each)) for name, each in degrees.items()}


def cases(device_type: str, quick: bool) -> list[Case]:
    """One, on all GPUs up to 8 (a power of two) or on two processes."""
    if quick or device_type == "cpu":
        work = QUICK if quick else ON_CPU
        return [case(work, judges=False, warmup_steps=2, block_steps=1, repeats=2 if quick else 12)]
    work = replace(WORK, num_ranks=num_gpus())
    work = fitting(work, ways(work.num_ranks).values())
    return [case(work, judges=True, warmup_steps=3, block_steps=2, repeats=10)]


def case(work: Work, judges: bool, **rounds: Any) -> Case:
    """Each way with and without sums."""
    of_ranks = ways(work.num_ranks)
    exposed = 1 / (1 - MOST_EXPOSED) if judges else None
    judged = "hsdp" if "hsdp" in of_ranks else "fsdp"
    return Case(
        name=f"{work.num_ranks} ranks",
        contenders={
            name + suffix: partial(Steps, work, way, sums=not suffix)
            for name, way in of_ranks.items()
            for suffix in ("", WITHOUT)
        },
        peer=PEER,
        limits={"ep": 1 / LEAST_OF_PEER} if judges else {},
        pairs={name: (name + WITHOUT, exposed if name == judged else None) for name in of_ranks},
        afterwards=partial(accounts, {name: account(work, way) for name, way in of_ranks.items()}),
        num_processes=work.num_ranks,
        conditions=work.conditions(),
        **rounds,
    )
