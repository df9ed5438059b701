"""The meshes that are to train as one process does."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from lightning_d9d import MeshConfig, ParallelConfig
from lightning_d9d.peft import FullTune, LoRA, PeftMethod, Stack
from lightning_d9d.sync.buckets import GradSyncConfig
from tests.meshes.equality import CONFIG, SMALL, Data

DEGREES = {
    "pp": "pipeline_parallel",
    "rep": "data_parallel_replicate",
    "shard": "data_parallel_shard",
    "ep": "expert_parallel",
    "tp": "tensor_parallel",
    "cp": "context_parallel_shard",
    "cprep": "context_parallel_replicate",
}


@dataclass(frozen=True)
class Case:
    """One run.

    `mesh` is such as "pp2 rep2 ep2".
    """

    mesh: str
    schedule: str = "1f1b"
    microbatch_size: int | None = None
    accumulated: int = 1
    tied: bool = False
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    reduce: Any = "last_microbatch"
    fast: bool = False
    """Whether it is one of those that always run."""
    heads: tuple[int, int] = (2, 1)
    """The heads of queries, and those of keys and values."""
    data: Data = field(default_factory=Data)
    dense: bool = False
    """Whether no layer is a mixture of experts."""
    peft: PeftMethod | None = None

    @property
    def config(self) -> MeshConfig:
        degrees = {}
        for part in self.mesh.split():
            name = part.rstrip("0123456789")
            degrees[DEGREES[name]] = int(part.removeprefix(name))
        return MeshConfig(**degrees)

    @property
    def num_ranks(self) -> int:
        return self.config.world_size

    @property
    def strategy_options(self) -> dict[str, Any]:
        return {
            "mesh": self.config,
            "schedule": self.schedule,
            "microbatch_size": self.microbatch_size,
            "parallel": self.parallel,
            "grad_sync": GradSyncConfig(reduce=self.reduce),
        }

    @property
    def model(self) -> Any:
        heads, key_value_heads = self.heads
        needs_all = self.config.pipeline_parallel > 1 or not self.fast or self.peft is LAST_LAYER
        config = replace(
            CONFIG if needs_all else SMALL,
            tie_word_embeddings=self.tied,
            num_attention_heads=heads,
            num_key_value_heads=key_value_heads,
        )
        if self.dense:
            return replace(config, num_experts=0, intermediate_size=24)
        if self.config.tensor_parallel > 1:  # what is cut besides attention and vocabulary, and what is not
            return replace(config, mlp_only_layers=(1,), intermediate_size=24, shared_expert_intermediate_size=8)
        return config

    def __str__(self) -> str:
        parts = [self.mesh.replace(" ", "-")]
        parts += [self.schedule] if self.schedule != "1f1b" else []
        parts += [f"mb{self.microbatch_size}"] if self.microbatch_size else []
        parts += [f"acc{self.accumulated}"] if self.accumulated > 1 else []
        parts += ["tied"] if self.tied else []
        parts += [f"heads{self.heads[0]}x{self.heads[1]}"] if self.heads != (2, 1) else []
        parts += ["packed"] if self.data.packed else []
        parts += ["dense"] if self.dense else []
        parts += [f"peft={PEFT_NAMES[self.peft]}"] if self.peft else []
        parts += [self.reduce] if self.reduce != "last_microbatch" else []
        defaults = ParallelConfig()
        for name, value in vars(self.parallel).items():
            parts += [f"{name}={value}"] if value != getattr(defaults, name) else []
        return ",".join(parts)


LAYERS = LoRA(rank=4, alpha=6)
"""Adapters of all projections, with rank 2 for those of each expert."""
MATRICES = LoRA(rank=4, alpha=6, targets=["self_attn", "experts", "(gate|up|down)_proj", "embed_tokens", "lm_head"])
"""Adapters of all matrices that can have them."""
WITH_NORMS = Stack([LoRA(rank=3, alpha=6, targets=["experts", "o_proj"], rank_of_experts=3), FullTune("norm")])
LAST_LAYER = LoRA(rank=2, alpha=4, targets=[r"layers\.3"])
"""Adapters of the last layer, so the first stages of a pipeline have no trained parameter."""
PEFT_NAMES = {LAYERS: "layers", MATRICES: "matrices", WITH_NORMS: "norms", LAST_LAYER: "last"}
KEPT = ParallelConfig(reshard_after_forward=False)
RESHARD = ParallelConfig(reshard_after_forward=True)
RECOMPUTED = [ParallelConfig(recompute=kind) for kind in ("full", "selective", "attention", "every_2")]
IN_HALVES = ParallelConfig(overlap_experts=True)
IN_TURNS = ParallelConfig(overlap_pairs=True)
PEER = ParallelConfig(expert_dispatch="peer", expert_capacity=1.0)
"""Peer dispatch with so little memory that some forwards run again."""
RING, HEADS = ParallelConfig(context="ring"), ParallelConfig(context="heads")
TOKENS_8, TOKENS_16 = Data(8), Data(16)
PACKED = Data(16, packed=True)
SCHEDULES = ("gpipe", "looped_bfs", "interleaved_1f1b", "zero_bubble", "zero_bubble_v", "dual_pipe_v")

CASES = [
    # data
    Case("rep2", fast=True),
    Case("rep4"),
    Case("rep8"),
    Case("shard2"),
    Case("shard2", microbatch_size=2, accumulated=2, fast=True),
    Case("shard2", microbatch_size=2, accumulated=2, reduce="every_microbatch"),
    Case("shard2", microbatch_size=2, parallel=RESHARD, tied=True, fast=True),
    Case("shard2", microbatch_size=2, parallel=RESHARD, reduce="every_microbatch"),
    Case("shard2", parallel=KEPT),
    Case("shard2", parallel=ParallelConfig(offload=True)),
    Case("shard4"),
    Case("shard8"),
    Case("rep2 shard2"),
    Case("rep2 shard4"),
    Case("rep4 shard2"),
    # experts
    Case("rep2 ep2", fast=True),
    Case("shard2 ep2"),
    Case("rep4 ep2"),
    Case("rep4 ep4"),
    Case("rep8 ep4"),
    Case("rep8 ep8"),
    Case("shard4 ep2"),
    Case("shard4 ep4"),
    Case("shard8 ep2"),
    Case("shard8 ep8"),
    Case("rep2 shard2 ep2", microbatch_size=2, fast=True),
    Case("rep2 shard2 ep4"),
    Case("rep2 shard4 ep2"),
    Case("rep2 shard4 ep4"),
    Case("rep2 shard4 ep8", accumulated=2),
    Case("rep4 shard2 ep4"),
    Case("rep2 shard2 ep2", microbatch_size=2, parallel=IN_HALVES, fast=True),
    Case("shard4 ep2", parallel=replace(IN_HALVES, recompute="full")),
    Case("shard4 ep4", parallel=replace(IN_HALVES, recompute="selective")),
    Case("rep2 tp2 ep4", parallel=replace(IN_HALVES, expert_dispatch="peer")),
    Case("pp2 shard2 ep2", schedule="zero_bubble", parallel=IN_HALVES),
    Case("pp2 shard2 ep2", schedule="dual_pipe_v", parallel=replace(IN_HALVES, expert_dispatch="peer")),
    Case("rep2 ep2", peft=LAYERS, parallel=IN_HALVES),
    Case("rep8 ep8", parallel=replace(IN_HALVES, expert_dispatch="peer")),
    Case("rep2 cp2 ep4", data=TOKENS_8, parallel=IN_HALVES),
    Case("rep2 ep2", parallel=PEER, fast=True),
    Case("rep4 ep4", parallel=PEER),
    Case("rep8 ep8", parallel=PEER),
    Case("rep2 shard2 ep2", microbatch_size=2, parallel=PEER),
    Case("shard4 ep4", parallel=replace(PEER, recompute="full")),
    Case("rep2 tp2 ep4", parallel=replace(PEER, recompute="selective")),
    Case("rep2 cp2 ep4", data=TOKENS_8, parallel=PEER),
    *(
        Case("pp2 shard2 ep2", schedule=schedule, parallel=PEER, fast=schedule == "dual_pipe_v")
        for schedule in ("1f1b", "zero_bubble", "dual_pipe_v")
    ),
    # overlapped pairs in turns
    Case("rep2 ep2", schedule="dual_pipe_v", microbatch_size=2, parallel=IN_TURNS, fast=True),
    Case(
        "rep2 ep2",
        schedule="dual_pipe_v",
        microbatch_size=1,
        parallel=replace(IN_TURNS, recompute="full"),
        accumulated=2,
    ),
    Case("rep2 ep2", schedule="dual_pipe_v", microbatch_size=2, parallel=IN_TURNS, tied=True),
    Case("rep2 ep2", schedule="dual_pipe_v", microbatch_size=2, parallel=IN_TURNS, peft=LAYERS),
    Case("shard2 ep2", schedule="dual_pipe_v", microbatch_size=2, parallel=IN_TURNS),
    Case("pp2 shard2 ep2", schedule="dual_pipe_v", parallel=IN_TURNS, fast=True),
    Case("pp2 rep2 ep2", schedule="dual_pipe_v", parallel=replace(IN_TURNS, recompute="selective")),
    Case("pp2 rep2 ep2", schedule="dual_pipe_v", parallel=replace(IN_TURNS, recompute="every_2")),
    Case("rep4 ep4", schedule="dual_pipe_v", microbatch_size=1, parallel=IN_TURNS),
    Case("pp2 rep2 tp2 ep4", schedule="dual_pipe_v", parallel=IN_TURNS, tied=True),
    Case("pp2 rep2 cp2 ep4", schedule="dual_pipe_v", data=TOKENS_8, parallel=replace(IN_TURNS, recompute="selective")),
    # pipelines
    Case("pp2 shard2", tied=True),
    Case("pp2 shard2", schedule="zero_bubble_v", tied=True),
    Case("pp2 rep2 ep2", schedule="zero_bubble", accumulated=2, fast=True),
    Case("pp2 shard2 ep2"),
    *(Case("pp2 shard2 ep2", schedule=schedule) for schedule in SCHEDULES),
    Case("pp2 shard2 ep2", schedule="interleaved_1f1b", parallel=RESHARD),
    Case("pp2 shard2 ep2", reduce="every_microbatch", accumulated=2),
    Case("pp2 rep2 shard2 ep2", schedule="dual_pipe_v", accumulated=2),
    Case("pp2 rep2 shard2 ep4", schedule="zero_bubble_v", tied=True),
    Case("pp4 shard2 ep2", schedule="zero_bubble"),
    # tensors, whose ranks have slices of the sequences; `test_tensor_and_context.py` has four ranks in CI
    Case("tp2", fast=True),
    Case("tp2", heads=(4, 2), tied=True),
    Case("tp2", data=Data(6, packed=True), parallel=RECOMPUTED[0], fast=True),
    Case("tp2", parallel=ParallelConfig(recompute="attention")),
    Case("tp4", heads=(4, 2), data=TOKENS_8),
    Case("tp4", heads=(4, 1), data=TOKENS_8),
    Case("tp4", heads=(8, 4), data=TOKENS_8, accumulated=2),
    Case("rep2 tp2", tied=True),
    Case("shard2 tp2"),
    Case("shard2 tp4", heads=(4, 2), data=TOKENS_8),
    Case("rep2 shard2 tp2", microbatch_size=2, reduce="every_microbatch"),
    Case("rep4 tp2 ep4"),
    Case("rep2 tp2 ep4"),
    Case("rep2 tp2 ep2"),
    Case("shard2 tp2 ep2", parallel=RECOMPUTED[1]),
    Case("rep2 shard2 tp2 ep4", parallel=RESHARD),
    Case("pp2 shard2 tp2", tied=True),
    *(
        Case("pp2 rep2 tp2 ep4", schedule=schedule)
        for schedule in ("1f1b", "interleaved_1f1b", "zero_bubble_v", "dual_pipe_v")
    ),
    Case("pp2 tp2", schedule="zero_bubble_v", tied=True),
    # sequences, of which ranks have two chunks
    *(
        Case("cp2", data=TOKENS_8, heads=(2, 2), parallel=each, fast=each is not RING)
        for each in (ParallelConfig(), RING, HEADS)
    ),
    *(
        Case("cp2", data=PACKED, heads=(4, 2), parallel=each, fast=each is RING)
        for each in (ParallelConfig(), RING, HEADS)
    ),
    *(Case("cp4", data=TOKENS_8, heads=(4, 4), parallel=each) for each in (ParallelConfig(), RING, HEADS)),
    Case("cp4", data=PACKED, microbatch_size=2),
    Case("cprep2", data=TOKENS_8),
    Case("cp2 cprep2", data=TOKENS_8),
    Case("rep2 cp2", data=TOKENS_8, accumulated=2),
    Case("shard2 cp2", data=TOKENS_8, tied=True),
    Case("rep2 cp2 cprep2", data=TOKENS_8),
    Case("rep2 cp2 ep2", data=TOKENS_8, fast=True),
    Case("rep2 cp2 ep4", data=TOKENS_8, parallel=ParallelConfig(context="ring", recompute="selective")),
    Case("shard2 cp2 cprep2 ep2", data=TOKENS_8),
    Case("cp2 tp2", data=TOKENS_8),
    Case("cp2 tp2", data=PACKED, heads=(8, 4), parallel=HEADS),
    Case("rep2 cp2 tp2 ep4", data=TOKENS_8),
    Case("shard2 cp2 tp2 ep2", data=PACKED, heads=(4, 2), tied=True, parallel=RING),
    *(Case("pp2 rep2 cp2 ep4", data=TOKENS_8, schedule=schedule) for schedule in ("1f1b", "zero_bubble_v")),
    Case("pp2 cp2 ep2", data=TOKENS_8, schedule="dual_pipe_v", tied=True),
    Case("pp2 cp2 tp2", data=PACKED, schedule="zero_bubble_v", parallel=RING),
    # recomputation
    *(Case("shard2 ep2", parallel=each, fast=each is RECOMPUTED[0]) for each in RECOMPUTED),
    *(
        Case("pp2 shard2 ep2", schedule="zero_bubble_v", parallel=each, fast=each is RECOMPUTED[1])
        for each in RECOMPUTED
    ),
    Case("pp2 shard2 ep2", schedule="dual_pipe_v", parallel=RECOMPUTED[0]),
    # dense Qwen3
    Case("rep2", tied=True, dense=True),
    Case("shard2", tied=True, dense=True, fast=True),
    Case("shard2", microbatch_size=2, parallel=RECOMPUTED[0], dense=True),
    Case("tp2", tied=True, dense=True),
    Case("tp2", dense=True),
    Case("cp2", tied=True, data=TOKENS_8, dense=True),
    Case("cp2", data=PACKED, heads=(2, 2), parallel=RING, dense=True),
    Case("pp2", microbatch_size=2, tied=True, dense=True, fast=True),
    Case("pp2", schedule="zero_bubble_v", dense=True),
    Case("rep2 shard2", dense=True),
    Case("pp2 shard2 tp2", tied=True, dense=True),
    Case("pp2 cp2 tp2", data=TOKENS_8, dense=True),
    # adapters
    Case("rep2", peft=MATRICES, accumulated=2),
    Case("shard2", peft=WITH_NORMS, microbatch_size=2, accumulated=2, fast=True),
    Case("shard2", peft=LAYERS, tied=True, parallel=RESHARD),
    Case("shard2", peft=LAYERS, parallel=ParallelConfig(offload=True)),
    Case("shard4", peft=LAYERS, fast=True),
    Case("rep2 shard2", peft=MATRICES),
    Case("rep2 ep2", peft=LAYERS, fast=True),
    Case("rep4 ep4", peft=WITH_NORMS),
    Case("shard4 ep2", peft=LAYERS, parallel=RECOMPUTED[1]),
    Case("tp2", peft=MATRICES, fast=True),
    Case("tp2", peft=LAYERS, heads=(4, 2), tied=True, parallel=RECOMPUTED[0]),
    Case("shard2 tp2", peft=MATRICES),
    Case("rep2 tp2 ep4", peft=LAYERS),
    Case("cp2", peft=LAYERS, data=TOKENS_8, heads=(2, 2), fast=True),
    Case("pp2 tp2", peft=MATRICES, schedule="zero_bubble_v"),
    *(Case("pp2", peft=each, schedule="zero_bubble_v", fast=True) for each in (LAYERS, LAST_LAYER)),
    Case("pp2", peft=LAYERS, schedule="zero_bubble", parallel=RECOMPUTED[1]),
    Case("pp2 shard2", peft=MATRICES, schedule="zero_bubble_v"),
    Case("pp2 rep2 ep2", peft=LAYERS),
    Case("pp2 shard2 ep2", peft=WITH_NORMS, schedule="dual_pipe_v", accumulated=2),
]


def parameters(cases: Iterable[Case]) -> list[Any]:
    """Return what pytest is to run of each case: its ranks, and whether only with the many meshes."""
    marks = {True: (), False: (pytest.mark.meshes,)}
    return [
        pytest.param(case, id=str(case), marks=[pytest.mark.ranks(case.num_ranks), *marks[case.fast]]) for case in cases
    ]
