"""Steps of a pipeline against `torch.distributed.pipelining`: the same stages, schedules, microbatches and messages.

All contenders of a case live in the same processes, one a pipeline rank. For each schedule ours and torch's run the
same stage modules; stages of different schedules hold the same values of the same names, so all losses are equal.
`zero_bubble_v+compile` is a schedule whose layers are compiled, beside the same one without. What has no contender of
torch's is held against the first schedule.

A step is all microbatches forward and backward from gradients that are None, without an optimizer. The loss, a sum over
tokens divided by their number, is made inside the last stage.

When the rounds are over `pipeline_probe` measures more.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from packaging.version import Version
from torch import Tensor, nn
from torch.distributed import pipelining

from lightning_d9d import MeshConfig, ParallelConfig, StageInfo, StageInputs, WeightedLoss
from lightning_d9d.errors import ConfigError
from lightning_d9d.mesh import MeshDomains
from lightning_d9d.mesh.sharding import local, local_ranges
from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM
from lightning_d9d.parallel import compile_blocks
from lightning_d9d.pipeline.executor import Executor, LossScale, SplitBatch
from lightning_d9d.pipeline.totals import BatchTotals
from lightning_d9d.schedule import Span, parse, plot, resolve_schedule
from lightning_d9d.strategy.pipeline import Pipeline
from tests.benchmarks import pipeline_probe
from tests.benchmarks.frame import Case
from tests.benchmarks.options import naming

_WHOLE = {
    "1f1b": "Schedule1F1B",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "gpipe": "ScheduleGPipe",
    "looped_bfs": "ScheduleLoopedBFS",
}
_SPLIT = {
    "zero_bubble": "ScheduleInterleavedZeroBubble",
    "zero_bubble_v": "ScheduleZBVZeroBubble",
    "dual_pipe_v": "ScheduleDualPipeV",
}
"""Schedules that split backwards. Before 2.13 torch cannot split a backward through Python's autograd functions, which
our operators have. It keeps only the Python object of a node, which outlives the graph, and asks it for facts that only
the graph knows."""
TORCH = _WHOLE | (_SPLIT if Version(torch.__version__) >= Version("2.13") else {})
"""Our schedules and torch's that run the same program (GPipe's backwards in another order)."""
DEFAULT = ("1f1b", "interleaved_1f1b", *_SPLIT)
COMPILED = "+compile"
"""The end of a schedule's name whose layers are compiled, so their backwards are not split."""
FASTER_THAN_1F1B = ("zero_bubble_v", "dual_pipe_v")
_DEVIATION = 0.02


def cases(
    device_type: str,
    quick: bool,
    schedules: Sequence[str] | None = None,
    microbatches: Sequence[int] | None = None,
) -> list[Case]:
    """One for each number of microbatches, with two contenders for each schedule. The peer is the first schedule."""
    rounds: dict[str, Any]
    if quick:
        work = QUICK
        rounds = dict(warmup_steps=2, block_steps=1, repeats=2)
    elif device_type == "cuda":
        config = replace(
            Qwen3MoeConfig.preset("30b-a3b"), num_hidden_layers=16, num_experts=32, vocab_size=8192
        )  # the head computes as much as a third of a layer
        num_ranks = min(4, torch.cuda.device_count())
        # so long that kernels, not the host that launches them, are what a step waits for
        work = Work(config=config, dtype=torch.bfloat16, sequence_length=8192, num_ranks=num_ranks)
        rounds = dict(warmup_steps=3, block_steps=1, repeats=8)
    else:
        config = replace(Qwen3MoeConfig.preset("tiny"), num_hidden_layers=16)
        work = Work(config=config, dtype=torch.float32, sequence_length=128)
        rounds = dict(warmup_steps=2, block_steps=1, repeats=12)
    return [
        case(replace(work, num_microbatches=n), schedules or DEFAULT, judges=not quick, **rounds)
        for n in microbatches or ((8,) if quick else (16, 32))
    ]


def case(work: Work, schedules: Sequence[str], judges: bool, **rounds: Any) -> Case:
    """Ours of each schedule, and torch's of those that are in `TORCH`."""
    contenders: dict[str, Any] = {}
    for name in schedules:
        with naming(f"--schedules {name}"):
            resolve_schedule(name.removesuffix(COMPILED)).program(work.num_ranks, work.num_microbatches)
        contenders[name] = partial(Ours, work, name)
        if name in TORCH:
            contenders[f"{name}, torch"] = partial(Torchs, work, name)
    against_1f1b = FASTER_THAN_1F1B if judges and schedules[0] == "1f1b" else ()
    return Case(
        name=f"{work.num_microbatches} microbatches",
        contenders=contenders,
        peer=schedules[0],
        limits={name: 1.0 for name in schedules if name in against_1f1b},
        pairs={
            name: (f"{name}, torch", 1.0 if judges else None)
            if name in TORCH
            else (name.removesuffix(COMPILED) if name.endswith(COMPILED) else schedules[0], None)
            for name in schedules
        },
        afterwards=pipeline_probe.measure,
        num_processes=work.num_ranks,
        conditions=work.conditions(),
        **rounds,
    )


@dataclass(frozen=True, kw_only=True)
class Work:
    """What every contender computes."""

    config: Qwen3MoeConfig
    dtype: torch.dtype
    sequence_length: int
    num_ranks: int = 4
    num_microbatches: int = 0

    def stage(self, info: StageInfo, device: torch.device) -> Qwen3MoeForCausalLM:
        """A stage of equally many layers as the others. Its values follow from its parameters' names."""
        per_stage = self.config.num_hidden_layers // info.num_stages
        first = info.index * per_stage
        with torch.device("meta"):
            stage = Qwen3MoeForCausalLM(self.config, replace(info, layers=range(first, first + per_stage)))
        stage.to(self.dtype).to_empty(device=device)
        fill_by_name(stage, device)
        return stage

    def tokens(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Ids and labels `[microbatches, seq]`, of one row a microbatch."""
        generator = torch.Generator().manual_seed(1)
        rows = torch.randint(
            self.config.vocab_size, (self.num_microbatches, self.sequence_length + 1), generator=generator
        )
        return rows[:, :-1].contiguous().to(device), rows[:, 1:].contiguous().to(device)

    @property
    def num_tokens(self) -> int:
        """The number of tokens in a batch."""
        return self.num_microbatches * self.sequence_length

    def conditions(self) -> dict[str, Any]:
        """Return the conditions for the report."""
        return {
            "parameters": self.config.num_parameters,
            "layers": self.config.num_hidden_layers,
            "hidden size": self.config.hidden_size,
            "experts": f"{self.config.num_experts_per_tok} of {self.config.num_experts}",
            "vocabulary": self.config.vocab_size,
            "microbatch": f"1 x {self.sequence_length} tokens",
            "dtype": str(self.dtype).removeprefix("torch."),
        }


QUICK = Work(
    config=replace(Qwen3MoeConfig.preset("tiny"), num_hidden_layers=8, hidden_size=32, head_dim=8),
    dtype=torch.float32,
    sequence_length=8,
)


@functools.cache
def _mesh(num_ranks: int, device_type: str) -> MeshDomains:
    return MeshDomains.build(MeshConfig(pipeline_parallel=num_ranks), device_type)


@functools.cache
def _stages(
    work: Work, placement: tuple[int, ...], rank: int, device: torch.device, compiles: bool = False
) -> dict[int, Qwen3MoeForCausalLM]:
    num_stages = len(placement)
    stages = {i: work.stage(StageInfo(i, num_stages), device) for i in range(num_stages) if placement[i] == rank}
    for stage in stages.values():
        compile_blocks(stage, ParallelConfig(compile=compiles))
    return stages


def _forget() -> None:
    """What contenders share: a mesh, and the stages of this rank for each placement."""
    if _mesh.cache_info().currsize:
        _stages.cache_clear()
        _mesh.cache_clear()


class Ours:
    """`Executor.train` over the program of a schedule."""

    def __init__(self, work: Work, schedule: str, device: torch.device) -> None:
        self.work = work
        self.device = device
        compiles = schedule.endswith(COMPILED)
        self.pipeline = Pipeline(
            resolve_schedule(schedule.removesuffix(COMPILED)), _mesh(work.num_ranks, device.type), device
        )
        self.program = self.pipeline.schedule.program(work.num_ranks, work.num_microbatches)
        self.stages = _stages(work, self.pipeline.placement, self.pipeline.rank, device, compiles)
        self.executor = Executor(
            self.stages, len(self.pipeline.placement), Hooks(device), nullcontext, self.pipeline.messages
        )
        ids, labels = work.tokens(device)
        microbatches = [{"input_ids": i, "labels": y} for i, y in zip(ids.split(1), labels.split(1), strict=True)]
        self.cut = SplitBatch(microbatches, [1] * len(microbatches))
        self.totals = BatchTotals()

    def run(self, steps: int) -> None:
        for _ in range(steps):
            clear_gradients(self.stages)
            self.totals = self.train(self.program.ranks[self.pipeline.rank])

    def train(self, actions: Sequence[Any]) -> BatchTotals:
        """Run this rank's actions, which add to gradients."""
        return self.executor.train(actions, self.cut, LossScale(of_sum=1 / self.work.num_tokens))

    def loss(self) -> float:
        return 0.0 if self.totals.loss is None else self.totals.loss[0].item() / self.work.num_tokens

    def close(self) -> None:
        self.executor.close()
        _forget()


class Hooks:
    """The hooks of `Qwen3MoePretraining`, with known weights."""

    def __init__(self, device: torch.device) -> None:
        self.weight = torch.ones((), device=device)

    def microbatch_inputs(self, microbatch: Mapping[str, Tensor]) -> StageInputs:
        first = {"input_ids": microbatch["input_ids"]}
        return StageInputs(first=first, shared={"labels": microbatch["labels"], "reduction": "sum"})

    def microbatch_loss(self, output: Any, microbatch: Any) -> WeightedLoss:
        return WeightedLoss(output.loss, self.weight)

    def microbatch_metrics(self, output: Any, microbatch: Any) -> dict[str, Any]:
        return {}


class Torchs:
    """`step` of a schedule of `torch.distributed.pipelining`."""

    def __init__(self, work: Work, schedule: str, device: torch.device) -> None:
        self.device = device
        placement = resolve_schedule(schedule).placement(work.num_ranks)
        self.rank = _mesh(work.num_ranks, device.type).coordinates["pp"]
        self.stages = _stages(work, placement, self.rank, device)
        num_stages = len(placement)
        stages = [_Stage(TensorsOnly(stage), i, num_stages, device) for i, stage in self.stages.items()]
        build = getattr(pipelining, TORCH[schedule])
        self.schedule = build(
            stages[0] if issubclass(build, pipelining.schedules.PipelineScheduleSingle) else stages,
            work.num_microbatches,
            loss_fn=lambda loss, _labels: loss / work.num_tokens,
            scale_grads=False,
        )
        ids, self.labels = work.tokens(device)
        self.inputs = (ids,) if 0 in self.stages else ()
        self.keywords = {"labels": self.labels} if num_stages - 1 in self.stages else {}
        self.losses: list[Tensor] = []

    def run(self, steps: int) -> None:
        for _ in range(steps):
            clear_gradients(self.stages)
            losses: list[Tensor] = []
            self.schedule.step(*self.inputs, target=self.labels, losses=losses, return_outputs=False, **self.keywords)
            self.losses = [loss.detach() for loss in losses]

    def loss(self) -> float:
        return sum(loss.item() for loss in self.losses)

    def close(self) -> None:
        _forget()


class _Stage(pipelining.PipelineStage):
    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Return no messages, because ranks are connected. Torch 2.11 has one to the own rank at the turn of a V, which
        gloo cannot send."""
        return []


class TensorsOnly(nn.Module):
    """A stage as torch's pipelines call it: a tensor in and a tensor out, from the last one the loss."""

    def __init__(self, stage: Qwen3MoeForCausalLM) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        info = self.stage.stage
        inputs = {"input_ids" if info.is_first else "hidden_states": x}
        output = self.stage(**inputs, labels=labels, reduction="sum")
        return output.loss if info.is_last else output["hidden_states"]


def table(result: Mapping[str, Any], device_type: str) -> str:
    """What a person reads, in Markdown. Times and memory only of GPUs; of several ranks those of the worst."""
    contenders = result["contenders"]
    head = ["", "ours / torch", "interval", "", f"/ {result['peer']}", "interval", "bubble", "simulated"]
    head += ["host us/action", "messages", "torch"]
    on_cuda = device_type == "cuda"
    if on_cuda:
        head += ["ms/step", "torch", "peak GiB", "predicted", "error", "torch", "host syncs", "torch"]
    rows = [head, ["---"] * len(head)]
    for name, values in contenders.items():
        if "pair" not in values:
            continue
        pair, theirs = values["pair"], contenders[values["pair"]["peer"]]
        row = [name, f"{pair['median']:.4f}", _interval(pair), pair.get("verdict", "")]
        row += [f"{values['ratio']['median']:.4f}", _interval(values["ratio"])] if "ratio" in values else ["1", ""]
        row += [f"{values['bubble']:.1%}", f"{values['simulated_bubble']:.1%}"]
        row += [f"{1e6 * max(values['host_seconds_per_action']):.1f}"]
        row += [str(sum(each["messages"])) for each in (values, theirs)]
        if on_cuda:
            row += [f"{1e3 * each['median_seconds']:.1f}" for each in (values, theirs)]
            peaks, predicted = values["memory_bytes"], values["predicted_memory_bytes"]
            errors = [guess / peak - 1 for guess, peak in zip(predicted, peaks, strict=True)]
            row += [f"{max(peaks) / 2**30:.2f}", f"{max(predicted) / 2**30:.2f}", f"{max(errors, key=abs):+.1%}"]
            row += [f"{max(theirs['memory_bytes']) / 2**30:.2f}"]
            row += [str(sum(map(len, each["host_syncs"]))) for each in (values, theirs)]
        rows.append(row)
    conditions = ", ".join(f"{key} {value}" for key, value in result["conditions"].items())
    title = f"\n{result['benchmark']}, {result['case']} on {result['num_processes']} ranks, {result['repeats']} rounds"
    return "\n".join([title, f"  {conditions}", "", *(f"| {' | '.join(row)} |" for row in rows)])


def _interval(ratio: Mapping[str, Any]) -> str:
    return f"{ratio['low']:.4f} .. {ratio['high']:.4f}"


def write(result: Mapping[str, Any], directory: Path, device_type: str) -> None:
    """The table as a file, and a picture of each schedule's step as it was measured."""
    stem = str(result["case"]).replace(" ", "-")
    (directory / f"{stem}.md").write_text(table(result, device_type) + "\n")
    for name, values in result["contenders"].items():
        spans = [Span(r, parse(text), 1e3 * start, 1e3 * end) for r, text, start, end in values.get("spans", ())]
        if spans:
            bubble = f"bubble {values['bubble']:.1%}, {values['simulated_bubble']:.1%} simulated"
            title = f"{name}, {result['case']}, ms: {bubble}"
            try:
                for ending in ("png", "svg"):
                    plot(spans, directory / f"{stem}-{name}.{ending}", title)
            except ConfigError as error:  # nothing that draws is installed
                print(error, flush=True)


def fill_by_name(stage: nn.Module, device: torch.device) -> None:
    """Give each parameter values that follow from its name, of a DTensor the part that this rank holds."""
    for name, parameter in stage.named_parameters():
        fill(parameter, values_by_name(name, parameter.shape, parameter.dtype, device))


def values_by_name(name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return values that follow from a parameter's name: weights about 0, and those of norms about 1."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:6])
    generator = torch.Generator(device).manual_seed(seed)
    return torch.empty(shape, dtype=dtype, device=device).normal_(int(len(shape) < 2), _DEVIATION, generator=generator)


def fill(parameter: Tensor, whole: Tensor) -> None:
    """Copy the part of a tensor that this rank holds of a parameter."""
    local(parameter.data).copy_(whole[tuple(slice(r.start, r.stop) for r in local_ranges(parameter))])


def clear_gradients(stages: Mapping[int, nn.Module]) -> None:
    """Forget gradients, as an optimizer's `zero_grad` does."""
    for stage in stages.values():
        for parameter in stage.parameters():
            parameter.grad = None
