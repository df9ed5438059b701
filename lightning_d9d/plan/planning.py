"""`plan` predicts memory, traffic and time of a run for each kind of rank."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch

from lightning_d9d.errors import ConfigError
from lightning_d9d.memory import GPU_OVERHEAD, HostMemory
from lightning_d9d.memory.peak import PeakBytes
from lightning_d9d.memory.rank import RankModel
from lightning_d9d.memory.row_costs import peak_of, row_costs
from lightning_d9d.memory.spread import Part, Share, elements
from lightning_d9d.memory.traffic import Sent, traffic
from lightning_d9d.mesh import MeshConfig
from lightning_d9d.metrics import Convention, StepFlops
from lightning_d9d.parallel.dispatch_choice import refusal
from lightning_d9d.plan.machine import MachineTable, machine_of
from lightning_d9d.plan.seconds import ProgramOf, Timed, program_of, timed
from lightning_d9d.schedule import Auto, ModelCosts, Schedule
from lightning_d9d.strategy.described import RunSettings
from lightning_d9d.strategy.effects import Beside, check_effects
from lightning_d9d.strategy.module import D9DModule
from lightning_d9d.strategy.staging import with_dtypes
from lightning_d9d.strategy.strategy import D9DStrategy


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """A pipeline rank with its memory and messages; other ranks of its stages have as much, or a little less."""

    rank: int
    """The pipeline rank."""
    stages: tuple[int, ...]
    layers: int
    num_ranks: int
    """Number of ranks like this one."""
    elements: dict[Part, int]
    gradients: int
    """Bytes of gradients at the end of a step."""
    peak: PeakBytes
    sent: tuple[Sent, ...]

    @property
    def reserved(self) -> int:
        """Bytes that torch's allocator reserves on the device."""
        return GPU_OVERHEAD.reserved(self.peak)

    @property
    def needed(self) -> int:
        """Bytes that the process takes on the device, also outside of torch's allocator."""
        return GPU_OVERHEAD.needed(self.peak)


class Change(NamedTuple):
    """A change of one setting of a plan, and what it gives."""

    setting: str
    step_seconds: float
    needed_bytes: int
    """Bytes that the rank with most needs."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run by arithmetic. `str(plan)` is a report."""

    model: RankModel
    machine: MachineTable
    ranks: tuple[RankPlan, ...]
    timed: Timed
    tokens: int
    """Tokens of all ranks in a step."""
    flops: dict[str, float]
    """Operations of a rank in a step, by convention."""
    num_parameters: int
    checkpoint_bytes: int
    host: HostMemory
    """Memory of a node's host, if all ranks are like the one that needs the most."""
    clips: bool = True
    changes: tuple[Change, ...] = ()
    """The changes of one setting that help most, if they were looked for."""

    @property
    def most(self) -> RankPlan:
        """The rank that needs the most memory."""
        return max(self.ranks, key=lambda each: each.needed)

    @property
    def missing(self) -> int:
        """Bytes that are missing on that rank; 0 or less if it fits."""
        return self.most.needed - self.machine.memory_bytes

    @property
    def step_seconds(self) -> float:
        """Seconds of a step."""
        return self.timed.seconds.total

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of each rank."""
        return self.tokens / self.step_seconds / self.model.mesh.world_size

    @property
    def mfu(self) -> dict[str, float]:
        """The MFU by convention."""
        return {name: flops / self.step_seconds / self.machine.peak_flops for name, flops in self.flops.items()}

    @functools.cached_property
    def needed_by_load(self) -> dict[float, int]:
        """The bytes that the rank with most needs, by the load of experts as in `RankModel.expert_load`.

        The loads are an even one, the planned one, half more, and the largest possible; none without experts on other
        ranks.
        """
        most, ranks = self.model.most_load, range(self.model.mesh.pipeline_parallel)
        if most == 1:
            return {}
        found = {self.model.expert_load: self.most.needed}
        for load in {1.0, 1.5, most} - {self.model.expert_load}:
            model = replace(self.model, expert_load=load)
            found[load] = max(GPU_OVERHEAD.needed(model.peak(rank)) for rank in ranks)
        return {load: found[load] for load in sorted(found) if load <= most}

    def to_dict(self) -> dict[str, Any]:
        """Return the plan in types of JSON."""
        seconds = self.timed.seconds
        return {
            "mesh": asdict(self.model.mesh),
            "world_size": self.model.mesh.world_size,
            "machine": asdict(self.machine),
            "schedule": type(self.model.schedule).__name__,
            "microbatches": {"number": self.model.num_microbatches, "rows": self.model.rows},
            "recompute": self.model.parallel.recompute,
            "expert_dispatch": self.model.dispatch,
            "parameters": self.num_parameters,
            "ranks": [
                {
                    "pipeline_rank": each.rank,
                    "stages": list(each.stages),
                    "layers": each.layers,
                    "num_ranks": each.num_ranks,
                    "elements": {str(part): value for part, value in each.elements.items()},
                    "gradient_bytes": each.gradients,
                    "bytes": asdict(each.peak),
                    "allocated_bytes": each.peak.total,
                    "reserved_bytes": each.reserved,
                    "needed_bytes": each.needed,
                    "sent": [message._asdict() for message in each.sent],
                }
                for each in self.ranks
            ],
            "missing_bytes": max(0, self.missing),
            "needed_bytes_by_load": self.needed_by_load,
            "checkpoint_bytes": self.checkpoint_bytes,
            "host_bytes": asdict(self.host),
            "bubble": self.timed.bubble_ratio,
            "step_seconds": self.step_seconds,
            "seconds": asdict(seconds),
            "host_seconds": self.timed.host_seconds,
            "limited_by": "host" if self.timed.is_limited_by_host else "device",
            "links": {name: {"bytes": of[0], "seconds": of[1]} for name, of in self.timed.links.items()},
            "tokens_per_step": self.tokens,
            "tokens_per_second_and_gpu": self.tokens_per_second,
            "mfu": self.mfu,
            "changes": [each._asdict() for each in self.changes],
        }

    def __str__(self) -> str:
        from lightning_d9d.plan.text import report

        return report(self)


def plan(
    module: D9DModule,
    strategy: D9DStrategy,
    world_size: int,
    machine: str | MachineTable = "h100",
    *,
    rows: int,
    tokens: int,
    precision: str = "bf16-true",
    accumulates_batches: bool = False,
    clips: bool = True,
    gpus_per_node: int | None = None,
    expert_load: float = 1.0,
) -> Plan:
    """Plan a run by arithmetic, in seconds for any number of ranks, without a process group or a GPU. Local.

    Args:
        module: Module before its stages are built; its `model_costs` give the costs of its layers.
        strategy: Strategy with the mesh, the schedule and the recomputation.
        world_size: Number of ranks.
        machine: A name of `lightning_d9d.plan.shipped()`, a file that `MachineTable.save` wrote, or a table.
        rows: Rows of a batch of one data-parallel rank.
        tokens: Tokens of a row.
        precision: The Trainer's precision.
        accumulates_batches: Whether several batches make a step.
        clips: Whether the Trainer clips gradients by their norm.
        gpus_per_node: Replaces the table's value.
        expert_load: The copies of tokens that the experts of a rank get in each layer, as a multiple of an even share.
            Memory counts it, and time does not.

    Raises:
        ConfigError: The mesh is impossible, the GPU is unknown, a setting has no effect, or the module gives no costs.
    """
    table = machine_of(machine, gpus_per_node=gpus_per_node)
    model = rank_model(
        module,
        strategy,
        world_size,
        rows=rows,
        tokens=tokens,
        precision=precision,
        accumulates_batches=accumulates_batches,
        memory=table.allocatable,
        gpus_per_node=table.gpus_per_node,
        expert_load=expert_load,
    )
    from lightning_d9d.plan.changes import plan_with_changes

    return plan_with_changes(
        model,
        table,
        costs_of_length(module, precision),
        asynchronous=strategy.checkpoint_config.asynchronous,
        clips=clips,
    )


def costs_of_length(module: D9DModule, precision: str) -> Callable[[int], ModelCosts]:
    """Return a function from the length of a row to its costs, for the dtype of a precision.

    Raises:
        ConfigError: The module gives no costs.
    """
    width = 2 if precision.startswith(("bf16", "16")) else 4

    def costs(tokens: int) -> ModelCosts:
        found = module.model_costs(tokens, width)
        if found is None:
            raise ConfigError(
                f"{type(module).__name__} does not say what its layers cost: implement "
                "model_costs(sequence_length, bytes_per_element) -> ModelCosts, with activation_bytes, output_bytes "
                "and flops of each layer"
            )
        return found

    return costs


def rank_model(
    module: D9DModule,
    strategy: D9DStrategy,
    world_size: int,
    *,
    rows: int,
    tokens: int,
    precision: str = "bf16-true",
    accumulates_batches: bool = False,
    mesh: MeshConfig | None = None,
    schedule: Schedule | None = None,
    memory: int | None = None,
    gpus_per_node: int = 0,
    expert_load: float = 1.0,
) -> RankModel:
    """Return the model and settings that determine memory and time. Local.

    Args:
        module: Module before its stages are built.
        strategy: Strategy with the mesh, the schedule and the recomputation.
        world_size: Number of ranks.
        rows: Rows of a batch of one data-parallel rank.
        tokens: Tokens of a row.
        precision: The Trainer's precision.
        accumulates_batches: Whether several batches make a step.
        mesh: Replaces the strategy's mesh. The strategy's settings may then have no effect.
        schedule: Replaces the strategy's schedule. Likewise.
        memory: Bytes that a rank may allocate, for the choice of `Auto`; None adds no cap.
        gpus_per_node: GPUs of a node, which can write to each other's memory; 0 if none can.
        expert_load: As for `plan`.

    Raises:
        ConfigError: The mesh is impossible, a setting has no effect, or the module gives no costs.
    """
    _check_arguments(module, strategy, expert_load, world_size=world_size, rows=rows, tokens=tokens)
    is_own = mesh is None and schedule is None
    mesh, schedule = (mesh or strategy.mesh_config).resolve(world_size), schedule or strategy.schedule
    if is_own:
        beside = Beside(module, strategy.mesh_config, mesh, strategy.parallel, schedule)
        check_effects(strategy.settings(), D9DStrategy().settings(), beside)
    costs = costs_of_length(module, precision)(tokens)
    check_stages(mesh, costs)
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    parallel = with_dtypes(strategy.parallel, strategy.grad_sync, autocasts=precision.endswith("-mixed"))
    settings = RunSettings(
        mesh=mesh,
        parallel=parallel,
        grad_sync=strategy.grad_sync,
        step_in_backward=strategy.step_in_backward,
        accumulates_batches=accumulates_batches,
        autocasts=precision.endswith("-mixed"),
    )
    number = strategy.microbatch_count.of(rows)
    if not isinstance(schedule, Auto) and not schedule.takes(mesh.pipeline_parallel, number):
        raise ConfigError(
            f"{type(schedule).__name__} cannot run {number} microbatches on {mesh.pipeline_parallel} pipeline ranks; "
            "give other microbatches or rows"
        )
    cut = None if isinstance(schedule, Auto) else schedule  # Auto cuts itself
    model = settings.rank_model(module, costs, dtype, tokens=tokens, schedule=cut)
    if model is None:
        raise ConfigError(
            f"{type(module).__name__} has other blocks than model_costs has layers ({len(costs.layers)}): blocks are "
            "the entries of its ModuleLists, or of the classes that ParallelConfig.shard_blocks names"
        )
    check_mesh(mesh, costs, model.weights.layers)
    model = replace(model, expert_load=expert_load)
    if refusal(parallel) is None:
        model = replace(model, gpus_per_node=gpus_per_node)
    if isinstance(schedule, Auto):
        return _chosen(model, schedule, memory)
    return replace(model, rows=-(-rows // number), num_microbatches=number)


def _check_arguments(module: D9DModule, strategy: D9DStrategy, expert_load: float, **sizes: int) -> None:
    """Refuse arguments of a plan that have the wrong type or are out of range."""
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"plan got {name}={value!r}, which must be a whole number of at least 1")
    if not 1 <= expert_load < math.inf:
        raise ConfigError(f"plan got expert_load={expert_load!r}, which must be a number of at least 1: an even load")
    if not isinstance(module, D9DModule):
        raise ConfigError(f"plan needs a D9DModule, whose layers have costs, and got a {type(module).__name__}")
    if not isinstance(strategy, D9DStrategy):
        raise ConfigError(f"plan needs a D9DStrategy, and got {type(strategy).__name__}; give trainer.strategy one")


def _chosen(model: RankModel, auto: Auto, memory: int | None) -> RankModel:
    """Return the model with the choice of `Auto`."""
    pp = model.mesh.pipeline_parallel
    choice = auto.choose(pp, row_costs(model), state_ratio=0.0, device_memory=memory, peak=peak_of(model))
    return replace(
        model,
        schedule=choice.schedule,
        layers_of_stages=choice.layers_of_stage,
        rows=choice.microbatch_size,
        num_microbatches=choice.num_microbatches,
    )


def check_stages(mesh: MeshConfig, costs: ModelCosts) -> None:
    """Refuse more pipeline ranks than layers. Local.

    Raises:
        ConfigError: The message has both.
    """
    if mesh.pipeline_parallel > len(costs.layers):
        raise ConfigError(
            f"pipeline_parallel={mesh.pipeline_parallel} of a model with {len(costs.layers)} layers; a stage has at "
            f"least one, so give {len(costs.layers)} or less"
        )


def check_mesh(mesh: MeshConfig, costs: ModelCosts, layers: Sequence[Sequence[Any]]) -> None:
    """Refuse degrees that do not divide the model. Local.

    Raises:
        ConfigError: The message names the degree, the number that it must divide, and a remedy.
    """
    check_stages(mesh, costs)
    for weight in {weight for layer in layers for weight in layer}:
        degree, name, size = 1, "", 1
        if weight.part is Part.EXPERTS:
            degree, name, size = mesh.expert_parallel, "expert_parallel", weight.shape[0]
        elif weight.num_heads:
            degree, name, size = mesh.tensor_parallel, "tensor_parallel", weight.num_heads
            if degree % size == 0:
                continue
        elif weight.cut == "tensor ranks":
            degree, name, size = mesh.tensor_parallel, "tensor_parallel", weight.shape[weight.dim]
        if size % degree:
            raise ConfigError(f"MeshConfig.{name}={degree} does not divide {size} of {weight.part}; give a divisor")
    if mesh.expert_parallel > 1 and not any(w.part is Part.EXPERTS for layer in layers for w in layer):
        raise ConfigError(f"MeshConfig.expert_parallel={mesh.expert_parallel} of a model without experts; leave it 1")


def plan_of(
    model: RankModel,
    machine: MachineTable,
    costs: Callable[[int], ModelCosts],
    *,
    asynchronous: bool = False,
    clips: bool = True,
    program: ProgramOf = program_of,
) -> Plan:
    """Plan a run from its model description. Local."""
    model, _ = placed(model, machine)
    mesh, pp = model.mesh, model.mesh.pipeline_parallel
    per_rank = mesh.world_size // pp
    ranks, sent = [], [traffic(model, rank, clips=clips) for rank in range(pp)]
    for rank in range(pp):
        held, stages = model.held(rank), model.schedule.stages_of(rank, pp)
        ranks.append(
            RankPlan(
                rank=rank,
                stages=tuple(stages),
                layers=sum(len(model.layers_of_stages[stage]) for stage in stages),
                num_ranks=per_rank,
                elements=elements(held),
                gradients=model.at_end(rank)[1],
                peak=model.peak(rank),
                sent=tuple(_merged(sent[rank])),
            )
        )
    data = mesh.data_parallel_replicate * mesh.data_parallel_shard
    tokens = model.rows * model.num_microbatches * model.tokens * data
    recomputed = model.parallel.recompute
    whole = 1.0 if recomputed in ("full", "offload") else 0.0
    is_frozen = not all(w.is_trained for layer in model.weights.layers for w in layer)
    flops = StepFlops(costs(model.tokens), costs(2 * model.tokens), whole, frozen=is_frozen)
    per_gpu = tokens / model.tokens / mesh.world_size
    saved = sum(w.numel * w.dtype.itemsize for w in model.weights.every)
    saved += sum(model.state_bytes(_whole(w)) for w in model.weights.every if w.is_trained)
    most = max(ranks, key=lambda each: each.needed)
    return Plan(
        model=model,
        machine=machine,
        ranks=tuple(ranks),
        timed=timed(model, machine, sent, clips=clips, program=program),
        tokens=tokens,
        flops={
            "causal": per_gpu * flops.count(Convention.CAUSAL),
            "full": per_gpu * flops.count(Convention.FULL),
        },
        num_parameters=model.weights.numel,
        checkpoint_bytes=saved,
        host=model.host(most.rank, copies=asynchronous).times(min(machine.gpus_per_node, mesh.world_size)),
        clips=clips,
    )


def placed(model: RankModel, machine: MachineTable) -> tuple[RankModel, int]:
    """Return a model as it runs on a machine, and the bytes that the rank with most needs. Local.

    If "auto" took peer dispatch and the memory has no room for it, the model has all-to-all instead.
    """
    needed = max(GPU_OVERHEAD.needed(model.peak(rank)) for rank in range(model.mesh.pipeline_parallel))
    if model.chose_peers and needed > machine.memory_bytes:
        return placed(replace(model, gpus_per_node=0), machine)
    return model, needed


def _whole(weight: Any) -> Share:
    return Share(weight=weight, gathered=weight.shape, shape=weight.shape, num_shards=1, num_copies=1, is_unit=False)


def _merged(sent: Sequence[Sent]) -> list[Sent]:
    """Return messages of one kind to the same ranks as one entry."""
    found: dict[tuple[Any, ...], Sent] = {}
    for each in sent:
        key = each.kind, each.what, each.axis, each.num_ranks, each.span
        before = found.get(key)
        found[key] = (
            each
            if before is None
            else each._replace(
                num_bytes=before.num_bytes + each.num_bytes, num_messages=before.num_messages + each.num_messages
            )
        )
    return list(found.values())
