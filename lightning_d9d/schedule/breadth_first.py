"""Schedules that run every forward before the first backward."""

from __future__ import annotations

from lightning_d9d.schedule.actions import Backward, Forward, Program


class GPipe:
    """All forwards, then all backwards, newest microbatch first (Huang et al. 2019, arXiv:1811.06965).

    Keeps the activations of every microbatch alive at once.
    """

    def program(self, num_microbatches: int) -> Program:
        """The actions of a single stage over `num_microbatches`."""
        forwards = [Forward(0, m) for m in range(num_microbatches)]
        backwards = [Backward(0, m) for m in reversed(range(num_microbatches))]
        return (*forwards, *backwards)
