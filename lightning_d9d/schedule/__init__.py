"""Pipeline schedules as data: a schedule builds a program, a tuple of actions in the order a rank runs them.

Pure Python without torch. `actions.py`: the actions. One file a family: `breadth_first.py`,
`one_forward_one_backward.py`. `resolve_schedule` turns a short name into a schedule.
"""

from __future__ import annotations

from lightning_d9d.errors import ScheduleError
from lightning_d9d.schedule.actions import Action, Backward, Forward, Program
from lightning_d9d.schedule.breadth_first import GPipe
from lightning_d9d.schedule.one_forward_one_backward import OneForwardOneBackward

Schedule = GPipe | OneForwardOneBackward

SCHEDULES: dict[str, type[GPipe] | type[OneForwardOneBackward]] = {"gpipe": GPipe, "1f1b": OneForwardOneBackward}


def resolve_schedule(schedule: str | Schedule | None) -> Schedule:
    """Return the schedule of a short name, a schedule as it is, and `OneForwardOneBackward()` for None.

    Raises:
        ScheduleError: The name is unknown, or the object is no schedule.
    """
    if schedule is None:
        return OneForwardOneBackward()
    if isinstance(schedule, str):
        if schedule not in SCHEDULES:
            raise ScheduleError(f"schedule={schedule!r} is unknown; choose one of {sorted(SCHEDULES)}")
        return SCHEDULES[schedule]()
    if not isinstance(schedule, GPipe | OneForwardOneBackward):
        raise ScheduleError(f"schedule={schedule!r} is no schedule; choose one of {sorted(SCHEDULES)} or their classes")
    return schedule


__all__ = [
    "SCHEDULES",
    "Action",
    "Backward",
    "Forward",
    "GPipe",
    "OneForwardOneBackward",
    "Program",
    "Schedule",
    "resolve_schedule",
]
