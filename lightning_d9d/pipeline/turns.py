"""Two actions of a rank that take turns: one runs on the host at a time, until it sends tokens to experts.

[Note: turns] The forward of one microbatch and the backward of another are Python and autograd calls that cannot be
interrupted from outside. So the second one has a thread, and each gives way where it sends a message. The device then
has the computation of both in one stream, in turns, and messages of one run beside the computation of the other. One
thread runs at a time, so nothing else needs a lock. The order of turns follows from the program, never from time.

The second action's backward runs in its own thread, not in autograd's thread of the device. Otherwise it would block
that thread while it waits for its turn, and a loss that calls `torch.autograd.grad` would wait forever.
"""

from __future__ import annotations

import contextvars
import functools
import threading
from collections.abc import Callable
from contextlib import nullcontext

import torch

from lightning_d9d.ops.messages import taking_turns

_RandomState = tuple[torch.Tensor, torch.Tensor | None]


class _Stopped(BaseException):
    """Ends an action because the other one has failed."""


class Turns:
    """Runs two actions in turns. See [Note: turns].

    Args:
        device: Device of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = _stream_of_messages(device) if device.type == "cuda" else None
        self._running = 0
        self._gates = threading.Semaphore(0), threading.Semaphore(0)
        self._is_done = [False, False]
        self._states: dict[int, _RandomState] = {}
        """States of random numbers where an action gave way, or ended, by action."""
        self._failure: BaseException | None = None

    def run(self, first: Callable[[], None], second: Callable[[], None]) -> None:
        """Run both to their ends, the second one in another thread. Local.

        Raises:
            BaseException: The first failure of either; the other ends at its next message.
        """
        inside = torch.cuda.stream(torch.cuda.current_stream(self.device)) if self.stream else nullcontext()
        context = contextvars.copy_context()

        def beside() -> None:
            self._wait(1)
            with inside, torch.autograd.set_multithreading_enabled(False):
                self._act(1, second)

        thread = threading.Thread(target=context.run, args=(beside,), name="second of a pair", daemon=True)
        thread.start()
        with taking_turns(self):
            self._act(0, first)
            self._insist(thread.join)
        if self._failure is not None:
            raise self._failure
        self._take_random_state(self._states[0])  # not that of a recomputation in the second one

    def give_way(self) -> None:
        """Let the other action run until it gives way, too, or ends. Local."""
        own, other = self._running, 1 - self._running
        if not self._is_done[other]:
            self._keep_random_state(own)
            self._pass_to(other)
            self._wait(own)
            self._take_random_state(self._states[own])
        if self._failure is not None:
            raise _Stopped

    def _act(self, side: int, action: Callable[[], None]) -> None:
        try:
            if self._failure is None:
                action()
            self._keep_random_state(side)
        except _Stopped:
            pass
        except BaseException as error:
            self._failure = self._failure or error
        self._is_done[side] = True
        if not self._is_done[1 - side]:
            self._pass_to(1 - side)

    def _pass_to(self, side: int) -> None:
        self._running = side
        self._gates[side].release()

    def _wait(self, side: int) -> None:
        self._insist(self._gates[side].acquire)

    def _insist(self, wait: Callable[[], object]) -> None:
        """Wait to the end: what a signal handler raises meanwhile stops both actions, at their next messages."""
        is_over = False
        while not is_over:
            try:
                wait()
                is_over = True
            except BaseException as error:
                self._failure = self._failure or error

    def _keep_random_state(self, side: int) -> None:
        on_device = torch.cuda.get_rng_state(self.device) if self.stream else None
        self._states[side] = torch.get_rng_state(), on_device

    def _take_random_state(self, state: _RandomState) -> None:
        on_host, on_device = state
        torch.set_rng_state(on_host)
        if on_device is not None:
            torch.cuda.set_rng_state(on_device, self.device)


@functools.cache
def _stream_of_messages(device: torch.device) -> torch.cuda.Stream:
    """Return the same stream for all pairs, so that they use the same memory."""
    return torch.cuda.Stream(device, priority=-1)
