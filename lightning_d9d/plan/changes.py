"""Changes of a single setting of a plan that make it faster, or make it fit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from lightning_d9d.errors import ConfigError
from lightning_d9d.memory.rank import RankModel
from lightning_d9d.plan.machine import MachineTable
from lightning_d9d.plan.planning import Change, Plan, check_mesh, placed, plan_of
from lightning_d9d.plan.seconds import program_of
from lightning_d9d.schedule import ModelCosts

KINDS = ("none", "attention", "selective", "every_2", "3_of_4", "full", "offload")
"""The kinds of recomputation that are tried, from the one that computes least again."""
_MOST = 3
_MOST_KINDS = 2
"""The kinds of recomputation that fit, after which no others are tried."""
_LEAST_GAIN = 0.005
"""The least share of a step that a change must save."""


def plan_with_changes(
    model: RankModel,
    machine: MachineTable,
    costs: Callable[[int], ModelCosts],
    *,
    asynchronous: bool = False,
    clips: bool = True,
) -> Plan:
    """Plan a run from its model description, with the changes of one setting that help most. Local.

    A plan that fits takes those that make it faster and still fit. Another one takes those that make it fit, or those
    that need the least memory if none does. Changes of recomputation, optimizer states and expert ranks are tried,
    because they keep the program of the pipeline and take little time. `search` tries more.

    Args:
        model: The description.
        machine: The GPUs.
        costs: The costs of a row by its length.
        asynchronous: True if checkpoints are written in the background.
        clips: True if gradients are clipped by their norm.
    """
    program = functools.cache(program_of)

    def planned(changed: RankModel) -> Plan:
        return plan_of(changed, machine, costs, asynchronous=asynchronous, clips=clips, program=program)

    found = planned(model)
    fits, memory = found.missing <= 0, machine.memory_bytes
    tried: list[_Tried] = []
    for each in recomputed(model, _kinds(model.parallel.recompute, less=fits)):
        tried.append(_Tried(f"recompute {each.parallel.recompute}", *placed(each, machine)))
        if sum(one.needed <= memory for one in tried) == _MOST_KINDS:
            break
    tried += [_Tried(name, *placed(each, machine)) for name, each in _others(model)]
    # Time takes longer to predict than memory, so only changes that may be shown are planned.
    helping = [one for one in tried if one.needed <= memory]
    if not fits and not helping:
        nearest = sorted(tried, key=lambda one: one.needed)
        helping = [one for one in nearest if one.needed < found.most.needed][:_MOST]
        return replace(found, changes=tuple(one.change(planned(one.model)) for one in helping))
    changes = sorted((one.change(planned(one.model)) for one in helping), key=lambda change: change.step_seconds)
    if fits:
        changes = [each for each in changes if each.step_seconds < (1 - _LEAST_GAIN) * found.step_seconds]
    return replace(found, changes=tuple(changes[:_MOST]))


class _Tried(NamedTuple):
    """A change of a single setting, with the model that has it, and what this needs."""

    setting: str
    model: RankModel
    needed: int

    def change(self, plan: Plan) -> Change:
        return Change(self.setting, plan.step_seconds, self.needed)


def recomputed(model: RankModel, kinds: Iterable[str] = KINDS) -> Iterator[RankModel]:
    """Yield the model with each kind of recomputation that its settings, such as compiled blocks, allow. Local."""
    for kind in kinds:
        with suppress(ConfigError):
            yield replace(model, parallel=replace(model.parallel, recompute=kind))


def _kinds(kind: str, *, less: bool) -> Sequence[str]:
    """Return the kinds with less or more recomputation than this one; all if it is not among `KINDS`."""
    if kind not in KINDS:
        return KINDS
    place = KINDS.index(kind)
    return KINDS[:place] if less else KINDS[place + 1 :]


def _others(model: RankModel) -> Iterator[tuple[str, RankModel]]:
    """Yield the model with smaller optimizer states, and with experts on more and on fewer ranks."""
    if (smaller := model.in_eight_bits()) is not None:
        yield "optimizer states in 8 bits", smaller
    experts = model.mesh.expert_parallel
    for degree in (2 * experts, experts // 2):
        try:
            mesh = replace(model.mesh, expert_parallel=degree).resolve(model.mesh.world_size)
            check_mesh(mesh, model.costs, model.weights.layers)
        except ConfigError:
            continue
        yield f"expert_parallel {degree}", replace(model, mesh=mesh)
