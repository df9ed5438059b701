"""Schedules that follow each forward by a backward as early as possible."""

from __future__ import annotations

from lightning_d9d.schedule.actions import Action, Backward, Forward, Program


class OneForwardOneBackward:
    """1F1B (Narayanan et al. 2019, PipeDream-flush): on a single stage one microbatch is alive at a time."""

    def program(self, num_microbatches: int) -> Program:
        """The actions of a single stage over `num_microbatches`."""
        actions: list[Action] = []
        for m in range(num_microbatches):
            actions += [Forward(0, m), Backward(0, m)]
        return tuple(actions)
