"""Sequences spread over ranks against whole ones on each, with as many tokens a rank. What a step is: `training`.

The operations of attention grow with the sequence, so the ratio is that of FLOP rates; attention counts causally.
Weights are copied to all ranks and experts spread over all of them in either case.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from lightning_d9d import MeshConfig, ParallelConfig
from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig
from tests.benchmarks.frame import Case
from tests.benchmarks.training import ON_CPU, QUICK, Steps, Way, Work, account, accounts, fitting, num_gpus
from tests.benchmarks.training import table as table
from tests.benchmarks.training import write as write

PEER = "cp1"
LEAST_OF_PEER = 0.75
"""FLOP rate of eight ranks, of that of one."""
KINDS = ("gather", "ring", "heads")
WORK = Work(
    config=replace(Qwen3MoeConfig.preset("30b-a3b"), vocab_size=8192, num_hidden_layers=2),
    dtype=torch.bfloat16,
    num_rows=1,
    sequence_length=16_384,
)


def ways(work: Work) -> dict[str, Way]:
    """Return the ways of the contenders: all ranks share a sequence, in each kind that there are heads for."""
    num_ranks, heads = work.num_ranks, work.config.num_key_value_heads
    copies = MeshConfig(data_parallel_replicate=num_ranks, expert_parallel=num_ranks)
    parts = MeshConfig(context_parallel_replicate=num_ranks, expert_parallel=num_ranks)
    kinds = [kind for kind in KINDS if kind != "heads" or heads % num_ranks == 0]
    return {PEER: Way(copies)} | {kind: Way(parts, ParallelConfig(context=kind)) for kind in kinds}  # type: ignore[arg-type]


def cases(device_type: str, quick: bool) -> list[Case]:
    """One, on all GPUs up to 8 (a power of two) or on two processes."""
    if quick or device_type == "cpu":
        work = QUICK if quick else ON_CPU
        return [case(work, judges=False, warmup_steps=2, block_steps=1, repeats=2 if quick else 12)]
    work = replace(WORK, num_ranks=num_gpus())
    work = fitting(work, ways(work).values())
    return [case(work, judges=work.num_ranks == 8, warmup_steps=3, block_steps=2, repeats=10)]


def case(work: Work, judges: bool, **rounds: Any) -> Case:
    """One sequence over all ranks in each kind."""
    of_ranks = ways(work)
    more = {name: work.flops(way) / work.flops(of_ranks[PEER]) for name, way in of_ranks.items() if name != PEER}
    return Case(
        name=f"{work.sequence_length * work.num_ranks} tokens",
        contenders={name: partial(Steps, work, way) for name, way in of_ranks.items()},
        peer=PEER,
        limits={name: each / LEAST_OF_PEER for name, each in more.items()} if judges else {},
        afterwards=partial(accounts, {name: account(work, way) for name, way in of_ranks.items()}),
        num_processes=work.num_ranks,
        conditions=work.conditions() | {"expert parallel": work.num_ranks},
        **rounds,
    )
