"""Steps of one Qwen3-MoE on the same ranks, spread over them in several ways, with and without sums of gradients.

The peer is a whole copy on each rank, `ep1`. Every contender trains equal weights on equal tokens; a step is all
microbatches forward and backward, the sums of gradients, and AdamW. The learning rate is 0, so weights and losses stay
equal, also where nothing is summed. Experts take turns (`BalanceConfig(forced=True)`), so every rank gets as many
tokens.

*Exposed* is by what share of itself a step is longer than the same step without sums, in which AdamW takes zeros where
FSDP2 leaves no gradients. A contender with and without sums is one object: they share weights, gradients and states.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from lightning_d9d import GradSyncConfig, MeshConfig
from lightning_d9d.mesh import MeshDomains
from lightning_d9d.mesh.collectives import all_gather_object
from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM
from lightning_d9d.models.qwen3_moe.costs import model_costs
from lightning_d9d.models.qwen3_moe.plan import parallelize_qwen3_moe
from lightning_d9d.modules import BalanceConfig
from lightning_d9d.optim import parameter_groups
from lightning_d9d.parallel import ParallelConfig
from lightning_d9d.parallel.data import FullySharded
from lightning_d9d.parallel.plan import fully_sharded
from lightning_d9d.pipeline.executor import Cut, Executor
from lightning_d9d.pipeline.totals import BatchTotals
from lightning_d9d.schedule import resolve_schedule
from lightning_d9d.strategy.data_parallel import DataParallelStages
from lightning_d9d.strategy.pipeline import Pipeline
from lightning_d9d.strategy.train_step import cast_gradients
from tests.benchmarks.frame import Case, Contender
from tests.benchmarks.pipeline import Hooks, fill_by_name
from tests.benchmarks.pipeline_probe import host_syncs

PEER = "ep1"
WITHOUT = ", no sums"
MOST_EXPOSED = 0.10
LEAST_OF_PEER = 0.70
"""Tokens/s of experts over all ranks, of those of whole copies."""
MEMORY_SHARE = 0.75
"""Of a GPU, that all contenders take together; the rest is for the allocator, nccl and cuBLAS."""


def meshes(num_ranks: int) -> dict[str, MeshConfig]:
    """The degrees of each contender."""
    copies = {"data_parallel_replicate": num_ranks}
    shards = {"data_parallel_shard": num_ranks}
    degrees = {PEER: copies, "ep": copies | {"expert_parallel": num_ranks}}
    degrees |= {"fsdp": shards, "fsdp+ep": shards | {"expert_parallel": num_ranks}}
    if num_ranks >= 4:
        degrees["hsdp"] = {"data_parallel_replicate": 2, "data_parallel_shard": num_ranks // 2}
    return {name: MeshConfig(**each) for name, each in degrees.items()}


def cases(device_type: str, quick: bool) -> list[Case]:
    """One, on all GPUs up to 8 (a power of two) or on two processes."""
    if quick:
        return [case(QUICK, judges=False, warmup_steps=2, block_steps=1, repeats=2)]
    if device_type == "cpu":
        config = replace(Qwen3MoeConfig.preset("tiny"), vocab_size=1024)
        work = Work(config=config, dtype=torch.float32, num_rows=4, sequence_length=128)
        return [case(work, judges=False, warmup_steps=2, block_steps=1, repeats=12)]
    num_ranks = next(n for n in (8, 4, 2) if n <= max(2, torch.cuda.device_count()))
    smallest = min(torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count()))
    return [case(fitting(num_ranks, smallest), judges=True, warmup_steps=3, block_steps=2, repeats=10)]


def case(work: Work, judges: bool, **rounds: Any) -> Case:
    """Each way with and without sums."""
    names = list(meshes(work.num_ranks))
    exposed = 1 / (1 - MOST_EXPOSED) if judges else None
    judged = names[-1] if "hsdp" in names else "fsdp"
    return Case(
        name=f"{work.num_ranks} ranks",
        contenders={
            name + suffix: partial(Steps, work, name, sums=not suffix) for name in names for suffix in ("", WITHOUT)
        },
        peer=PEER,
        limits={"ep": 1 / LEAST_OF_PEER} if judges else {},
        pairs={name: (name + WITHOUT, exposed if name == judged else None) for name in names},
        afterwards=partial(_accounts, work),
        num_processes=work.num_ranks,
        conditions=work.conditions(),
        **rounds,
    )


@dataclass(frozen=True, kw_only=True)
class Work:
    """What every contender trains. Rows are one rank's."""

    config: Qwen3MoeConfig
    dtype: torch.dtype
    num_rows: int
    sequence_length: int
    num_microbatches: int = 1
    num_ranks: int = 2

    def stage(self, mesh: MeshDomains, device: torch.device) -> Qwen3MoeForCausalLM:
        """The network as this rank has it. Its values follow from its parameters' names."""
        with torch.device("meta"):
            stage = Qwen3MoeForCausalLM(self.config, balance=BalanceConfig(forced=True)).to(self.dtype)
        parallelize_qwen3_moe(stage, mesh, ParallelConfig())
        stage.to_empty(device=device)
        for buffer in stage.buffers():
            buffer.zero_()
        fill_by_name(stage, device)
        return stage

    def microbatches(self, rank: int, device: torch.device) -> list[dict[str, Tensor]]:
        """This rank's."""
        generator = torch.Generator().manual_seed(rank)
        shape = self.num_rows, self.sequence_length + 1
        tokens = torch.randint(self.config.vocab_size, shape, generator=generator).to(device)
        parts = tokens.split(self.num_rows // self.num_microbatches)
        return [{"input_ids": part[:, :-1].contiguous(), "labels": part[:, 1:].contiguous()} for part in parts]

    @property
    def num_tokens(self) -> int:
        """Of a rank, in a step."""
        return self.num_rows * self.sequence_length

    @property
    def flops(self) -> int:
        """Of a rank, in a step: forward and backward, by the configuration's own figure."""
        return self.num_tokens * self.config.flops_per_token(self.sequence_length)

    @property
    def is_kept(self) -> bool:
        """Whether fully sharded parameters are gathered once a step, not for each forward and backward."""
        return self.num_microbatches > 1

    def conditions(self) -> dict[str, Any]:
        """For the report."""
        return {
            "parameters": self.config.num_parameters,
            "layers": self.config.num_hidden_layers,
            "hidden size": self.config.hidden_size,
            "experts": f"{self.config.num_experts_per_tok} of {self.config.num_experts}, evenly loaded",
            "vocabulary": self.config.vocab_size,
            "batch": f"{self.num_rows} x {self.sequence_length} tokens a rank in {self.num_microbatches} microbatches",
            "dtype": str(self.dtype).removeprefix("torch."),
            "sums": "float32",
            "TFLOP a rank and step": round(self.flops / 1e12, 3),
        }


QUICK = Work(
    config=replace(Qwen3MoeConfig.preset("tiny"), num_hidden_layers=2, hidden_size=32, head_dim=8),
    dtype=torch.float32,
    num_rows=2,
    sequence_length=8,
)


def fitting(num_ranks: int, memory_bytes: int) -> Work:
    """As many layers of `30b-a3b` as fit on GPUs of this size, and 8192 ids: the head computes as much as a third of
    a layer."""
    whole = replace(Qwen3MoeConfig.preset("30b-a3b"), vocab_size=8192)

    def with_layers(num_layers: int) -> Work:
        config = replace(whole, num_hidden_layers=num_layers)
        return Work(config=config, dtype=torch.bfloat16, num_rows=4, sequence_length=4096, num_ranks=num_ranks)

    layers = range(1, whole.num_hidden_layers + 1)
    return with_layers(max(n for n in layers if n == 1 or needed_bytes(with_layers(n)) <= MEMORY_SHARE * memory_bytes))


def needed_bytes(work: Work) -> int:
    """Of all contenders together: what each holds between steps, and what the largest adds in one.

    That is the activations of its rows, without sums the whole gradients in float32, and those that AdamW takes.
    """
    idle = sum(account(work, mesh).held_bytes for mesh in meshes(work.num_ranks).values())
    costs = model_costs(work.config, work.sequence_length, work.dtype.itemsize)
    activations = sum(each.activation_bytes for each in (costs.before, *costs.layers, costs.after))
    gradients = work.config.num_parameters * (4 + work.dtype.itemsize)
    return idle + gradients + int(work.num_rows // work.num_microbatches * activations)


@dataclass(frozen=True, kw_only=True)
class Account:
    """From sizes and degrees alone: bytes that a rank holds, and that it sends in a step."""

    weights: int
    gradients: int
    moments: int
    all_gather: float
    reduce_scatter: float
    all_reduce: float
    all_to_all: float

    @property
    def held_bytes(self) -> int:
        """Between backward and step."""
        return self.weights + self.gradients + self.moments


SENT = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


def account(work: Work, mesh: MeshConfig) -> Account:
    """Of n ranks in a ring each sends (n - 1)/n of the whole to gather or to scatter it, and twice that to all-reduce.

    Rows go to the experts and back, and their gradients the same way; their weights, float32, go there, and gradients
    of them back. Before that every rank tells every other, in int64, the numbers of its rows and one more.
    """
    config, width = work.config, work.dtype.itemsize
    wide = max(4, width)
    of_experts = mesh.expert_weights()
    layers = config.num_sparse_layers
    experts = layers * config.num_experts * 3 * config.hidden_size * config.moe_intermediate_size
    # (elements of the whole that ranks share, ranks that share it, copies of it)
    parts = (
        (config.num_parameters - experts, mesh.data_parallel_shard, mesh.data_parallel_replicate),
        (experts // mesh.expert_parallel, of_experts["ep_fsdp"], of_experts["ep_dp_replicate"]),
    )
    held = [whole // shards for whole, shards, _ in parts]
    shared = sum(whole * _sent(shards) for whole, shards, _ in parts)
    copied = sum(each * 2 * _sent(copies) for each, (_, _, copies) in zip(held, parts, strict=True))
    # Gradients are as narrow as weights where they are neither summed nor accumulated.
    adds_up = work.num_microbatches > 1
    widths = [wide if adds_up or shards > 1 or copies > 1 else width for _, shards, copies in parts]
    rows = layers * work.num_tokens * config.num_experts_per_tok
    row_bytes = 4 * config.hidden_size * width + 2 * wide
    counts = layers * work.num_microbatches * (config.num_experts + 1) * 8
    return Account(
        weights=width * sum(held),
        gradients=sum(each * width for each, width in zip(held, widths, strict=True)),
        moments=2 * width * sum(held),
        all_gather=width * shared * (1 if work.is_kept else 2),
        reduce_scatter=wide * shared,
        all_reduce=wide * copied,
        all_to_all=rows * row_bytes * _sent(mesh.expert_parallel) + counts * (mesh.expert_parallel - 1),
    )


def _sent(num_ranks: int) -> float:
    return (num_ranks - 1) / num_ranks


class Trained:
    """The network spread in one way, with its optimizer. Collective, as are its methods."""

    def __init__(self, work: Work, name: str, device: torch.device) -> None:
        self.device = device
        self.allocated_before = _allocated(device)
        self.mesh = MeshDomains.build(meshes(work.num_ranks)[name], device.type)
        self.stage = work.stage(self.mesh, device)
        self.parameters = list(self.stage.parameters())
        self.optimizer = AdamW(parameter_groups(self.stage), lr=0.0, fused=device.type == "cuda")
        self.data_parallel = DataParallelStages.build(
            self.parameters,
            {0: self.stage},
            {},
            self.mesh,
            GradSyncConfig(),
            at_least=torch.float32,
            accumulates=work.num_microbatches > 1,
            sharded={0: FullySharded(self.stage, keeps=work.is_kept, reduces_each=False)}
            if fully_sharded(self.stage)
            else {},
        )
        self.executor = Executor({0: self.stage}, 1, Hooks(device), nullcontext)
        self.program = Pipeline(resolve_schedule("1f1b"), self.mesh, device).program(work.num_microbatches)
        microbatches = work.microbatches(self.mesh.dp_rank, device)
        self.cut = Cut(microbatches, [len(each["labels"]) for each in microbatches])
        self.num_tokens = work.num_tokens
        self.factor = 1 / (work.num_tokens * work.num_ranks)
        self.totals = BatchTotals()
        self.held_bytes = 0
        """Between backward and step, beyond what there was before; of the last step."""

    @functools.cached_property
    def zeros(self) -> dict[nn.Parameter, Tensor]:
        """Gradients for AdamW where there is none."""
        absent = [parameter for parameter in self.parameters if parameter.grad is None]
        return {each: torch.zeros_like(each, dtype=torch.promote_types(each.dtype, torch.float32)) for each in absent}

    def step(self, sums: bool) -> None:
        """One step; it leaves gradients."""
        self._begin(sums)
        self.totals = self.executor.train(self.program, self.cut, lambda totals: self.factor, self.data_parallel)
        self.data_parallel.finish()
        self.held_bytes = _allocated(self.device) - self.allocated_before
        if not sums:
            for parameter, gradient in self.zeros.items():
                parameter.grad = gradient
        cast_gradients(self.parameters)
        self.optimizer.step()

    def forget_gradients(self) -> None:
        """Those that FSDP2 has not reduced, too."""
        self._begin(sums=False)

    def _begin(self, sums: bool) -> None:
        for parameter in self.parameters:
            parameter.grad = None
        self.data_parallel.begin(is_first=True, reduces=sums, splits=False)


@functools.cache
def _trained(work: Work, name: str, device: torch.device) -> Trained:
    return Trained(work, name, device)


class Steps:
    """A contender: steps of a network with or without sums."""

    def __init__(self, work: Work, name: str, device: torch.device, *, sums: bool) -> None:
        self.trained = _trained(work, name, device)
        self.sums = sums
        self.memory: dict[str, int] | None = None
        """Of the warm-up."""

    def run(self, steps: int) -> None:
        trained = self.trained
        for _ in range(steps):
            trained.step(self.sums)
        if self.memory is None and trained.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(trained.device) - trained.allocated_before
            self.memory = {"held_bytes": trained.held_bytes, "peak_bytes": peak}
        trained.forget_gradients()

    def loss(self) -> float:
        """The mean over this rank's tokens."""
        assert self.trained.totals.loss is not None
        return self.trained.totals.loss[0].item() / self.trained.num_tokens

    def close(self) -> None:
        self.trained.executor.close()
        _trained.cache_clear()


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _accounts(work: Work, contenders: Mapping[str, Contender], device: torch.device) -> dict[str, dict[str, Any]]:
    """Bytes sent and held by arithmetic, and on CUDA what each rank held, and host syncs. Collective."""
    measured: dict[str, dict[str, Any]] = {}
    for name, mesh in meshes(work.num_ranks).items():
        contender: Any = contenders[name]
        by_sizes = account(work, mesh)
        measured[name] = {
            "flops": work.flops,
            "tokens": work.num_tokens,
            "sent_bytes": {kind: getattr(by_sizes, kind) for kind in SENT},
            "account_bytes": {kind: getattr(by_sizes, kind) for kind in ("weights", "gradients", "moments")},
        }
        if device.type == "cuda":
            measured[name]["memory"] = all_gather_object(contender.memory)
            measured[name]["host_syncs"] = all_gather_object(host_syncs(contender))
    return measured


def table(result: Mapping[str, Any], device_type: str) -> str:
    """What a person reads, in Markdown. Times and memory only of GPUs; of several ranks those of the worst."""
    contenders = result["contenders"]
    on_cuda = device_type == "cuda"
    head = ["", f"tokens/s / {result['peer']}", "interval", "", "exposed", "interval", ""]
    head += [f"{kind.replace('_', '-')} MB" for kind in SENT]
    if on_cuda:
        head += [
            "ms/step",
            "tokens/s a GPU",
            "TFLOP/s a GPU",
            "held GiB",
            "by sizes",
            "error",
            "peak GiB",
            "host syncs",
        ]
    rows = [head, ["---"] * len(head)]
    for name, values in contenders.items():
        if "pair" not in values:
            continue
        row = [name, "1", "", ""]
        if "ratio" in values:
            ratio = values["ratio"]
            low, median, high = (f"{1 / ratio[key]:.3f}" for key in ("high", "median", "low"))
            row = [name, median, f"{low} .. {high}", ratio.get("verdict", "")]
        low, median, high = (f"{1 - 1 / values['pair'][key]:.1%}" for key in ("low", "median", "high"))
        row += [median, f"{low} .. {high}", values["pair"].get("verdict", "")]
        row += [f"{values['sent_bytes'][kind] / 1e6:.1f}" for kind in SENT]
        if on_cuda:
            seconds, of_sizes = values["median_seconds"], sum(values["account_bytes"].values())
            held, peak = (max(rank[key] for rank in values["memory"]) for key in ("held_bytes", "peak_bytes"))
            row += [f"{1e3 * seconds:.1f}", f"{values['tokens'] / seconds:.0f}"]
            row += [f"{values['flops'] / seconds / 1e12:.0f}", f"{held / 2**30:.2f}", f"{of_sizes / 2**30:.2f}"]
            row += [f"{held / of_sizes - 1:+.1%}", f"{peak / 2**30:.2f}", str(sum(map(len, values["host_syncs"])))]
        rows.append(row)
    conditions = ", ".join(f"{key} {value}" for key, value in result["conditions"].items())
    rounds = f"{result['repeats']} rounds of {result['block_steps']} steps"
    title = f"\n{result['benchmark']} on {result['case']}, {rounds}"
    return "\n".join([title, f"  {conditions}", "", *(f"| {' | '.join(row)} |" for row in rows)])


def write(result: Mapping[str, Any], directory: Path, device_type: str) -> None:
    """The table as a file."""
    (directory / "parallel.md").write_text(table(result, device_type) + "\n")
