"""Pairs in turns: the numbers of one action after the other, and messages in an order that follows from the program."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from itertools import groupby, pairwise
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_d9d.dtypes import default_dtype
from lightning_d9d.mesh import Axis, MeshConfig, MeshDomains
from lightning_d9d.modules import AllToAllDispatch, GroupedExperts, SparseMoE
from lightning_d9d.ops.messages import give_way, launched, sending, sending_after
from lightning_d9d.parallel import ParallelConfig, recompute_activations
from lightning_d9d.pipeline.executor import Executor, LossScale, SplitBatch
from lightning_d9d.pipeline.turns import Turns
from lightning_d9d.pipeline.types import StageInputs, WeightedLoss
from lightning_d9d.schedule import Action, Backward, DualPipeV, Overlapped, Schedule, WrittenProgram
from tests.harness.compare import assert_bitwise_equal
from tests.harness.ranks import RankContext
from tests.pipeline.layered import KINDS, GivesWay, Rig, cut_of, of_one_process, pipeline_mesh
from tests.pipeline.test_executor import drawn
from tests.schedule.programs import programs

CPU = torch.device("cpu")


def in_steps(name: str, count: int, notes: list[str]) -> Callable[[], None]:
    def run() -> None:
        for step in range(count):
            notes.append(f"{name}{step}")
            give_way()

    return run


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (2, 2, "a0 b0 a1 b1"),
        (3, 1, "a0 b0 a1 a2"),
        (1, 3, "a0 b0 b1 b2"),
        (0, 2, "b0 b1"),
        (2, 0, "a0 a1"),
    ],
)
def test_actions_change_at_each_message_until_one_ends(first: int, second: int, expected: str) -> None:
    notes: list[str] = []
    Turns(CPU).run(in_steps("a", first, notes), in_steps("b", second, notes))
    assert " ".join(notes) == expected


def test_backwards_of_all_pairs_run_in_one_thread() -> None:
    """cuDNN builds its kernels of attention again in each thread. A pair that fails gives the thread back, too."""
    threads: list[int] = []

    def backward() -> None:
        give_way()
        threads.append(threading.get_ident())
        if len(threads) == 2:
            raise ValueError("the second backward")

    for _ in range(3):
        with suppress(ValueError):
            Turns(CPU).run(give_way, backward)
    assert len(threads) == 3
    assert len({*threads, threading.get_ident()}) == 2


def test_nobody_gives_way_outside_of_a_pair() -> None:
    notes: list[str] = []
    in_steps("a", 2, notes)()
    assert notes == ["a0", "a1"]


@pytest.mark.parametrize("fails", ["a", "b"])
def test_a_failure_ends_the_other_action_at_its_next_message(fails: str) -> None:
    notes: list[str] = []

    def failing() -> None:
        give_way()
        raise ValueError("an error of one action")

    other = in_steps("c", 5, notes)
    with pytest.raises(ValueError, match="an error of one action"):
        Turns(CPU).run(*((failing, other) if fails == "a" else (other, failing)))
    assert notes == (["c0"] if fails == "a" else ["c0", "c1"])
    Turns(CPU).run(in_steps("d", 1, notes), in_steps("e", 1, notes))
    assert notes[-2:] == ["d0", "e0"]


def test_a_thread_that_cannot_begin_ends_both() -> None:
    notes: list[str] = []
    refused = mock.patch.object(torch.autograd, "set_multithreading_enabled", side_effect=RuntimeError("a lost device"))
    with refused, pytest.raises(RuntimeError, match="a lost device"):
        Turns(CPU).run(in_steps("a", 5, notes), in_steps("b", 5, notes))
    assert notes == ["a0"]


def test_a_state_that_cannot_be_read_ends_both() -> None:
    """A lost device has none, also after the failure that reports it."""
    notes: list[str] = []
    turns = Turns(CPU)
    lost = mock.patch.object(turns, "_state", side_effect=RuntimeError("a lost device"))
    with lost, pytest.raises(RuntimeError, match="a lost device"):
        turns.run(in_steps("a", 5, notes), in_steps("b", 5, notes))
    assert notes == ["a0"]
    Turns(CPU).run(in_steps("c", 1, notes), in_steps("d", 1, notes))
    assert notes == ["a0", "c0", "d0"]


@pytest.mark.parametrize("fails", ["forward", "backward"])
def test_a_failure_while_the_other_is_inside_of_autograd(fails: str) -> None:
    x = torch.ones(3, requires_grad=True)
    y = GivesWay.apply(GivesWay.apply(x))
    notes: list[str] = []

    def forward() -> None:
        give_way()
        if fails == "forward":
            raise ValueError("an error of the forward")
        in_steps("f", 5, notes)()

    def fail(_: object) -> None:
        if fails == "backward":
            raise ValueError("an error of the backward")

    y.grad_fn.next_functions[0][0].register_prehook(fail)
    with pytest.raises(ValueError, match=f"an error of the {fails}"):
        Turns(CPU).run(forward, lambda: y.sum().backward())
    assert x.grad is None
    assert notes == ([] if fails == "forward" else ["f0"])


def test_ctrl_c_ends_both() -> None:
    """Python raises it in the main thread, which waits for its turn."""
    notes: list[str] = []

    def interrupted() -> None:
        signal.raise_signal(signal.SIGINT)
        in_steps("b", 5, notes)()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            Turns(CPU).run(in_steps("a", 5, notes), interrupted)
    finally:
        signal.signal(signal.SIGINT, before)
    assert notes == ["a0", "b0"]


def test_signals_do_not_lose_a_turn() -> None:
    """Whenever a handler raises, both actions end."""
    is_armed = True

    def handler(*_: object) -> None:
        if is_armed:
            raise InterruptedError("a signal")

    def forward(seconds: float) -> None:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        in_steps("a", 200, notes)()

    before = signal.signal(signal.SIGALRM, handler)
    num_ended = 0
    for run in range(200):
        notes: list[str] = []
        with suppress(InterruptedError):
            is_armed = True
            Turns(CPU).run(partial(forward, 1e-5 * (1 + run % 40)), in_steps("b", 200, notes))
        with suppress(InterruptedError):  # of a signal that comes just here
            is_armed = False
        num_ended += 1
    signal.signal(signal.SIGALRM, before)
    assert num_ended == 200


def test_each_action_has_its_own_default_dtype() -> None:
    found: list[torch.dtype] = []

    def forward() -> None:
        with default_dtype(torch.bfloat16):
            give_way()
            found.append(torch.get_default_dtype())

    def backward() -> None:
        found.append(torch.get_default_dtype())
        with default_dtype(torch.float16):
            give_way()
            found.append(torch.get_default_dtype())
            give_way()
        found.append(torch.get_default_dtype())

    Turns(CPU).run(forward, backward)
    assert found == [torch.float32, torch.bfloat16, torch.float16, torch.float32]
    assert torch.get_default_dtype() == torch.float32


def test_each_action_has_the_random_numbers_that_it_would_draw_alone() -> None:
    """The second one sets an older state and restores it, as a recomputation does."""
    drawn_in_turn: list[Tensor] = []

    def forward() -> None:
        for _ in range(3):
            drawn_in_turn.append(torch.rand(2))
            give_way()

    def recomputation() -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            first = torch.rand(2)
            give_way()
            assert_bitwise_equal("second", torch.stack([first, torch.rand(2)]), expected_again)

    torch.manual_seed(1)
    expected_again = torch.rand(2, 2)
    torch.manual_seed(0)
    expected = torch.rand(4, 2)
    torch.manual_seed(0)
    Turns(CPU).run(forward, recomputation)
    assert_bitwise_equal("drawn", torch.stack([*drawn_in_turn, torch.rand(2)]), expected)


def in_turns(schedule: Schedule, mesh: MeshDomains | None, device: torch.device, kind: str) -> Rig:
    """Return stages whose layers give way, forward and backward."""
    return Rig(schedule, mesh, device, {**KINDS[kind], "gives_way": True}, overlaps_pairs=True)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["tied", "recompute"])
def test_pipelines_of_two_ranks(rank: RankContext, kind: str) -> None:
    expected = of_one_process(kind, 9, rank.device)
    with pipeline_mesh(rank) as mesh:
        rig = in_turns(DualPipeV(), mesh, rank.device, kind)
        for count in (4, 5, 9):
            rig.check(count, expected[count - 1])
        rig.close()


@pytest.mark.ranks(2)
def test_random_programs(rank: RankContext) -> None:
    """Pairs of any two actions; those without a forward or without a backward run one after the other."""
    expected = of_one_process("shared", 4, rank.device)
    with pipeline_mesh(rank) as mesh:
        for program in drawn(programs(num_ranks=2), 40):
            if program.is_forward_only:
                continue
            rig = in_turns(WrittenProgram(text=str(program)), mesh, rank.device, "shared")
            try:
                rig.check(program.num_microbatches, expected[program.num_microbatches - 1])
            except BaseException as error:
                error.add_note(str(program))
                raise
            rig.close()


class Measured:
    """An observer that sees nothing."""

    def span(self, action: Action) -> AbstractContextManager[None]:
        return nullcontext()


@pytest.mark.parametrize(
    ("program", "observer", "takes_turns"),
    [
        ("0F0 1F0 0F1|1B0 1F1|0B0 1B1 0B1", None, True),
        ("0F0 1F0 0F1|1B0 1F1|0B0 1B1 0B1", Measured(), False),
        ("0F0 1F0 1B0 0F1|0B0 1F1 1B1 0B1", None, False),
    ],
    ids=["two stages", "measured", "one stage"],
)
def test_pairs_that_take_turns(program: str, observer: Measured | None, takes_turns: bool) -> None:
    rig = in_turns(WrittenProgram(text=program), None, CPU, "shared")
    rig.executor.observer = observer
    threads = []

    def noted(self: Turns) -> None:
        threads.append(threading.current_thread().name)
        own(self)

    own = Turns.give_way
    with mock.patch.object(Turns, "give_way", noted):
        rig.train(rig.pipeline.program(2), cut_of(2, CPU))
    assert ("backward of a pair" in threads) == takes_turns
    rig.close()


class WithDropout(nn.Module):
    """A mixture of experts behind a dropout."""

    def __init__(self, mixture: SparseMoE) -> None:
        super().__init__()
        self.mixture = mixture

    def forward(self, x: Tensor) -> Tensor:
        return self.mixture(nn.functional.dropout(x, 0.1))


class Mixture(nn.Module):
    """A stage of two mixtures of experts, distributed over ranks, with dropout."""

    def __init__(self, rank: RankContext, mesh: MeshDomains, stage: int, recompute: str) -> None:
        super().__init__()
        torch.manual_seed(stage)
        self.mixtures = nn.ModuleList(WithDropout(self._mixture(rank, mesh)) for _ in range(2))
        recompute_activations(self, ParallelConfig(recompute=recompute), self.mixtures)

    def _mixture(self, rank: RankContext, mesh: MeshDomains) -> SparseMoE:
        moe = SparseMoE(8, 8, 4, 2, normalize=True, initializer_range=0.3).double().to(rank.device)
        half = slice(2 * rank.rank, 2 * rank.rank + 2)
        experts = GroupedExperts(2, 8, 8, initializer_range=0.3).double().to(rank.device)
        experts.load_state_dict({name: value[half] for name, value in moe.experts.state_dict().items()})
        moe.experts = experts
        moe.dispatch = AllToAllDispatch(4, mesh.group(Axis.EP_SHARD, lane="moe"))
        return moe

    def forward(self, x: Tensor) -> Tensor:
        for mixture in self.mixtures:
            x = x + mixture(x)
        return x


class Rows:
    """Hooks: the sum of squares of the output. The loss asks autograd for gradients of its own."""

    def microbatch_inputs(self, microbatch: Tensor) -> StageInputs:
        return StageInputs(first={"x": microbatch})

    def microbatch_loss(self, output: Tensor, microbatch: Tensor) -> WeightedLoss:
        leaf = output.detach().requires_grad_()
        (slope,) = torch.autograd.grad(leaf.square().sum(), leaf)
        return WeightedLoss((output * slope / 2).sum(), torch.ones((), device=output.device))

    def microbatch_metrics(self, output: Tensor, microbatch: Tensor) -> dict[str, WeightedLoss]:
        return {}


class Trained(NamedTuple):
    gradients: dict[str, Tensor]
    """Of all stages, and the loss."""
    sent: list[tuple[str, int]]
    """The thread and the number of dims of each all-to-all."""
    random: Tensor


def trained(rank: RankContext, mesh: MeshDomains, recompute: str, overlaps: bool) -> Trained:
    stages = {index: Mixture(rank, mesh, index, recompute) for index in range(2)}
    executor = Executor(stages, 2, Rows(), nullcontext, pairs_on=rank.device if overlaps else None)
    generator = torch.Generator().manual_seed(rank.rank)
    counts = [[8, 1, 4, 7, 2, 3], [1, 8, 3, 3, 0, 2]][rank.rank]
    rows = [torch.randn(n, 8, generator=generator, dtype=torch.float64).to(rank.device) for n in counts]
    sent: list[tuple[str, int]] = []
    exchange = dist.all_to_all_single

    def noted(output: Tensor, *others: Any, **named: Any) -> Any:
        sent.append((threading.current_thread().name, output.dim()))
        if output.is_cuda:
            torch.cuda._sleep(10_000_000)  # on the stream of messages: they are late for whoever does not wait
        return exchange(output, *others, **named)

    torch.manual_seed(rank.rank)
    with mock.patch.object(dist, "all_to_all_single", noted):
        totals = executor.train(DualPipeV().program(1, 6).ranks[0], SplitBatch(rows, counts), LossScale())
    assert totals.loss is not None
    gradients = {
        f"{index}.{name}": parameter.grad
        for index, stage in stages.items()
        for name, parameter in stage.named_parameters()
        if parameter.grad is not None
    }
    executor.close()
    return Trained({**gradients, "loss": totals.loss[0]}, sent, torch.rand(2))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_bits_and_messages_of_experts(rank: RankContext, recompute: str) -> None:
    """Whatever tokens the ranks have, with dropout, in a recomputation too.

    Only on GPUs does a missing wait between streams, or memory that is used again too early, change the bits.
    """
    mesh = MeshDomains.build(MeshConfig(data_parallel_replicate=2, expert_parallel=2), rank.device.type)
    expected, found = (trained(rank, mesh, recompute, overlaps) for overlaps in (False, True))
    assert expected.gradients.keys() == found.gradients.keys()
    assert len(expected.gradients) > 10
    for name, value in expected.gradients.items():
        assert_bitwise_equal(name, found.gradients[name], value)
    assert_bitwise_equal("random numbers afterwards", found.random, expected.random)
    assert rank.all_gather_object(found.sent) == [found.sent, found.sent]
    assert len(found.sent) == len(expected.sent)
    sides = [thread == "backward of a pair" for thread, _ in found.sent]
    changes = sum(one != other for one, other in pairwise(sides))
    pairs = [each for each in DualPipeV().program(1, 6).ranks[0] if isinstance(each, Overlapped)]
    assert len(pairs) == 9
    # A forward has two mixtures with a dispatch and a combine each, and so has its backward. Selective recomputation
    # gives way where it has kept the counts, without a message.
    assert changes >= (6 if recompute == "selective" else 7) * len(pairs)
    if recompute == "none":  # gradients of results in one turn, and those of tokens and their weights in the next
        runs = [len([*messages]) for is_backward, messages in groupby(sides) if is_backward]
        parts = [part for pair in pairs for part in (pair.first, pair.second)]
        stages = [part.stage for part in parts if isinstance(part, Backward)]
        assert runs == [n for stage in stages for n in (1, 2, 1, 2 if stage else 1)]  # data have no gradient
    mesh.close()


def test_an_action_gives_way_before_a_message_alone() -> None:
    """Not inside of another message, and not where it gave way for several at once."""
    notes: list[str] = []

    def note(what: str) -> None:
        with sending() as message:
            notes.append(what)
        message.wait()

    def sends() -> None:
        with sending() as outer:
            note("inner")
            notes.append("outer")
        outer.wait()
        notes.append("computed")
        give_way()
        with sending_after(launched()):
            note("first")
            note("second")
        note("last")

    Turns(CPU).run(sends, in_steps("b", 3, notes))
    assert " ".join(notes) == "b0 inner outer computed b1 first second b2 last"
