"""Text of actions and programs, short names, and what schedules say of themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_d9d.errors import ScheduleError
from lightning_d9d.schedule import (
    SCHEDULES,
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    DualPipeV,
    Forward,
    Interleaved1F1B,
    LoopedBFS,
    OneForwardOneBackward,
    Overlapped,
    Program,
    ReceiveBackward,
    ReceiveForward,
    ReduceGradients,
    Reshard,
    Schedule,
    SendBackward,
    SendForward,
    StageCursor,
    Unshard,
    WrittenProgram,
    ZeroBubbleV,
    add_data_parallel,
    add_messages,
    merge_backwards,
    parse,
    resolve_schedule,
)

ACTIONS: list[tuple[Action, str]] = [
    (Forward(0, 3), "0F3"),
    (Backward(12, 34), "12B34"),
    (BackwardInput(1, 0), "1I0"),
    (BackwardWeight(1, 0), "1W0"),
    (SendForward(0, 3), "0SEND_F3"),
    (ReceiveForward(1, 3), "1RECV_F3"),
    (SendBackward(1, 3), "1SEND_B3"),
    (ReceiveBackward(0, 3), "0RECV_B3"),
    (Unshard(2), "2UNSHARD"),
    (Reshard(2), "2RESHARD"),
    (ReduceGradients(2), "2REDUCE_GRAD"),
    (Overlapped(Forward(0, 3), Backward(1, 2)), "0F3|1B2"),
]


@pytest.mark.parametrize(("action", "text"), ACTIONS, ids=lambda value: str(value))
def test_text_of_actions(action: Action, text: str) -> None:
    assert str(action) == text
    assert parse(text) == action
    assert hash(parse(text)) == hash(action)


@pytest.mark.parametrize(
    "text", ["", "F3", "0F", "0X3", "0F-1", "0F3 ", "0UNSHARD1", "0f3", "0F3|", "|0F3", "0F3|1B2|1F4"]
)
def test_what_is_no_action(text: str) -> None:
    with pytest.raises(
        ScheduleError,
        match=r"is not an action. Write <stage><kind><microbatch>, such as 0F3, with a kind of F, B, I, W",
    ):
        parse(text)


@pytest.mark.parametrize("text", ["0F3|1SEND_F2", "0UNSHARD|1F2"])
def test_what_is_no_pair(text: str) -> None:
    with pytest.raises(ScheduleError, match="cannot be part of an overlapped pair; pair two of F, B, I and W"):
        parse(text)


ONE_F_ONE_B = """
0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0F2 0SEND_F2 0RECV_B1 0B1 0RECV_B2 0B2
1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1RECV_F2 1SEND_B1 1F2 1B2 1SEND_B2
"""


def test_a_printed_program() -> None:
    """The picture of 1F1B, in text: sends at once, receives just before the message leaves."""
    assert str(OneForwardOneBackward().program(2, 3)) == ONE_F_ONE_B.strip()


def test_text_and_csv_of_programs() -> None:
    program = DualPipeV().program(2, 4)
    assert "|" in str(program)
    assert Program.parse(str(program)) == program
    assert Program.parse(program.csv()) == program
    assert program.csv().count("\n") == 2
    written = Program.parse("# one rank\n0F0,,0B0 # ends\n\n1F0 ,, 1B0")
    assert repr(written) == "<Program of 2 ranks, 2 stages, 1 microbatches>"
    assert written == Program(((Forward(0, 0), Backward(0, 0)), (Forward(1, 0), Backward(1, 0))), (0, 1), 1)
    assert (written.num_ranks, written.num_stages, written.is_forward_only) == (2, 2, False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0 0B0\n1F0 1Q0", "line 2: '1Q0' is not an action"),
        ("0F0 0B0\n0F1 0B1", r"rank 1 runs 0F1, but stage 0 is on rank 0; a stage's actions belong on one rank"),
        ("0F0 0B0\n2F0 2B0", "no rank runs a forward of stage 1; stages count from 0 without gaps"),
        ("", "no rank runs a forward of stage 0"),
        ("0B0", "no rank runs a forward of stage 0"),
    ],
)
def test_text_that_is_no_program(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Program.parse(text)


def test_placements() -> None:
    assert LoopedBFS(3).placement(2) == (0, 1, 0, 1, 0, 1)
    assert ZeroBubbleV().placement(3) == (0, 1, 2, 2, 1, 0)
    assert ZeroBubbleV().stages_of(1, 3) == [1, 4]


def test_groups_of_interleaved_microbatches() -> None:
    """Seven on three ranks are four and three, each through both stages."""
    forwards = [str(a) for a in Interleaved1F1B().compute(3, 7).ranks[2] if isinstance(a, Forward)]
    assert " ".join(forwards) == "2F0 2F1 2F2 2F3 5F0 5F1 5F2 5F3 2F4 2F5 2F6 5F4 5F5 5F6"


def test_full_backwards_where_splitting_them_gains_nothing() -> None:
    program = Program.parse("0F0 0F1 0I0 0W0 0I1 0F2 0W1 0I2\n1F0 1I0 1W0 1F1 1I1 1W1 1F2 1B2 ")
    assert str(merge_backwards(program)).splitlines() == [
        "0F0 0F1 0B0 0I1 0F2 0W1 0I2",
        "1F0 1I0 1W0 1F1 1I1 1W1 1F2 1B2",
    ]


def test_collectives_of_data_parallelism() -> None:
    """The next stage is gathered one ahead; a stage's gradients are reduced as soon as they are complete."""
    program = add_data_parallel(LoopedBFS(3).compute(1, 2))
    assert str(program) == (
        "0UNSHARD 1UNSHARD 0F0 0F1 2UNSHARD 1F0 1F1 2F0 2F1 2B1 2B0 2RESHARD 2REDUCE_GRAD "
        "1B1 1B0 1RESHARD 1REDUCE_GRAD 0B1 0B0 0RESHARD 0REDUCE_GRAD"
    )
    forward_only = add_data_parallel(LoopedBFS(2).forward_only(1, 1))
    assert str(forward_only) == "0UNSHARD 1UNSHARD 0F0 0RESHARD 1F0 1RESHARD"


def test_messages_are_added_once() -> None:
    with pytest.raises(ScheduleError, match="has sends and receives;"):
        add_messages(OneForwardOneBackward().program(2, 2))


@pytest.mark.parametrize(
    ("name", "actions"),
    [
        ("gpipe", "0F0 0F1 0F2 0B2 0B1 0B0"),
        ("1f1b", "0F0 0B0 0F1 0B1 0F2 0B2"),
        ("zero_bubble", "0F0 0B0 0F1 0B1 0F2 0B2"),
    ],
)
def test_programs_of_one_stage(name: str, actions: str) -> None:
    assert str(SCHEDULES[name]().program(num_ranks=1, num_microbatches=3)) == actions


@pytest.mark.parametrize("name", SCHEDULES)
def test_names(name: str) -> None:
    assert type(resolve_schedule(name)) is SCHEDULES[name]
    assert type(resolve_schedule(name.upper())) is SCHEDULES[name]
    assert type(resolve_schedule(SCHEDULES[name].__name__)) is SCHEDULES[name]


def test_without_a_name_and_with_an_object() -> None:
    assert isinstance(resolve_schedule(None), OneForwardOneBackward)
    schedule = Interleaved1F1B(3)
    assert resolve_schedule(schedule) is schedule
    with pytest.raises(ScheduleError, match=r"of a class that extends lightning_d9d\.schedule.Schedule"):
        resolve_schedule(object())  # type: ignore[arg-type]


class InTwos(Schedule):
    """Takes even numbers."""

    def takes(self, num_ranks: int, num_microbatches: int) -> bool:
        return num_microbatches % 2 == 0

    def order(self, rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
        stage = StageCursor(rank)
        kinds = [Forward, Forward, Backward, Backward] * (num_microbatches // 2)
        return [stage.next(kind) for kind in kinds]


class Nothing(InTwos):
    """Takes no number."""

    def takes(self, num_ranks: int, num_microbatches: int) -> bool:
        return False


@pytest.mark.parametrize(
    ("schedule", "count", "message"),
    [
        (DualPipeV(), 7, "DualPipeV on 4 pipeline ranks does not support 7 microbatches; nearest supported: 8$"),
        (InTwos(), 5, "InTwos on 4 pipeline ranks does not support 5 microbatches; nearest supported: 4 or 6$"),
        (InTwos(), 0, "InTwos on 4 pipeline ranks does not support 0 microbatches; nearest supported: 2$"),
        (OneForwardOneBackward(), 0, "does not support 0 microbatches; nearest supported: 1$"),
        (Nothing(), 3, "nearest supported: none near$"),
        (LoopedBFS(0), 3, "LoopedBFS.stages_per_rank=0 must be a whole number of at least 1"),
    ],
)
def test_numbers_of_microbatches_that_cannot_be_taken(schedule: Schedule, count: int, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        schedule.program(4, count)


def test_forward_only_sends_microbatches_out_as_soon_as_it_can() -> None:
    program = LoopedBFS(2).forward_only(2, 3)
    forwards = [" ".join(str(action) for action in actions if isinstance(action, Forward)) for actions in program.ranks]
    assert forwards == ["0F0 0F1 2F0 2F1 0F2 2F2", "1F0 1F1 3F0 3F1 1F2 3F2"]


def test_forward_only_takes_any_number() -> None:
    assert DualPipeV().forward_only(4, 1).num_microbatches == 1
    with pytest.raises(ScheduleError, match="num_microbatches=0 must be"):
        DualPipeV().forward_only(4, 0)
    with pytest.raises(ScheduleError, match="num_ranks=0 must be"):
        DualPipeV().program(0, 4)


def test_a_class_of_ones_own() -> None:
    assert str(InTwos().program(1, 2)) == "0F0 0F1 0B0 0B1"
    assert InTwos().program(3, 4).has_messages


def test_a_written_program(tmp_path: Path) -> None:
    text = "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1\n"
    file = tmp_path / "program.csv"
    file.write_text(text.replace(" ", ","))
    schedule = WrittenProgram(path=file)
    assert str(schedule.compute(2, 2)) == text.strip()
    assert schedule.program(2, 2) == WrittenProgram(text).program(2, 2)
    assert schedule.program(2, 2).has_messages
    assert str(schedule.forward_only(2, 1)) == "0F0 0SEND_F0\n1RECV_F0 1F0"
    with pytest.raises(ScheduleError, match=r"does not support 3 microbatches; nearest supported: 2$"):
        schedule.program(2, 3)
    with pytest.raises(ScheduleError, match="has 2 lines, but there are 3 pipeline ranks; write one line for each"):
        schedule.program(3, 2)
    with_messages = WrittenProgram(str(schedule.program(2, 2)))
    assert with_messages.program(2, 2) == schedule.program(2, 2)


def test_written_messages_need_one_order() -> None:
    """Rank 0 sends microbatch 1 before it takes the gradient that rank 1 sends first."""
    crossing = WrittenProgram(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\n1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"
    )
    with pytest.raises(ScheduleError, match="deadlock: rank 0 in 0SEND_F1 waits for 1RECV_F1 of rank 1"):
        crossing.program(2, 2)


@pytest.mark.parametrize("arguments", [{}, {"text": "0F0 0B0", "path": "x.csv"}])
def test_a_written_program_is_text_or_a_file(arguments: dict[str, str]) -> None:
    with pytest.raises(ScheduleError, match="needs exactly one of the two"):
        WrittenProgram(**arguments)


def test_a_written_program_is_checked_at_once() -> None:
    with pytest.raises(ScheduleError, match="rank 0, action 0: 0B0 comes before 0F0; put it after that"):
        WrittenProgram("0B0 0F0")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["0F0", "0B0"], r"Given.order\(rank=0, ...\) has '0F0', which is not an action; make one with Forward"),
        (None, r"Given.order\(rank=0, ...\) returned None; return or yield actions"),
    ],
)
def test_orders_that_are_none(given: Any, message: str) -> None:
    class Given(Schedule):
        def order(self, rank: int, num_ranks: int, num_microbatches: int) -> Any:
            return given

    with pytest.raises(ScheduleError, match=message):
        Given().program(1, 1)


def test_a_written_program_that_is_not_there() -> None:
    with pytest.raises(ScheduleError, match=r"WrittenProgram\(path='nowhere.csv'\) cannot be read in .*; give another"):
        WrittenProgram(path="nowhere.csv")
