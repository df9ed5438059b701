"""Pipeline schedules as data: pure Python, without torch.

A *schedule* (`schedule.py`: the base class; one file a family) makes a *program* (`program.py`). A program has the
*actions* (`actions.py`) of every pipeline rank in the order in which it runs them. Passes (`communications.py`) add
messages and collectives. `check.py` refuses programs that cannot run, `simulate.py` predicts their times, `plot.py`
draws them, and `spans.py` reads costs from real runs. `Auto` (`tune.py`) chooses a schedule by the costs of layers
(`layers.py`, `measured.py`) and splits layers into stages (`partition.py`). `resolve_schedule` converts a short name to
a schedule.
"""

from __future__ import annotations

from lightning_d9d.errors import ScheduleError, did_you_mean
from lightning_d9d.schedule.actions import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    ComputeAction,
    Forward,
    Overlapped,
    ReceiveBackward,
    ReceiveForward,
    ReduceGradients,
    Reshard,
    SendBackward,
    SendForward,
    Unshard,
    compute_parts,
    parse,
)
from lightning_d9d.schedule.breadth_first import GPipe, LoopedBFS
from lightning_d9d.schedule.check import check
from lightning_d9d.schedule.communications import add_data_parallel, add_messages
from lightning_d9d.schedule.dual_pipe_v import DualPipeV
from lightning_d9d.schedule.layers import HostSeconds, LayerCosts, Machine, ModelCosts
from lightning_d9d.schedule.measured import MeasuredCosts, MeasuredStage
from lightning_d9d.schedule.one_forward_one_backward import Interleaved1F1B, OneForwardOneBackward, ZeroBubble
from lightning_d9d.schedule.plot import plot
from lightning_d9d.schedule.program import Program, loop_placement, merge_backwards, v_placement
from lightning_d9d.schedule.schedule import Schedule, StageCursor, WrittenProgram
from lightning_d9d.schedule.simulate import Costs, Simulation, Span, bubble_ratio, simulate
from lightning_d9d.schedule.spans import mean_costs
from lightning_d9d.schedule.tune import Auto, Choice
from lightning_d9d.schedule.zero_bubble_v import ZeroBubbleV

SCHEDULES: dict[str, type[Schedule]] = {
    "gpipe": GPipe,
    "looped_bfs": LoopedBFS,
    "1f1b": OneForwardOneBackward,
    "interleaved_1f1b": Interleaved1F1B,
    "zero_bubble": ZeroBubble,
    "zero_bubble_v": ZeroBubbleV,
    "dual_pipe_v": DualPipeV,
}


def resolve_schedule(schedule: str | Schedule | None) -> Schedule:
    """Turn a short name into its schedule, return a schedule unchanged, and take `OneForwardOneBackward()` for None.

    A short name may be in capitals, or be the name of the class: "1F1B", "ZeroBubbleV".

    Raises:
        ScheduleError: The name is unknown, or the object is not a schedule.
    """
    if schedule is None:
        return OneForwardOneBackward()
    if isinstance(schedule, str):
        return _find(schedule)()
    if isinstance(schedule, type) and issubclass(schedule, Schedule):
        raise ScheduleError(f"schedule={schedule.__name__} is a class; give an object, {schedule.__name__}()")
    if not isinstance(schedule, Schedule):
        raise ScheduleError(
            f"schedule={schedule!r} is not a schedule; choose one of {sorted(SCHEDULES)}, or an object of a class that "
            "extends lightning_d9d.schedule.Schedule"
        )
    return schedule


def _find(name: str) -> type[Schedule]:
    spellings = {each.casefold(): kind for short, kind in SCHEDULES.items() for each in (short, kind.__name__)}
    if kind := spellings.get(name.casefold()):
        return kind
    if name.casefold() == "auto":
        raise ScheduleError(
            f"schedule={name!r} needs the shape of the batch: class_path: Auto with init_args: batch_size and "
            "sequence_length in a file, or Auto(batch_size=..., sequence_length=...) in Python"
        )
    raise ScheduleError(
        f"schedule={name!r} is unknown; choose one of {sorted(SCHEDULES)}{did_you_mean(name, SCHEDULES)}"
    )


__all__ = [
    "SCHEDULES",
    "Action",
    "Auto",
    "Backward",
    "BackwardInput",
    "BackwardWeight",
    "Choice",
    "ComputeAction",
    "Costs",
    "DualPipeV",
    "Forward",
    "GPipe",
    "HostSeconds",
    "Interleaved1F1B",
    "LayerCosts",
    "LoopedBFS",
    "Machine",
    "MeasuredCosts",
    "MeasuredStage",
    "ModelCosts",
    "OneForwardOneBackward",
    "Overlapped",
    "Program",
    "ReceiveBackward",
    "ReceiveForward",
    "ReduceGradients",
    "Reshard",
    "Schedule",
    "SendBackward",
    "SendForward",
    "Simulation",
    "Span",
    "StageCursor",
    "Unshard",
    "WrittenProgram",
    "ZeroBubble",
    "ZeroBubbleV",
    "add_data_parallel",
    "add_messages",
    "bubble_ratio",
    "check",
    "compute_parts",
    "loop_placement",
    "mean_costs",
    "merge_backwards",
    "parse",
    "plot",
    "resolve_schedule",
    "simulate",
    "v_placement",
]
