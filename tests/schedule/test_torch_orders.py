"""Ranks compute in the order of torch.distributed.pipelining's schedules, idle slots and communication left out.

Where they differ:

- `GPipe` runs backwards newest microbatch first, as its paper and looped BFS do; torch oldest first. Equal in time and
  memory.
- torch refuses numbers of microbatches that are no multiple of the rounds for interleaved 1F1B and zero bubble; ours
  make the first groups one larger.
- On stage 0 `Schedule.program` makes one full backward of an input backward and the weight backward behind it. torch's
  runtime keeps both and runs the whole backward in the second. `Schedule.compute`, compared here, keeps both too.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from lightning_d9d.schedule import (
    DualPipeV,
    GPipe,
    Interleaved1F1B,
    LoopedBFS,
    OneForwardOneBackward,
    Schedule,
    ZeroBubble,
    ZeroBubbleV,
)

PAIR = re.compile(r"\((\w+);(\w+)\)OVERLAP_F_B")
COMPUTE = re.compile(r"\d+[FBIW]\d+(\|\d+[FBIW]\d+)?")


def unbuilt(name: str) -> Any:
    """An object of torch's class, without the stages and processes that its constructor wants."""
    from torch.distributed.pipelining import schedules  # here, as these tests start without torch

    return object.__new__(getattr(schedules, name))


def listed(name: str, p: int, n: int, k: int, rank: int) -> list[str]:
    """The order torch's class makes for a rank."""
    schedule = unbuilt(name)
    schedule.pp_group_size = p
    schedule.rank = rank
    schedule._n_microbatches = n
    schedule.num_stages = schedule._num_stages = p * k
    schedule.n_local_stages = k
    schedule._stages = [None] * k
    schedule.number_of_rounds = max(1, n // p)
    schedule.microbatches_per_round = n // schedule.number_of_rounds
    actions = schedule._calculate_single_rank_operations(rank)
    texts = [PAIR.sub(r"\1|\2", str(action)) for action in actions if action is not None]
    return [text for text in texts if COMPUTE.fullmatch(text)]


class Recorder:
    """A stage that writes down what it is asked to compute, and has nobody to talk to."""

    is_last = False

    def __init__(self, stage: int) -> None:
        self.stage_index = stage
        self.ran: list[str] = []

    def forward_one_chunk(self, microbatch: int, *args: object, **kwargs: object) -> None:
        self.ran.append(f"{self.stage_index}F{microbatch}")

    def backward_one_chunk(self, microbatch: int, **kwargs: object) -> None:
        self.ran.append(f"{self.stage_index}B{microbatch}")

    def perform_reduce_grad(self, factor: int) -> None:
        pass

    def release_fwd_send_outputs(self, microbatch: int) -> None:
        """Asked for since torch 2.15."""

    def no_messages(self, microbatch: int) -> list[object]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = no_messages


def run(name: str, p: int, n: int, rank: int) -> list[str]:
    """What torch's class of one stage a rank runs on a rank."""
    schedule = unbuilt(name)
    schedule._stage = stage = Recorder(rank)
    schedule._n_microbatches = n
    schedule._num_stages = p
    schedule._loss_fn = None
    schedule._internal_losses = []
    schedule.scale_grads = schedule._finalize_gradients = True  # the latter since torch 2.15
    schedule._check_inputs = lambda *args: ([()] * n, [{}] * n)
    schedule._initialize_stage = schedule._update_losses = lambda *args: None
    schedule._step_microbatches()
    return stage.ran


def orders(schedule: Schedule, p: int, n: int) -> list[list[str]]:
    return [list(map(str, actions)) for actions in schedule.compute(p, n).ranks]


CASES = {
    "ScheduleLoopedBFS": (LoopedBFS(2), lambda p, n: True),
    "ScheduleInterleaved1F1B": (Interleaved1F1B(2), lambda p, n: n % max(1, n // p) == 0),
    "ScheduleInterleavedZeroBubble": (ZeroBubble(2), lambda p, n: n % max(1, n // p) == 0),
    "ScheduleZBVZeroBubble": (ZeroBubbleV(), lambda p, n: True),
    "ScheduleDualPipeV": (DualPipeV(), lambda p, n: n >= 2 * p),
}
OTHERS = {
    "ScheduleInterleaved1F1B": Interleaved1F1B(3),
    "ScheduleInterleavedZeroBubble": ZeroBubble(1),
    "ScheduleLoopedBFS": LoopedBFS(3),
}


@pytest.mark.parametrize("name", CASES)
def test_the_order_is_torchs(name: str) -> None:
    first, takes = CASES[name]
    compared = 0
    for schedule in (first, *([OTHERS[name]] if name in OTHERS else [])):
        for p in range(1, 9):
            for n in (1, 2, 3, 4, 5, 7, 8, 12, 16, 19):
                if takes(p, n):
                    ours = orders(schedule, p, n)
                    theirs = [listed(name, p, n, schedule.stages_per_rank, rank) for rank in range(p)]
                    assert ours == theirs, (p, n)
                    compared += 1
    assert compared > 30


@pytest.mark.parametrize("n", [1, 2, 5, 8, 11])
def test_one_stage_a_rank(n: int) -> None:
    for p in range(1, 9):
        for rank in range(p):
            assert orders(OneForwardOneBackward(), p, n)[rank] == run("Schedule1F1B", p, n, rank)
            gpipe = run("ScheduleGPipe", p, n, rank)
            assert orders(GPipe(), p, n)[rank] == gpipe[:n] + gpipe[n:][::-1]
