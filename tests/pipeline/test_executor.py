"""Whatever the schedule, the ranks, the microbatches and the model: losses and gradients are those of one process."""

from __future__ import annotations

import inspect
from unittest import mock

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from lightning_d9d.errors import ScheduleError
from lightning_d9d.mesh import MeshDomains
from lightning_d9d.schedule import SCHEDULES, Program, Schedule, WrittenProgram
from tests.harness.ranks import RankContext
from tests.pipeline.layered import KINDS, VOCAB, Rig, cut_of, of_one_process, pipeline_mesh
from tests.schedule.programs import broken, programs


def counted(*some: int) -> pytest.MarkDecorator:
    """Numbers of microbatches: some, and with the many meshes 1 to 16."""
    every = pytest.param(tuple(range(1, 17)), id="1-16", marks=pytest.mark.meshes)
    return pytest.mark.parametrize("counts", [pytest.param(some, id=",".join(map(str, some))), every])


VARIANTS = [
    (name, options)
    for name, kind in SCHEDULES.items()
    for options in ([{"stages_per_rank": n} for n in (1, 2, 3)] if inspect.signature(kind).parameters else [{}])
]
"""Every schedule, with 1, 2 and 3 stages a rank where that can be chosen."""


def check_variants(
    variants: list[tuple[str, dict[str, int]]],
    counts: tuple[int, ...],
    kind: str,
    mesh: MeshDomains | None,
    device: torch.device,
) -> int:
    """How many cases were compared."""
    num_ranks = 1 if mesh is None else mesh.sizes["pp"]
    expected = of_one_process(kind, max(counts), device)
    checked = 0
    for name, options in variants:
        schedule: Schedule = SCHEDULES[name](**options)
        rig = Rig(schedule, mesh, device, KINDS[kind])
        for count in counts:
            if schedule.takes(num_ranks, count):
                try:
                    rig.check(count, expected[count - 1])
                except BaseException as error:
                    error.add_note(f"{name} {options}, {num_ranks} pipeline ranks, {count} microbatches, {kind}")
                    raise
                checked += 1
        rig.close()
    return checked


def test_every_schedule_is_there() -> None:
    assert {name for name, _ in VARIANTS} == set(SCHEDULES)
    assert len(VARIANTS) == 13


@pytest.mark.ranks(2, timeout_seconds=180)
@counted(1, 2, 5)
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks(rank: RankContext, kind: str, counts: tuple[int, ...]) -> None:
    """DualPipeV takes as many as there are stages, all others any number."""
    with pipeline_mesh(rank) as mesh:
        num_cases = check_variants(VARIANTS, counts, kind, mesh, rank.device)
    assert num_cases == len(VARIANTS) * len(counts) - sum(count < 4 for count in counts)


@pytest.mark.ranks(2)
@counted(1, 2, 5)
@pytest.mark.parametrize("kind", KINDS)
def test_one_rank(rank: RankContext, kind: str, counts: tuple[int, ...]) -> None:
    """Each of the two has all stages of half of the schedules, and nobody to talk to."""
    check_variants(VARIANTS[rank.rank :: 2], counts, kind, None, rank.device)


@pytest.mark.ranks(4, timeout_seconds=300)
@counted(3, 8)
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind == "all trained" else pytest.mark.meshes) for kind in KINDS],
)
def test_four_ranks(rank: RankContext, kind: str, counts: tuple[int, ...]) -> None:
    """Fewer microbatches than ranks, and as many as stages of two a rank. Two ranks have the other kinds, too."""
    with pipeline_mesh(rank) as mesh:
        check_variants(VARIANTS, counts, kind, mesh, rank.device)


@pytest.mark.ranks(2)
def test_random_programs(rank: RankContext) -> None:
    """Legal ones run; what one change makes of them runs if it is legal, and is refused before it runs if not."""
    expected = of_one_process("shared", 4, rank.device)
    num_refused = 0
    with pipeline_mesh(rank) as mesh:
        for program in [*drawn(programs(num_ranks=2), 40), *drawn(broken(num_ranks=2), 60)]:
            try:
                schedule = WrittenProgram(text=str(program))
                schedule.program(2, program.num_microbatches)
            except ScheduleError:
                num_refused += 1
                continue
            rig = Rig(schedule, mesh, rank.device, KINDS["shared"])
            try:
                if program.is_forward_only:
                    cut = cut_of(program.num_microbatches, rank.device)
                    totals = rig.executor.evaluate(rig.pipeline.program(program.num_microbatches), cut)
                    rig.check_totals(totals, expected[program.num_microbatches - 1])
                    rig.check_nothing_left()
                else:
                    rig.check(program.num_microbatches, expected[program.num_microbatches - 1])
            except BaseException as error:
                error.add_note(str(program))
                raise
            rig.close()
    assert 20 < num_refused < 60


def drawn(examples: st.SearchStrategy[Program], number: int) -> list[Program]:
    """The same on every rank."""
    found: list[Program] = []

    @settings(max_examples=number, derandomize=True, database=None, deadline=None, phases=[Phase.generate])
    @given(examples)
    def draw(program: Program) -> None:
        found.append(program)

    draw()
    return found


@pytest.mark.ranks(2)
def test_dummies_count_nothing(rank: RankContext) -> None:
    """They count neither in the loss nor in the gradients or the metrics."""
    expected = of_one_process("tied", 3, rank.device)
    with pipeline_mesh(rank) as mesh:
        for name in SCHEDULES:
            rig = Rig(SCHEDULES[name](), mesh, rank.device, KINDS["tied"])
            for count, num_dummies in ((1, 3), (3, 1), (2, 4)):
                rig.check(count, expected[count - 1], num_dummies)
            rig.close()


def test_dummies_have_no_metrics() -> None:
    """The hook may count what it sees."""
    device = torch.device("cpu")
    rig = Rig(SCHEDULES["1f1b"](), None, device, KINDS["tied"])
    hooks = rig.executor.hooks
    with mock.patch.object(hooks, "microbatch_metrics", wraps=hooks.microbatch_metrics) as metrics:
        rig.train(rig.pipeline.program(5), cut_of(5, device, num_dummies=3))
    assert metrics.call_count == 2
    rig.close()


@pytest.mark.ranks(2)
def test_evaluation_between_batches(rank: RankContext) -> None:
    """It leaves nothing behind, also with gradients on. Training then sends the same messages as before."""
    expected = of_one_process("half frozen", 4, rank.device)
    with pipeline_mesh(rank) as mesh:
        for name in SCHEDULES:
            rig = Rig(SCHEDULES[name](), mesh, rank.device, KINDS["half frozen"])
            for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
                for count in (1, 3):
                    cut, actions = cut_of(count, rank.device), rig.pipeline.forward_only(count)
                    rig.outputs.clear()
                    with mode():
                        totals = rig.executor.evaluate(actions, cut)
                        shapes = rig.executor.outputs(actions, cut, lambda output: tuple(output.shape))
                    rig.check_totals(totals, expected[count - 1])
                    rig.check_nothing_left()
                    is_last = rig.pipeline.rank == rig.pipeline.last_rank
                    assert shapes == [(*each["ids"].shape, VOCAB) for each in cut.microbatches if is_last]
                rig.check(4, expected[3])
            rig.close()
