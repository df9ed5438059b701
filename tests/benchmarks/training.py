"""What `parallel`, `tensor` and `context` have in common: steps of one Qwen3-MoE, spread over ranks in several ways.

A step is all microbatches forward and backward, the sums of gradients, and AdamW. Contenders train equal weights, in
each step on as many tokens. The learning rate is 0, so weights and losses stay equal, also where nothing is summed.
Experts take turns (`BalanceConfig(forced=True)`), so every rank gets as many tokens.

Beside each time stands an account of it: operations, bytes that are held and bytes that are sent, from sizes and
degrees alone.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from lightning_d9d import GradSyncConfig, MeshConfig
from lightning_d9d.memory.rank import RankModel
from lightning_d9d.memory.spread import weights_of
from lightning_d9d.memory.traffic import by_kind, traffic
from lightning_d9d.mesh import MeshDomains
from lightning_d9d.mesh.collectives import all_gather_object
from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM
from lightning_d9d.models.qwen3_moe.costs import model_costs
from lightning_d9d.models.qwen3_moe.plan import parallelize_qwen3_moe
from lightning_d9d.modules import BalanceConfig
from lightning_d9d.optim import parameter_groups
from lightning_d9d.parallel import ParallelConfig, TokenShard
from lightning_d9d.parallel.data import FullySharded
from lightning_d9d.parallel.fsdp import fully_sharded
from lightning_d9d.parallel.tokens import own_chunks
from lightning_d9d.pipeline.executor import Executor, LossScale, SplitBatch
from lightning_d9d.pipeline.totals import BatchTotals
from lightning_d9d.schedule import OneForwardOneBackward, resolve_schedule
from lightning_d9d.strategy.data_parallel import DataParallelStages
from lightning_d9d.strategy.pipeline import Pipeline
from lightning_d9d.strategy.train_step import cast_gradients
from tests.benchmarks.frame import Contender
from tests.benchmarks.pipeline import Hooks, fill_by_name
from tests.benchmarks.pipeline_probe import host_syncs

MEMORY_SHARE = 0.75
"""The share of a GPU's memory that all contenders take together. The rest is for the allocator, nccl and cuBLAS."""


@dataclass(frozen=True)
class Way:
    """How a contender is spread."""

    mesh: MeshConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    @property
    def num_parts(self) -> int:
        """The number of parts of each sequence, by context parallelism."""
        return self.mesh.context_parallel_shard * self.mesh.context_parallel_replicate


@dataclass(frozen=True, kw_only=True)
class Work:
    """What every contender trains. Rows and their length are those of one rank that has them alone.

    Ranks that share tokens have as many as if they did not: those of tensor parallelism get the rows of all of them,
    those of context parallelism rows that are as much longer.
    """

    config: Qwen3MoeConfig
    dtype: torch.dtype
    num_rows: int
    sequence_length: int
    num_microbatches: int = 1
    num_ranks: int = 2

    def stage(self, way: Way, mesh: MeshDomains, device: torch.device) -> Qwen3MoeForCausalLM:
        """The network as this rank has it. Its values follow from its parameters' names."""
        with torch.device("meta"):
            stage = Qwen3MoeForCausalLM(self.config, balance=BalanceConfig(forced=True)).to(self.dtype)
        parallelize_qwen3_moe(stage, mesh, way.parallel)
        stage.to_empty(device=device)
        for buffer in stage.buffers():
            buffer.zero_()
        fill_by_name(stage, device)
        return stage

    def microbatches(self, mesh: MeshDomains, device: torch.device) -> list[dict[str, Tensor]]:
        """Return this rank's microbatches. Each next token is the same in all ways, but sequences are longer in
        some."""
        num_slices, num_parts = mesh.sizes["tp"], mesh.sizes["cp"]
        first = mesh.dp_rank * num_slices * num_parts
        rows = [
            torch.cat([self._rows(first + index * num_parts + part) for part in range(num_parts)], dim=2)
            for index in range(num_slices)
        ]
        size = self.num_rows // self.num_microbatches * num_slices
        dims, tokens = {"input_ids": 1, "labels": 1}, TokenShard.of(mesh)
        batches = (zip(dims, part.to(device), strict=True) for part in torch.cat(rows, dim=1).split(size, dim=1))
        return [
            {name: tensor.contiguous() for name, tensor in own_chunks(dict(batch), dims, tokens).items()}
            for batch in batches
        ]

    def _rows(self, seed: int) -> Tensor:
        """Ids and labels, `[2, rows, sequence length]`."""
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(self.config.vocab_size, (self.num_rows, self.sequence_length + 1), generator=generator)
        return torch.stack([tokens[:, :-1], tokens[:, 1:]])

    @property
    def num_tokens(self) -> int:
        """The tokens of a rank in a step."""
        return self.num_rows * self.sequence_length

    def flops(self, way: Way) -> int:
        """Return the operations of a rank in a step, forward and backward, by the configuration's own figure."""
        return self.num_tokens * self.config.flops_per_token(self.sequence_length * way.num_parts)

    @property
    def is_kept(self) -> bool:
        """Whether fully sharded parameters are gathered once a step, not for each forward and backward."""
        return self.num_microbatches > 1

    def conditions(self) -> dict[str, Any]:
        """Return the conditions for the report."""
        return {
            "parameters": self.config.num_parameters,
            "layers": self.config.num_hidden_layers,
            "hidden size": self.config.hidden_size,
            "experts": f"{self.config.num_experts_per_tok} of {self.config.num_experts}, evenly loaded",
            "vocabulary": self.config.vocab_size,
            "batch": f"{self.num_rows} x {self.sequence_length} tokens a rank in {self.num_microbatches} microbatches",
            "dtype": str(self.dtype).removeprefix("torch."),
            "sums": "float32",
        }


QUICK = Work(
    config=replace(Qwen3MoeConfig.preset("tiny"), num_hidden_layers=2, hidden_size=32, head_dim=8),
    dtype=torch.float32,
    num_rows=2,
    sequence_length=8,
)
ON_CPU = Work(
    config=replace(Qwen3MoeConfig.preset("tiny"), vocab_size=1024),
    dtype=torch.float32,
    num_rows=4,
    sequence_length=128,
)


def num_gpus() -> int:
    """A power of two, 8 at most, of those that there are; at least 2."""
    return next(n for n in (8, 4, 2) if n <= max(2, torch.cuda.device_count()))


def fitting(work: Work, ways: Iterable[Way]) -> Work:
    """The same with as many layers as let all contenders fit on the GPUs that there are."""
    smallest = min(torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count()))
    return fitting_into(smallest, work, ways)


def fitting_into(memory_bytes: int, work: Work, ways: Iterable[Way]) -> Work:
    """The same with as many layers as fit on GPUs of this size; at least 1."""
    ways, numbers = list(ways), range(1, work.config.num_hidden_layers + 1)
    each = [replace(work, config=replace(work.config, num_hidden_layers=number)) for number in numbers]
    fitting = bisect_right(each, MEMORY_SHARE * memory_bytes, key=lambda some: needed_bytes(some, ways))
    return each[max(fitting, 1) - 1]


def needed_bytes(work: Work, ways: Iterable[Way]) -> int:
    """Return the bytes of all contenders together: what each holds between steps, and what the largest adds in one.

    A step adds the activations of the rows, the whole gradients in float32, and those that AdamW takes.
    """
    accounts = [account(work, way) for way in ways]
    gradients = work.config.num_parameters * (4 + work.dtype.itemsize)
    return sum(each.held_bytes for each in accounts) + gradients + max(each.activations for each in accounts)


@dataclass(frozen=True, kw_only=True)
class Account:
    """The bytes that a rank computes, sends and holds in a step, derived from sizes and degrees alone."""

    flops: int
    tokens: int
    weights: int
    gradients: int
    lasting_gradients: int
    """The part of the gradients that buckets keep from step to step."""
    moments: int
    activations: int
    """The activations between forward and backward."""
    all_gather: float = 0
    reduce_scatter: float = 0
    all_reduce: float = 0
    all_to_all: float = 0
    point_to_point: float = 0

    @property
    def held_bytes(self) -> int:
        """The bytes that are held between backward and step."""
        return self.weights + self.gradients + self.moments

    @property
    def peak_bytes(self) -> int:
        """The bytes at the peak: when the backward begins, or when it is done."""
        fresh = self.gradients - self.lasting_gradients
        return self.weights + self.moments + self.lasting_gradients + max(fresh, self.activations)


SENT = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "point_to_point")


def account(work: Work, way: Way) -> Account:
    """What is held, by sizes and degrees; `lightning_d9d.memory.traffic` says what is sent."""
    config, mesh, width = work.config, way.mesh, work.dtype.itemsize
    wide = max(4, width)
    hidden, tp = config.hidden_size, mesh.tensor_parallel
    of_experts = mesh.expert_weights()
    num_sparse, num_layers = config.num_sparse_layers, config.num_hidden_layers
    # Elements
    experts = num_sparse * config.num_experts * 3 * hidden * config.moe_intermediate_size
    keys = num_layers * 2 * hidden * config.num_key_value_heads * config.head_dim
    cut = num_layers * 2 * hidden * config.num_attention_heads * config.head_dim
    cut += (num_layers - num_sparse) * 3 * hidden * config.intermediate_size
    cut += config.vocab_size * hidden * (1 if config.tie_word_embeddings else 2)
    key_parts = min(tp, config.num_key_value_heads)
    shards = mesh.data_parallel_shard * mesh.context_parallel_shard
    copies = mesh.data_parallel_replicate * mesh.context_parallel_replicate
    # (elements of the whole that ranks share, ranks that share it, copies of it)
    parts = (
        (config.num_parameters - experts - keys - cut, shards, copies * tp),
        (keys // key_parts, shards, copies * tp // key_parts),
        (cut // tp, shards, copies),
        (experts // mesh.expert_parallel, of_experts["ep_fsdp"], of_experts["ep_dp_replicate"]),
    )
    held = [whole // each for whole, each, _ in parts]
    # Gradients are as narrow as weights where they are neither summed nor accumulated.
    adds_up = work.num_microbatches > 1
    widths = [wide if adds_up or each > 1 or num > 1 else width for _, each, num in parts]
    in_buckets = [adds_up or num > 1 if each == 1 else False for _, each, num in parts]
    gradients = [each * width for each, width in zip(held, widths, strict=True)]
    return Account(
        flops=work.flops(way),
        tokens=work.num_tokens,
        weights=width * sum(held),
        gradients=sum(gradients),
        lasting_gradients=sum(each for each, lasts in zip(gradients, in_buckets, strict=True) if lasts),
        moments=2 * width * sum(held),
        activations=_activations(work, way),
        **sent(work, way),
    )


def sent(work: Work, way: Way) -> dict[str, float]:
    """Bytes by kind of collective, by the package's own arithmetic. A step here sums no loss and no norm."""
    with torch.device("meta"):
        weights = weights_of(Qwen3MoeForCausalLM(work.config).to(work.dtype))
    length = work.sequence_length * way.num_parts
    model = RankModel(
        weights=weights,
        costs=model_costs(work.config, length, work.dtype.itemsize),
        tokens=length,
        mesh=way.mesh,
        schedule=OneForwardOneBackward(),
        layers_of_stages=(range(work.config.num_hidden_layers),),
        rows=work.num_rows // work.num_microbatches * way.mesh.tensor_parallel,
        num_microbatches=work.num_microbatches,
        parallel=way.parallel,
    )
    return dict.fromkeys(SENT, 0.0) | by_kind([each for each in traffic(model, 0) if each.what != "numbers"])


def _activations(work: Work, way: Way) -> int:
    """What modules keep, by `model_costs`; with tensor parallelism the tokens of all slices where they are gathered."""
    costs = model_costs(work.config, work.sequence_length, work.dtype.itemsize)
    row = sum(each.activation_bytes for each in (costs.before, *costs.layers, costs.after))
    num_gathered = 2 * work.config.num_hidden_layers - work.config.num_sparse_layers + 1
    more = num_gathered * (way.mesh.tensor_parallel - 1) * work.config.hidden_size * work.dtype.itemsize
    return int(work.num_rows // work.num_microbatches * (row + more * work.sequence_length))


class Trained:
    """The network spread in one way, with its optimizer. Collective, as are its methods."""

    def __init__(self, work: Work, way: Way, device: torch.device) -> None:
        self.device = device
        self.allocated_before = allocated(device)
        self.mesh = MeshDomains.build(way.mesh, device.type)
        self.stage = work.stage(way, self.mesh, device)
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
        microbatches = work.microbatches(self.mesh, device)
        self.cut = SplitBatch(microbatches, [len(each["labels"]) for each in microbatches])
        self.num_tokens = work.num_tokens * self.mesh.sizes["tp"]
        """The number of tokens whose losses this rank has."""
        self.factor = 1 / (work.num_tokens * work.num_ranks)
        self.totals = BatchTotals()
        self.held_bytes = 0
        """The bytes that the last step held between backward and step, beyond those before it."""

    @functools.cached_property
    def zeros(self) -> dict[nn.Parameter, Tensor]:
        """Gradients for AdamW where there is none."""
        absent = [parameter for parameter in self.parameters if parameter.grad is None]
        return {each: torch.zeros_like(each, dtype=torch.promote_types(each.dtype, torch.float32)) for each in absent}

    def step(self, sums: bool) -> None:
        """One step; it leaves gradients."""
        self._begin(sums)
        self.totals = self.executor.train(self.program, self.cut, LossScale(of_sum=self.factor), self.data_parallel)
        self.data_parallel.finish()
        self.held_bytes = allocated(self.device) - self.allocated_before
        if not sums:
            for parameter, gradient in self.zeros.items():
                parameter.grad = gradient
        cast_gradients(self.parameters, self.optimizer)
        self.optimizer.step()

    def forget_gradients(self) -> None:
        """Drop all gradients, also those that FSDP2 has not reduced."""
        self._begin(sums=False)

    def _begin(self, sums: bool) -> None:
        for parameter in self.parameters:
            parameter.grad = None
        self.data_parallel.begin(is_first=True, reduces=sums, splits_backward=False)


@functools.cache
def _trained(work: Work, way: Way, device: torch.device) -> Trained:
    return Trained(work, way, device)


class Steps:
    """A contender: steps of a network with or without sums."""

    def __init__(self, work: Work, way: Way, device: torch.device, *, sums: bool = True) -> None:
        self.trained = _trained(work, way, device)
        self.sums = sums
        self.memory: dict[str, int] | None = None
        """The memory of the warm-up."""

    def run(self, steps: int) -> None:
        trained = self.trained
        for _ in range(steps):
            trained.step(self.sums)
        if self.memory is None and trained.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(trained.device) - trained.allocated_before
            self.memory = {"held_bytes": trained.held_bytes, "peak_bytes": peak}
        trained.forget_gradients()

    def loss(self) -> float:
        """The mean over the tokens whose losses this rank has."""
        assert self.trained.totals.loss is not None
        return self.trained.totals.loss[0].item() / self.trained.num_tokens

    def close(self) -> None:
        self.trained.executor.close()
        _trained.cache_clear()


def allocated(device: torch.device) -> int:
    """Bytes, by torch; 0 on a CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def accounts(
    by_name: Mapping[str, Account], contenders: Mapping[str, Contender], device: torch.device
) -> dict[str, dict[str, Any]]:
    """What is to stand beside the times, and on CUDA what each rank held, and host syncs. Collective.

    Args:
        by_name: Of the contenders that get a row in the table.
        contenders: With an attribute `memory`, as `Steps` has it.
        device: This rank's.
    """
    measured: dict[str, dict[str, Any]] = {}
    for name, by_sizes in by_name.items():
        contender: Any = contenders[name]
        measured[name] = {
            "flops": by_sizes.flops,
            "tokens": by_sizes.tokens,
            "sent_bytes": {kind: getattr(by_sizes, kind) for kind in SENT},
            "account_bytes": {"held": by_sizes.held_bytes, "peak": by_sizes.peak_bytes},
        }
        if device.type == "cuda":
            measured[name]["memory"] = all_gather_object(contender.memory)
            measured[name]["host_syncs"] = all_gather_object(host_syncs(contender))
    return measured


def table(result: Mapping[str, Any], device_type: str) -> str:
    """What a person reads, in Markdown. Times and memory only of GPUs; of several ranks those of the worst."""
    contenders = {name: values for name, values in result["contenders"].items() if "flops" in values}
    peer = contenders[result["peer"]]
    rate = "tokens/s" if all(values["flops"] == peer["flops"] for values in contenders.values()) else "FLOP/s"
    has_pairs = any("pair" in values for values in contenders.values())
    kinds = [kind for kind in SENT if any(values["sent_bytes"][kind] for values in contenders.values())]
    head = ["", f"{rate} / {result['peer']}", "interval", ""]
    head += ["exposed", "interval", ""] if has_pairs else []
    head += [f"{kind.replace('_', '-')} MB" for kind in kinds]
    if device_type == "cuda":
        head += ["ms/step", "tokens/s a GPU", "TFLOP a GPU", "TFLOP/s a GPU"]
        head += [f"{kind} {column}" for kind in ("held", "peak") for column in ("GiB", "by sizes", "error")]
        head += ["host syncs"]
    rows = [head, ["---"] * len(head)]
    for name, values in contenders.items():
        row = [name, "1", "", ""]
        if "ratio" in values:
            ratio, more = values["ratio"], values["flops"] / peer["flops"]
            low, median, high = (f"{more / ratio[key]:.3f}" for key in ("high", "median", "low"))
            row = [name, median, f"{low} .. {high}", ratio.get("verdict", "")]
        if has_pairs:
            low, median, high = (f"{1 - 1 / values['pair'][key]:.1%}" for key in ("low", "median", "high"))
            row += [median, f"{low} .. {high}", values["pair"].get("verdict", "")]
        row += [f"{values['sent_bytes'][kind] / 1e6:.1f}" for kind in kinds]
        if device_type == "cuda":
            seconds = values["median_seconds"]
            row += [f"{1e3 * seconds:.1f}", f"{values['tokens'] / seconds:.0f}"]
            row += [f"{values['flops'] / 1e12:.1f}", f"{values['flops'] / seconds / 1e12:.0f}"]
            for kind, of_sizes in values["account_bytes"].items():
                measured = max(rank[f"{kind}_bytes"] for rank in values["memory"])
                row += [f"{each / 2**30:.2f}" for each in (measured, of_sizes)] + [f"{measured / of_sizes - 1:+.1%}"]
            row += [str(sum(map(len, values["host_syncs"])))]
        rows.append(row)
    conditions = ", ".join(f"{key} {value}" for key, value in result["conditions"].items())
    rounds = f"{result['repeats']} rounds of {result['block_steps']} steps"
    title = f"\n{result['benchmark']}, {result['case']} on {result['num_processes']} ranks, {rounds}"
    return "\n".join([title, f"  {conditions}", "", *(f"| {' | '.join(row)} |" for row in rows)])


def write(result: Mapping[str, Any], directory: Path, device_type: str) -> None:
    """The table as a file."""
    name = f"{result['benchmark']}-{result['case']}".replace(" ", "-")
    (directory / f"{name}.md").write_text(table(result, device_type) + "\n")
