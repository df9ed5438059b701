"""The time of a step: computation, messages, and the part of messages that computation does not hide.

[Note: time of a step] Layers take the seconds of `Machine.seconds`, times 1 plus `host_share`. That share is fitted to
ten measured runs on one H100. A recomputed forward counts twice. Messages of tokens, and of tensor or context
parallelism, are not hidden and count in full. A dispatch to experts of other ranks waits for the host, which reads how
many tokens come. `wait_seconds` is the forward of `all_to_all` in docs/benchmarks/parallel.md, 3.47 ms, without 0.53 ms
of messages and 0.6 ms of copies. Messages of weights and gradients run beside the computation, and slow it down by
`message_slowdown` of their own time. Nothing is computed beside the first gathers, of the embedding and the first
layer. The same is true of the last sums: that of the embedding, and that of the first layer if FSDP2 sums it. If
messages take longer than the computation, the rest counts in full. The program of a pipeline is simulated with these
seconds. The update moves the bytes of `updated_bytes`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_d9d.memory.copies import updated_bytes
from lightning_d9d.memory.layers import StageOfRank
from lightning_d9d.memory.rank import RankModel
from lightning_d9d.memory.row_costs import microbatch_costs
from lightning_d9d.memory.spread import Share
from lightning_d9d.memory.traffic import Sent, of_weights
from lightning_d9d.plan.machine import MachineTable
from lightning_d9d.schedule import Costs, Program, Schedule, simulate
from lightning_d9d.schedule.simulate import Simulation

_TORCH_UPDATE, _OWN_UPDATE = 0.7, 0.84
"""The rate of an update as a share of a copy's. Torch's fused AdamW took 38.1 ms for 79.8 GB of *sparse full* on an
H100, and the norm 4.7 ms for 10.0 GB. `StochasticAdamW` in eight bits took 12.6 ms for 31 GB of *sparse 64k*, and 17.2
ms for 44.8 GB of *experts in eight bits*."""
_BESIDE = ("weights", "gradients")

ProgramOf = Callable[[Schedule, int, int], Program]


@dataclass(frozen=True, kw_only=True)
class StepSeconds:
    """The parts of a step's time, on the rank that computes the most."""

    compute: float
    recompute: float
    """The part of `compute` for recomputation."""
    messages: float
    """Messages of tokens and activations that computation does not hide."""
    sums: float
    """The time added by gathering weights and summing gradients."""
    bubble: float
    """The time that the rank waits for other pipeline ranks."""
    update: float
    """The optimizer, and the norm where gradients are clipped."""
    host: float
    """The time that the device waits for the host to launch kernels: [Note: time of the host] in schedule/layers.py."""

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.compute + self.messages + self.sums + self.bubble + self.update + self.host

    @property
    def without_host(self) -> float:
        """Seconds of the step if the device never waited for the host. The bubble would be shorter by about as much."""
        waits = self.host / (self.compute + self.messages + self.host)
        return self.total - self.host - waits * self.bubble


@dataclass(frozen=True, kw_only=True)
class Timed:
    """A step's time, its simulated pipeline, and the traffic of each link."""

    seconds: StepSeconds
    simulation: Simulation
    bubble_ratio: float
    links: dict[str, tuple[float, float]]
    """The bytes that the busiest rank sends over each link, and their seconds without anything beside them."""
    host_seconds: float | None
    """The seconds of the busiest rank's host for a step; None if the machine table does not have them."""

    @property
    def is_limited_by_host(self) -> bool:
        """True if the device waits for the host."""
        return self.seconds.host > 0


def program_of(schedule: Schedule, num_ranks: int, num_microbatches: int) -> Program:
    """Return the checked program of a schedule. Local."""
    return schedule.program(num_ranks, num_microbatches)


def timed(
    model: RankModel,
    machine: MachineTable,
    sent: Sequence[Sequence[Sent]],
    *,
    clips: bool,
    program: ProgramOf = program_of,
) -> Timed:
    """Predict the time of a step. Local. See [Note: time of a step].

    Args:
        model: The run.
        machine: The rates.
        sent: The `traffic` of each pipeline rank.
        clips: True if gradients are clipped by their norm.
        program: As `program_of`; a search remembers programs, which many meshes share.
    """
    pp = model.mesh.pipeline_parallel
    of_stages: dict[int, _Stage] = {}
    for rank in range(pp):
        of_stages |= {index: _stage(model, stage, machine) for index, stage in model.stages(rank).items()}
    ranks = [_rank(model, rank, of_stages, machine, sent[rank]) for rank in range(pp)]
    slower = {index: ranks[rank].slower for rank in range(pp) for index in model.stages(rank)}
    known = [of_stages[index].times(slower[index]) for index in range(len(of_stages))]
    costs = Costs(
        forward=[each.forward for each in known],
        backward_input=[each.backward_input for each in known],
        backward_weight=[each.backward_weight for each in known],
        backward=[each.backward_input + each.backward_weight for each in known],
        transfer=_transfer(model, machine),
        latency=machine.latency,
    )
    simulation = simulate(program(model.schedule, pp, model.num_microbatches), costs, is_checked=True)
    busy = max(range(pp), key=lambda rank: simulation.compute_time[rank])
    own, active = ranks[busy], simulation.compute_time[busy]
    device = active / own.slower
    seconds = StepSeconds(
        compute=device - own.messages,
        recompute=own.again,
        messages=own.messages,
        sums=own.alone + own.slowed + max(0.0, own.beside - (active - own.messages)),
        bubble=simulation.step_time - active,
        update=_update(model, max((model.held(rank) for rank in (0, pp - 1)), key=_elements), machine, clips=clips),
        host=active - device,
    )
    return Timed(
        seconds=seconds,
        simulation=simulation,
        bubble_ratio=simulation.bubble_ratio,
        links=_links(sent, machine),
        host_seconds=own.host,
    )


@dataclass(frozen=True, kw_only=True)
class _Stage:
    """The seconds of a stage for a microbatch, on the device; of them those of messages and of recomputation."""

    forward: float
    backward_input: float
    backward_weight: float
    messages: float
    again: float
    host: float | None
    """The host's seconds to launch all of it; None if not known."""

    def times(self, factor: float) -> _Stage:
        """Return the stage with longer actions."""
        actions = {name: factor * getattr(self, name) for name in ("forward", "backward_input", "backward_weight")}
        return replace(self, **actions)


def _stage(model: RankModel, stage: StageOfRank, machine: MachineTable) -> _Stage:
    rates = machine.rates_for(model.tokens)
    costs = [microbatch_costs(model, each, is_head=each is stage.after) for each in stage.parts]
    layers = costs[len(costs) - len(stage.layers) - (stage.after is not None) :][: len(stage.layers)]
    seconds = [rates.seconds(each, 1) for each in costs]
    return _Stage(
        forward=sum(each.forward for each in seconds) + rates.action_seconds,
        backward_input=sum(each.backward_input for each in seconds) + rates.action_seconds,
        backward_weight=sum(each.backward_weight for each in seconds),
        messages=sum(rates.message_seconds(each, 1) for each in costs),
        again=sum(rates.again(each, 1) for each in costs),
        host=rates.host_seconds(layers),
    )


@dataclass(frozen=True, kw_only=True)
class _Rank:
    """The seconds of a pipeline rank in a step."""

    computed: float
    """All of its actions on the device, with messages of tokens."""
    messages: float
    again: float
    host: float | None
    alone: float
    """Messages of weights and gradients that nothing is computed beside."""
    beside: float
    """Other messages of weights and gradients."""
    slowed: float
    """The time that the computation loses by them."""

    @property
    def slower(self) -> float:
        """The factor by which the host makes actions longer: [Note: time of the host] in schedule/layers.py."""
        return max(1.0, ((self.host or 0.0) - self.slowed) / self.computed)


def _rank(
    model: RankModel, rank: int, of_stages: Mapping[int, _Stage], machine: MachineTable, sent: Sequence[Sent]
) -> _Rank:
    stages, number = model.stages(rank), model.num_microbatches
    own = [of_stages[index] for index in stages]
    hosts = [each.host for each in own if each.host is not None]
    alone = _alone(model, stages, machine)
    beside = sum(_seconds(each, machine) for each in sent if each.what in _BESIDE) - alone
    return _Rank(
        computed=number * sum(each.forward + each.backward_input + each.backward_weight for each in own),
        messages=number * sum(each.messages for each in own),
        again=number * sum(each.again for each in own),
        host=number * sum(hosts) + machine.step_host_seconds if len(hosts) == len(own) else None,
        alone=alone,
        beside=beside,
        slowed=machine.message_slowdown * beside,
    )


def _alone(model: RankModel, stages: Mapping[int, StageOfRank], machine: MachineTable) -> float:
    """Return the seconds of the first gathers and the last sums of a step, which nothing is computed beside."""
    found = 0.0
    for stage in stages.values():
        ends = [*stage.parts[:2]] if stage.before is not None else []
        for index, part in enumerate(ends):
            for each in of_weights(model, (share for share in part.shares if index == 0 or share.is_unit)):
                if each.num_ranks > 1:
                    found += _seconds(each, machine) / (each.num_messages if each.what == "weights" else 1)
    return found


def _seconds(sent: Sent, machine: MachineTable) -> float:
    """Return the seconds of messages without anything beside them."""
    rates = machine.rates
    return rates.send_seconds(*_spread(sent, machine)) + sent.num_messages * machine.latency


def _spread(sent: Sent, machine: MachineTable) -> tuple[float, float]:
    """Return the bytes sent within the node, and those sent to other nodes."""
    return machine.rates.spread_bytes(sent.num_bytes, sent.num_ranks, sent.span, is_ring=sent.is_ring)


def _transfer(model: RankModel, machine: MachineTable) -> float:
    """Return the seconds of a microbatch's message to the next stage."""
    pp = model.mesh.pipeline_parallel
    if pp == 1:
        return 0.0
    rate = machine.rates.link(model.mesh.world_size // pp + 1)
    return model.costs.layers[0].output_bytes * model.share_of_row / (rate / 2)


def _update(model: RankModel, held: Sequence[Share], machine: MachineTable, *, clips: bool) -> float:
    share = _TORCH_UPDATE if model.casts_gradients else _OWN_UPDATE
    return updated_bytes(model, held, clips=clips) / (share * machine.copy_bytes)


def _elements(held: Sequence[Share]) -> int:
    return sum(share.numel for share in held if share.weight.is_trained)


def _links(sent: Sequence[Sequence[Sent]], machine: MachineTable) -> dict[str, tuple[float, float]]:
    found: dict[str, tuple[float, float]] = {}
    for of_rank in sent:
        sums: dict[str, tuple[float, float]] = {}
        for each in of_rank:
            rates = machine.node_link_bytes, machine.network_bytes
            for name, sends, rate in zip(("node", "network"), _spread(each, machine), rates, strict=True):
                if sends:
                    num_bytes, seconds = sums.get(name, (0.0, 0.0))
                    sums[name] = num_bytes + sends, seconds + sends / rate
        for name, values in sums.items():
            found[name] = max(found.get(name, (0.0, 0.0)), values)
    return found
