"""What is wrong with a program is reported with its rank, place, action and remedy."""

from __future__ import annotations

import pytest

from lightning_d9d.errors import ScheduleError
from lightning_d9d.schedule import Forward, Program, check

WHOLE = "0F0 0SEND_F0 0RECV_B0 0B0\n1RECV_F0 1F0 1B0 1SEND_B0"
LOCAL = "0UNSHARD 1UNSHARD 0F0 1F0 1I0 0B0 1W0 0REDUCE_GRAD 0RESHARD 1RESHARD 1REDUCE_GRAD"


@pytest.mark.parametrize("text", [WHOLE, LOCAL, "0F0", "0F0 0SEND_F0\n1RECV_F0 1F0", "0F0 1F0|0F1 1F1"])
def test_legal(text: str) -> None:
    check(Program.parse(text))


@pytest.mark.parametrize(
    ("legal", "change", "message"),
    [
        # order on a rank
        (WHOLE, ("0F0 0SEND_F0", "0SEND_F0 0F0"), "rank 0, action 0: 0SEND_F0 comes before 0F0; put it after that"),
        (WHOLE, ("1RECV_F0 1F0", "1F0 1RECV_F0"), "rank 1, action 0: 1F0 comes before 1RECV_F0; put it after that"),
        (WHOLE, ("1F0 1B0", "1B0 1F0"), "rank 1, action 1: 1B0 comes before 1F0; put it after that"),
        (WHOLE, ("0RECV_B0 0B0", "0B0 0RECV_B0"), "rank 0, action 2: 0B0 comes before 0RECV_B0; put it after that"),
        (WHOLE, ("1B0 1SEND_B0", "1SEND_B0 1B0"), "rank 1, action 2: 1SEND_B0 comes before the backward 1B0"),
        (LOCAL, ("0F0 1F0", "1F0 0F0"), "rank 0, action 2: 1F0 comes before 0F0; put it after that"),
        (LOCAL, ("1I0 0B0", "0B0 1I0"), "rank 0, action 4: 0B0 comes before the backward 1B0; put it after that"),
        (LOCAL, ("1I0 0B0 1W0", "1W0 1I0 0B0"), "rank 0, action 4: 1W0 comes before 1I0; put it after that"),
        # work
        (WHOLE, ("1B0", "1B0 1B0"), "rank 1, action 3: 1B0 comes a second time; leave one out"),
        (LOCAL, ("1W0", "1W0 1W0"), "rank 0, action 7: 1W0 comes a second time; leave one out"),
        (LOCAL, ("1W0", "1W0 1B0"), "rank 0, action 7: 1B0 is a second backward; use either B, or I and W"),
        (LOCAL, ("1W0 ", ""), "1REDUCE_GRAD comes before the stage's last weight gradient"),
        ("0F0 0I0 0W0", (" 0W0", ""), "rank 0: 0W0 is missing; every microbatch runs through every stage once"),
        ("0F0 0B0 0F1 0B1", (" 0B1", ""), "rank 0: 0B1 is missing"),
        ("0F0 0B0 0F1 0B1", (" 0F1", " 0F2"), r"rank 0, action 3: 0B1 comes before 0F1; put it after that"),
        ("0F0 0F1", ("0F0 ", ""), "rank 0: 0F0 is missing"),
        # messages
        (WHOLE, ("0SEND_F0 ", ""), "rank 1: 0SEND_F0 is missing"),
        (WHOLE, (" 1SEND_B0", ""), "rank 0: 1SEND_B0 is missing"),
        ("0F0 0B0", ("0F0", "0F0 0SEND_F0"), "has no other rank as its peer: the stage at the other end is none"),
        ("0F0 1F0", ("0F0", "0F0 0SEND_F0"), "the stage at the other end is on the same rank; leave it out"),
        (WHOLE, ("1B0 1SEND_B0", "1B0 1SEND_B0 0SEND_F0"), "0SEND_F0 belongs to stage 0, which is on rank 0"),
        (WHOLE, ("1F0 1B0", "1F0 1B0 2B0"), "rank 1, action 3: 2B0 belongs to stage 2, which is never run forward"),
        (WHOLE, ("1F0 1B0", "1F0 1B0 1B7"), "rank 1, action 3: 1B7 belongs to microbatch 7, but there are 1"),
        (
            "0F0 0SEND_F0 0F1 0SEND_F1\n1RECV_F0 1RECV_F1 1F0 1F1",
            ("1RECV_F0 1RECV_F1", "1RECV_F1 1RECV_F0"),
            "rank 0 sends 0SEND_F0 when rank 1 receives 0SEND_F1; put the sends and receives",
        ),
        # pairs
        ("0F0 0B0", ("0F0 0B0", "0F0|0B0"), r"0F0\|0B0 is a pair whose second action waits for the first"),
        ("0F0 1F0", ("0F0 1F0", "0F0|1F0"), r"0F0\|1F0 is a pair whose second action waits for the first"),
        ("0F0 0I0 0W0", ("0I0 0W0", "0I0|0W0"), r"0I0\|0W0 is a pair whose second action waits for the first"),
        ("0F0 1F0 1B0 0B0", ("1B0 0B0", "1B0|0B0"), r"1B0\|0B0 is a pair whose second action waits for the first"),
        ("0F0 1F0", ("0F0 1F0", "1F0|0F0"), r"rank 0, action 0: 1F0\|0F0 comes before 0F0"),
        # data parallelism
        (LOCAL, ("1UNSHARD ", ""), "rank 0, action 2: 1F0 uses stage 1 while it is sharded; put 1UNSHARD before it"),
        (
            LOCAL,
            ("0UNSHARD", "0UNSHARD 0UNSHARD"),
            "rank 0, action 1: 0UNSHARD gathers a stage that is already gathered; leave it out",
        ),
        (
            LOCAL,
            ("0RESHARD", "0RESHARD 0RESHARD"),
            "0RESHARD frees a stage that is not gathered; put 0UNSHARD before it",
        ),
        (LOCAL, ("1W0", "1RESHARD 1W0"), "1W0 uses stage 1 while it is sharded"),
        (LOCAL, (" 1REDUCE_GRAD", ""), "rank 0: 1REDUCE_GRAD is missing; reduce all stages or none"),
        (LOCAL, ("1REDUCE_GRAD", "1REDUCE_GRAD 1REDUCE_GRAD"), "1REDUCE_GRAD comes a second time; leave one out"),
    ],
)
def test_illegal(legal: str, change: tuple[str, str], message: str) -> None:
    check(Program.parse(legal))
    assert legal.count(change[0]) == 1
    with pytest.raises(ScheduleError, match=message):
        check(Program.parse(legal.replace(*change)))


def test_a_rank_without_stage() -> None:
    with pytest.raises(ScheduleError, match=r"stages are on ranks \(0,\) of 2; every rank needs at least one stage"):
        check(Program(((Forward(0, 0),), ()), (0,), 1))
