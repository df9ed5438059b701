"""The actions of a program: frozen values with a short text that `parse` reads back.

`<stage><kind><microbatch>`: `0F3` is stage 0's forward of microbatch 3. Kinds: F forward, B full backward, I input
backward, W weight backward, SEND_F, RECV_F, SEND_B, RECV_B messages. A whole stage has UNSHARD, RESHARD, REDUCE_GRAD. A
pair that runs together is `0F3|1B2`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from lightning_d9d.errors import ScheduleError


@dataclass(frozen=True, slots=True)
class StageAction:
    """An action on a whole stage."""

    code: ClassVar[str]
    stage: int

    def __str__(self) -> str:
        return f"{self.stage}{self.code}"


@dataclass(frozen=True, slots=True)
class MicrobatchAction:
    """An action on one microbatch in one stage."""

    code: ClassVar[str]
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.code}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Forward(MicrobatchAction):
    """Run `stage` on `microbatch`; on the last stage also its loss. `0F3`."""

    code: ClassVar[str] = "F"


@dataclass(frozen=True, slots=True)
class Backward(MicrobatchAction):
    """Run the whole backward: gradients of the stage's inputs and of its weights. `0B3`."""

    code: ClassVar[str] = "B"


@dataclass(frozen=True, slots=True)
class BackwardInput(MicrobatchAction):
    """Compute the gradients of the stage's inputs, for which the previous stage waits; a `BackwardWeight` follows.

    `0I3`.

    Stage 0 has inputs without gradients, and no rank waits for them. Its programs have this action, too. The executor
    decides how much of the backward it runs here and how much in the `BackwardWeight`.
    """

    code: ClassVar[str] = "I"


@dataclass(frozen=True, slots=True)
class BackwardWeight(MicrobatchAction):
    """Compute the gradients of the stage's weights after a `BackwardInput`. No rank waits for them. `0W3`."""

    code: ClassVar[str] = "W"


@dataclass(frozen=True, slots=True)
class SendForward(MicrobatchAction):
    """Send the stage's output to the next stage. `0SEND_F3`; `1RECV_F3` receives it."""

    code: ClassVar[str] = "SEND_F"


@dataclass(frozen=True, slots=True)
class ReceiveForward(MicrobatchAction):
    """Receive the stage's input from the previous stage. `1RECV_F3`."""

    code: ClassVar[str] = "RECV_F"


@dataclass(frozen=True, slots=True)
class SendBackward(MicrobatchAction):
    """Send the gradient of the stage's input to the previous stage. `1SEND_B3`; `0RECV_B3` receives it."""

    code: ClassVar[str] = "SEND_B"


@dataclass(frozen=True, slots=True)
class ReceiveBackward(MicrobatchAction):
    """Receive the gradient of the stage's output from the next stage. `0RECV_B3`."""

    code: ClassVar[str] = "RECV_B"


@dataclass(frozen=True, slots=True)
class Unshard(StageAction):
    """Gather the stage's sharded parameters. `0UNSHARD`."""

    code: ClassVar[str] = "UNSHARD"


@dataclass(frozen=True, slots=True)
class Reshard(StageAction):
    """Free the parameters that `Unshard` gathered. `0RESHARD`."""

    code: ClassVar[str] = "RESHARD"


@dataclass(frozen=True, slots=True)
class ReduceGradients(StageAction):
    """Sum the stage's gradients over data-parallel ranks. `0REDUCE_GRAD`."""

    code: ClassVar[str] = "REDUCE_GRAD"


ComputeAction = Forward | Backward | BackwardInput | BackwardWeight
MessageAction = SendForward | ReceiveForward | SendBackward | ReceiveBackward
DataParallelAction = Unshard | Reshard | ReduceGradients


@dataclass(frozen=True, slots=True)
class Overlapped:
    """Two independent compute actions that an executor may run side by side. `0F3|1B2`.

    The pair starts when both can, and ends as one.
    """

    first: ComputeAction
    second: ComputeAction

    def __post_init__(self) -> None:
        for part in (self.first, self.second):
            if type(part) not in COMPUTE:
                raise ScheduleError(f"{self}: {part} cannot be part of an overlapped pair; pair two of F, B, I and W")

    def __str__(self) -> str:
        return f"{self.first}|{self.second}"


Action = ComputeAction | MessageAction | DataParallelAction | Overlapped

COMPUTE = (Forward, Backward, BackwardInput, BackwardWeight)
MESSAGES = (SendForward, ReceiveForward, SendBackward, ReceiveBackward)
DATA_PARALLEL = (Unshard, Reshard, ReduceGradients)

_OF_MICROBATCH = {kind.code: kind for kind in (*COMPUTE, *MESSAGES)}
_OF_STAGE = {kind.code: kind for kind in DATA_PARALLEL}
_TEXT = re.compile(r"(\d+)([A-Z_]+)(\d*)")


def compute_parts(action: Action) -> tuple[ComputeAction, ...]:
    """Return the compute actions in `action`: itself, the two of a pair, or none."""
    if isinstance(action, Overlapped):
        return action.first, action.second
    return (action,) if isinstance(action, COMPUTE) else ()


def parse(text: str) -> Action:
    """Return the action whose `str` is `text`.

    Raises:
        ScheduleError: The text is not an action.
    """
    first, *second = text.split("|")
    if len(second) == 1:
        return Overlapped(parse(first), parse(second[0]))  # type: ignore[arg-type]  # refuses what cannot be paired
    match = _TEXT.fullmatch(text)
    if match is not None:
        stage, code, microbatch = match.groups()
        if microbatch and code in _OF_MICROBATCH:
            return _OF_MICROBATCH[code](int(stage), int(microbatch))
        if not microbatch and code in _OF_STAGE:
            return _OF_STAGE[code](int(stage))
    raise ScheduleError(
        f"{text!r} is not an action. Write <stage><kind><microbatch>, such as 0F3, with a kind of "
        f"{', '.join(_OF_MICROBATCH)}. Or write <stage><kind> with {', '.join(_OF_STAGE)}, or two compute actions "
        "joined by |"
    )
