"""A plan as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from lightning_d9d.parallel import ParallelConfig

if TYPE_CHECKING:
    from lightning_d9d.plan.planning import Plan, RankPlan

GIB = 2**30
PARTS = {
    "weights": "weights",
    "gradients": "gradients",
    "states": "optimizer states",
    "activations": "activations",
    "gathered": "gathered blocks",
    "working": "the layer at work",
    "constant": "workspace",
}
"""The names of the fields of `PeakBytes` for people."""
SECONDS = {
    "compute": "computation",
    "messages": "messages that nobody computes beside",
    "sums": "gathering weights, summing gradients",
    "bubble": "bubble of the pipeline",
    "host": "waiting for the host to launch",
    "update": "optimizer and norm",
}
"""The names of the fields of `StepSeconds` for people, without parts of other fields."""


def gib(num_bytes: float) -> str:
    """Return bytes in GiB."""
    return f"{num_bytes / GIB:.2f}"


def verdict(plan: Plan) -> str:
    """Return whether the plan fits the memory, and by how much, in one sentence."""
    most, device = plan.most, plan.machine.device
    room = f"of {plan.machine.memory_gib:.1f} GiB of {device}"
    if plan.missing > 0:
        return f"DOES NOT FIT: pipeline rank {most.rank} needs {gib(most.needed)} {room}, {gib(plan.missing)} too many"
    return f"fits: pipeline rank {most.rank} needs most, {gib(most.needed)} {room}"


def degrees(plan: Plan) -> list[tuple[str, int, str]]:
    """Return each axis of more than one rank with its degree, and the consecutive ranks that a group spans."""
    mesh, found, span = plan.model.mesh, [], 1
    for name in (
        "tensor_parallel",
        "context_parallel_replicate",
        "context_parallel_shard",
        "data_parallel_shard",
        "data_parallel_replicate",
        "pipeline_parallel",
    ):
        degree = getattr(mesh, name)
        span *= degree
        if degree > 1:
            found.append((name, degree, plan.machine.link(span)))
    if mesh.expert_parallel > 1:
        link = f"{plan.machine.link(mesh.expert_parallel)}, {plan.model.dispatch}"
        found.append(("expert_parallel", mesh.expert_parallel, link))
    return found


def costliest(plan: Plan) -> list[tuple[str, float]]:
    """Return the three longest parts of the step, in seconds."""
    seconds = asdict(plan.timed.seconds)
    seconds["compute"] -= seconds["recompute"]
    named = [(SECONDS[name], seconds[name]) for name in SECONDS] + [("recomputation", seconds["recompute"])]
    return sorted((each for each in named if each[1] > 0), key=lambda each: -each[1])[:3]


def loads(plan: Plan) -> list[str]:
    """Return a table of the needed memory by the load of experts, after a heading; nothing if it does not matter."""
    found = plan.needed_by_load
    if not found:
        return []
    rows = [[f"{load:.3g} x an even share", gib(needed)] for load, needed in found.items()]
    return ["needed by the tokens of a rank's experts", *table(("", "GiB"), rows), ""]


def changes(plan: Plan) -> list[str]:
    """Return a line for each change of one setting that helps, after a heading; nothing if none was found."""
    if not plan.changes:
        return []
    fits = any(each.needed_bytes <= plan.machine.memory_bytes for each in plan.changes)
    what = "make it faster" if plan.missing <= 0 else "make it fit" if fits else "need less memory"
    return [f"single changes that {what}:"] + [
        f"  {each.setting}: {each.step_seconds:.3f} s a step ({each.step_seconds / plan.step_seconds - 1:+.1%}), "
        f"{gib(each.needed_bytes)} GiB"
        for each in plan.changes
    ]


def limit(plan: Plan) -> str:
    """Return whether the host or the device limits the forwards and backwards, in a few words."""
    host, device = plan.timed.host_seconds, plan.timed.seconds.compute + plan.timed.seconds.messages
    if host is None:
        return "limited by the device, if the host is fast enough: its seconds for these blocks are not known"
    if plan.timed.is_limited_by_host:
        return (
            f"limited by the host: it needs {host:.3f} s to launch blocks that take the device {device:.3f} s; larger "
            "microbatches have fewer launches"
        )
    return f"limited by the device: the host needs {host:.3f} s to launch what takes the device {device:.3f} s"


def uncounted(plan: Plan) -> str:
    """Return the settings of the plan whose effect on time and memory is not counted, with their values."""
    default, parallel = ParallelConfig(), plan.model.parallel
    names = ("compile", "cuda_graphs", "overlap_experts", "overlap_pairs", "grouped_gemm", "kernels")
    values = {name: getattr(parallel, name) for name in names}
    return ", ".join(f"{name}={value!r}" for name, value in values.items() if value != getattr(default, name))


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return a table whose first column is aligned to the left, and all others to the right."""
    lines = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return [
        "  "
        + "  ".join(
            cell.ljust(w) if not i else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]


def memory_rows(ranks: Sequence[RankPlan]) -> list[list[str]]:
    """Return a row for each part of the memory, and sums, with a column for each rank of the pipeline."""
    rows = [[title, *(gib(getattr(each.peak, name)) for each in ranks)] for name, title in PARTS.items()]
    rows = [row for row in rows if any(cell != "0.00" for cell in row[1:])]
    rows.append(["allocated", *(gib(each.peak.total) for each in ranks)])
    rows.append(["reserved by torch", *(gib(each.reserved) for each in ranks)])
    if any(each.peak.peers for each in ranks):
        rows.append(["written to by other ranks", *(gib(each.peak.peers) for each in ranks)])
    rows.append(["needed of the device", *(gib(each.needed) for each in ranks)])
    return rows


def shown_ranks(plan: Plan) -> list[RankPlan]:
    """Return the first and the last pipeline rank, and the one that needs the most, each once."""
    ranks = {each.rank: each for each in (plan.ranks[0], plan.most, plan.ranks[-1])}
    return [ranks[rank] for rank in sorted(ranks)]


def report(plan: Plan) -> str:
    """Return a plan as text."""
    model, seconds, ranks = plan.model, plan.timed.seconds, shown_ranks(plan)
    recompute = f"recompute {model.parallel.recompute}"
    shape = f"{model.num_microbatches} x {model.rows} rows of {model.tokens} tokens"
    lines = [
        f"{plan.num_parameters / 1e9:.2f} B parameters on {model.mesh.world_size} x {plan.machine.device}",
        f"{type(model.schedule).__name__}, {shape} on each data rank, {plan.tokens:,} tokens a step, {recompute}",
        "",
        verdict(plan),
        "",
        "axis of the mesh",
        *table(("", "degree", "link"), degrees(plan) or [("one rank", 1, "none")]),
        "",
        "memory at the peak, GiB",
        *table(("", *(f"pipeline rank {each.rank}" for each in ranks)), memory_rows(ranks)),
        "",
        *loads(plan),
        f"step {plan.step_seconds:.3f} s, {plan.tokens_per_second:,.0f} tokens/s a GPU, "
        + ", ".join(f"MFU ({name} attention) {share:.1%}" for name, share in plan.mfu.items()),
        *table(
            ("", "s", "share"),
            [
                (title, f"{value:.4f}", f"{value / plan.step_seconds:.1%}")
                for name, title in SECONDS.items()
                if (value := getattr(seconds, name)) > 0
            ],
        ),
        f"  (recomputation is {seconds.recompute:.4f} s of the computation; bubble {plan.timed.bubble_ratio:.1%})",
        limit(plan),
        "",
        "sent by the rank that sends most, in a step",
        *table(
            ("link", "GB", "s alone"),
            [(name, f"{sent / 1e9:.2f}", f"{alone:.4f}") for name, (sent, alone) in plan.timed.links.items()]
            or [("none", "0", "0")],
        ),
        "",
        "takes longest: " + ", ".join(f"{title} {value:.4f} s" for title, value in costliest(plan)),
        *changes(plan),
        f"a checkpoint takes {plan.checkpoint_bytes / 1e9:.1f} GB of disk",
        f"memory of a node's host: {plan.host if plan.host.total else 'none'}",
    ]
    if settings := uncounted(plan):
        lines.append(f"counted as without: {settings}")
    if plan.machine.not_measured:
        lines.append(f"not measured on this device: {', '.join(plan.machine.not_measured)}")
    lines.append(f"rates: {plan.machine.source}")
    return "\n".join(lines)
