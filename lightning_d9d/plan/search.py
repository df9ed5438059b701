"""A search over meshes, schedules, microbatches, recomputation and optimizer states for some ranks and a batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product

from lightning_d9d.errors import ConfigError
from lightning_d9d.memory.rank import RankModel
from lightning_d9d.mesh import Axis
from lightning_d9d.plan.changes import recomputed
from lightning_d9d.plan.machine import MachineTable
from lightning_d9d.plan.planning import Plan, check_mesh, placed, plan_of
from lightning_d9d.plan.seconds import program_of
from lightning_d9d.schedule import DualPipeV, Interleaved1F1B, ModelCosts, OneForwardOneBackward, Schedule, ZeroBubbleV

SCHEDULES: tuple[Schedule, ...] = (OneForwardOneBackward(), Interleaved1F1B(), ZeroBubbleV(), DualPipeV())
"""The schedules that are tried with several stages; meshes are chosen with the first of them."""
RECOMPUTED = ("none", "every_2", "full")
"""The kinds of recomputation with which meshes are chosen."""
_MOST_STAGES = 16
_MOST_TURNS = 8
"""Microbatches for each stage, of which meshes are compared. With more, a step is that much longer, and needs the same
memory."""
_BEST = 6
"""The plans of which other schedules and microbatches are tried, and then other recomputation and states."""


def search(
    model: RankModel,
    machine: MachineTable,
    costs: Callable[[int], ModelCosts],
    layers_of: Callable[[int], Sequence[range]],
    *,
    asynchronous: bool = False,
    clips: bool = True,
    most: int = 10,
) -> list[Plan]:
    """Return the fastest plans that fit, for the ranks, the rows and the optimizer of a model description. Local.

    Meshes are powers of two: up to 16 stages, shards and expert ranks within a node, two nodes, or all data ranks. They
    are compared under 1F1B with microbatches of one row, without waits for the host, as larger microbatches have fewer.
    With many rows, a part of them is simulated, and the rest takes as long as its computation and messages.
    The best of them are then tried with all schedules and other microbatches. The best of these are tried with all
    kinds of recomputation, and with states in eight bits if the optimizer has them. These are also tried with a mesh
    that does not fit otherwise. Tensor and context parallelism, and the dispatch of experts, stay as configured.

    Args:
        model: The description; its rows are those of a step on all its ranks.
        machine: The GPUs.
        costs: The costs of a row by its length.
        layers_of: The layers of each stage, for a number of stages.
        asynchronous: True if checkpoints are written in the background.
        clips: True if gradients are clipped by their norm.
        most: How many plans to return.

    Raises:
        ConfigError: No mesh fits the memory; the message has the nearest one.
    """
    program = functools.cache(program_of)

    def sized(tried: Iterable[RankModel]) -> list[tuple[RankModel, int]]:
        """Return models as they run, and the bytes that they need."""
        # A variant of a plan without room for the memory of peers may have room.
        return [placed(replace(each, gpus_per_node=model.gpus_per_node), machine) for each in tried]

    def planned(models: Iterable[RankModel]) -> list[Plan]:
        return [
            plan_of(each, machine, costs, asynchronous=asynchronous, clips=clips, program=program) for each in models
        ]

    def fitting_of(tried: Iterable[tuple[RankModel, int]]) -> list[Plan]:
        return planned(each for each, needed in tried if needed <= machine.memory_bytes)

    num_rows = _rows(model)
    found = sized(meshes(model, machine.gpus_per_node, layers_of))
    found += sized(_in_eight_bits(each for each, needed in found if needed > machine.memory_bytes))
    if not found:
        raise ConfigError(
            f"no mesh of {model.mesh.world_size} ranks divides {num_rows} rows of a step; give other rows"
        )
    fitting = fitting_of(found)
    if not fitting:
        nearest = planned([min(found, key=lambda each: each[1])[0]])[0]
        raise ConfigError(
            f"nothing that was tried fits {machine.memory_gib:.1f} GiB; the nearest, {name_of(nearest)}, needs "
            f"{nearest.missing / 2**30:.1f} GiB more. Give more ranks, fewer rows, or optimizer states of eight bits"
        )
    fitting.sort(key=lambda each: _seconds_of_all(each, num_rows))
    whole = [_with_rows(each.model, num_rows) for each in fitting[:_BEST]]
    fitting = [each for each in fitting if _rows(each.model) == num_rows]
    for model_of_mesh in whole:
        fitting += fitting_of(sized(schedules(model_of_mesh, layers_of)))
    fitting.sort(key=_step_seconds)
    for best in fitting[:_BEST]:
        fitting += fitting_of(sized(_kinds(best.model)))
    return sorted({name_of(each): each for each in fitting}.values(), key=_step_seconds)[:most]


def meshes(model: RankModel, gpus_per_node: int, layers_of: Callable[[int], Sequence[range]]) -> Iterator[RankModel]:
    """Yield the model on all tried meshes with all tried kinds of recomputation, and of fewer rows if many. Local."""
    mesh, num_rows = model.mesh, _rows(model)
    inner = mesh.tensor_parallel * mesh.context_parallel_shard * mesh.context_parallel_replicate
    near = _powers(min(2 * gpus_per_node, mesh.world_size))
    for pp in _powers(min(len(model.costs.layers), _MOST_STAGES, mesh.world_size)):
        data = mesh.world_size // (pp * inner)
        if mesh.world_size % (pp * inner) or num_rows % data:
            continue
        for shard, experts, recompute in product(sorted({*near, data}), near, RECOMPUTED):
            if data % shard:
                continue
            degrees = {"pipeline_parallel": pp, "data_parallel_shard": shard, "expert_parallel": experts}
            try:
                tried = replace(mesh, data_parallel_replicate=data // shard, **degrees).resolve(mesh.world_size)
                check_mesh(tried, model.costs, model.weights.layers)
            except ConfigError:
                continue
            rows = num_rows // data
            yield replace(
                model,
                mesh=tried,
                schedule=SCHEDULES[0],
                layers_of_stages=tuple(layers_of(pp)),
                rows=1 if pp > 1 else rows,
                num_microbatches=min(rows, _MOST_TURNS * pp) if pp > 1 else 1,
                parallel=replace(model.parallel, recompute=recompute),
            )


def schedules(model: RankModel, layers_of: Callable[[int], Sequence[range]]) -> Iterator[RankModel]:
    """Yield the model with every schedule and number of microbatches that is tried on its mesh. Local."""
    pp, rows = model.mesh.pipeline_parallel, model.rows * model.num_microbatches
    for schedule in SCHEDULES if pp > 1 else SCHEDULES[:1]:
        num_stages = len(schedule.placement(pp))
        if num_stages > len(model.costs.layers):
            continue
        for number in sorted({each for each in (1, pp, 2 * pp, rows // 2, rows) if each and rows % each == 0}):
            is_long = number > 2 * _MOST_TURNS * pp and schedule is not SCHEDULES[0]  # their bubbles are alike
            if schedule.takes(pp, number) and not is_long:
                yield replace(
                    model,
                    schedule=schedule,
                    layers_of_stages=tuple(layers_of(num_stages)),
                    rows=rows // number,
                    num_microbatches=number,
                )


def _in_eight_bits(models: Iterable[RankModel]) -> Iterator[RankModel]:
    for model in models:
        if (found := model.in_eight_bits()) is not None:
            yield found


def _kinds(model: RankModel) -> Iterator[RankModel]:
    """Yield a model with all kinds of recomputation, and each with all states, but the model itself."""
    for tried in recomputed(model):
        if tried.parallel.recompute != model.parallel.recompute:
            yield tried
        yield from _in_eight_bits([tried])


def name_of(plan: Plan) -> str:
    """Return the settings of a found plan in a few words."""
    model, mesh = plan.model, plan.model.mesh
    degrees = {
        Axis.PP: mesh.pipeline_parallel,
        "replicate": mesh.data_parallel_replicate,
        "shard": mesh.data_parallel_shard,
        "ep": mesh.expert_parallel,
        Axis.TP: mesh.tensor_parallel,
        Axis.CP: mesh.context_parallel_shard * mesh.context_parallel_replicate,
    }
    words = [f"{name}{degree}" for name, degree in degrees.items() if degree > 1] or ["one rank"]
    if mesh.pipeline_parallel > 1:
        words.append(f"{type(model.schedule).__name__} of {model.num_microbatches}")
    elif model.num_microbatches > 1:
        words.append(f"{model.num_microbatches} microbatches")
    words.append(f"recompute {model.parallel.recompute}")
    return " ".join([*words, *["states in 8 bits"] * model.has_eight_bits])


def settings_of(plan: Plan) -> dict[str, object]:
    """Return a plan's arguments for `trainer.strategy` and the optimizer, as the tree of a YAML file.

    They replace those of a file before, whose `microbatch_size` would contradict the plan.
    """
    model, mesh = plan.model, plan.model.mesh
    degrees = {
        name: getattr(mesh, name)
        for name in ("pipeline_parallel", "data_parallel_replicate", "data_parallel_shard", "expert_parallel")
    }
    strategy: dict[str, object] = {
        "mesh": degrees,
        "parallel": {"recompute": model.parallel.recompute},
        "num_microbatches": model.num_microbatches,
        "microbatch_size": None,
    }
    if model.schedule in SCHEDULES:  # others are as they were configured
        strategy["schedule"] = {"class_path": f"lightning_d9d.schedule.{type(model.schedule).__name__}"}
    settings: dict[str, object] = {"trainer": {"strategy": {"class_path": "D9DStrategy", "init_args": strategy}}}
    if model.has_eight_bits:
        settings["model"] = {"init_args": {"optimizer": {"init_args": {"state_dtype": "uint8"}}}}
    return settings


def _rows(model: RankModel) -> int:
    """Return the rows of a step on all ranks."""
    mesh = model.mesh
    return model.rows * model.num_microbatches * mesh.data_parallel_replicate * mesh.data_parallel_shard


def _with_rows(model: RankModel, num_rows: int) -> RankModel:
    """Return a model with as many microbatches as a step on all ranks has rows."""
    return replace(model, num_microbatches=model.num_microbatches * num_rows // _rows(model))


def _seconds_of_all(plan: Plan, num_rows: int) -> float:
    """Return the seconds of a step of all rows, without waits for the host, from those of a plan with fewer."""
    seconds = plan.timed.seconds
    return seconds.without_host + (num_rows / _rows(plan.model) - 1) * (seconds.compute + seconds.messages)


def _step_seconds(plan: Plan) -> float:
    return plan.step_seconds


def _powers(most: int) -> list[int]:
    return [1 << exponent for exponent in range(most.bit_length())]
