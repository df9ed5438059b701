"""The forward of one microbatch and the backward of another take turns, which change where tokens go to experts.

[Note: turns] Forwards and backwards are calls of Python and autograd that cannot be interrupted from outside. So the
backward has a thread, and each of the two gives way where it sends a message. The device then has the computation of
both in one stream, in turns, and messages of one run beside the computation of the other. One thread runs at a time, so
nothing else needs a lock. The order of turns follows from the program, never from time.

The backward runs in its own thread, not in autograd's thread of the device. Otherwise it would block that thread while
it waits for its turn, and a loss that calls `torch.autograd.grad` would wait forever. All pairs use one thread, because
cuDNN builds its kernels of attention again in each.
"""

from __future__ import annotations

import contextvars
import functools
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_d9d.ops.messages import taking_turns

FORWARD, BACKWARD = 0, 1


class _ProcessState(NamedTuple):
    """Variables of the process that forwards and recomputations set: each action has its own."""

    dtype: torch.dtype
    random: Tensor
    random_of_device: Tensor | None


class _Stopped(BaseException):
    """Ends an action because the other one has failed."""


class _Thread:
    """Runs one function after the other.

    It is a daemon, unlike the threads of `concurrent.futures`: a process ends also if an exception left it waiting.
    """

    def __init__(self) -> None:
        self._functions: SimpleQueue[Callable[[], None]] = SimpleQueue()
        threading.Thread(target=self._run, name="backward of a pair", daemon=True).start()

    def begin(self, function: Callable[[], None]) -> None:
        self._functions.put(function)

    def _run(self) -> None:
        while True:
            self._functions.get()()


_idle: list[_Thread] = []
"""The thread of the last pair; empty during a pair, and after one that an exception left before its end."""


class Turns:
    """Runs the forward and the backward of a pair in turns. See [Note: turns].

    Args:
        device: Device of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = _stream_of_messages(device) if device.type == "cuda" else None
        self._running = FORWARD
        self._gates = threading.Lock(), threading.Lock()
        for gate in self._gates:
            gate.acquire()
        self._is_done = [False, False]
        self._has_ended = threading.Event()
        self._states = [self._state(), self._state()]
        self._failure: BaseException | None = None

    def run(self, forward: Callable[[], None], backward: Callable[[], None]) -> None:
        """Run both to their ends, the backward in another thread. Local.

        Random numbers continue from those of the forward. A backward that draws some outside of recomputations gets the
        same as the forward.

        Raises:
            BaseException: The first failure of either; the other ends at its next message.
        """
        stream = torch.cuda.current_stream(self.device) if self.stream else None

        def beside() -> None:
            if stream is not None:
                torch.cuda.set_stream(stream)  # and its device
            with torch.autograd.set_multithreading_enabled(False):
                backward()

        def in_thread() -> None:
            try:
                self._wait(BACKWARD)
                self._act(BACKWARD, beside)
            finally:
                self._has_ended.set()

        thread = _idle.pop() if _idle else _Thread()
        thread.begin(partial(contextvars.copy_context().run, in_thread))
        with taking_turns(self):
            self._act(FORWARD, forward)
            self._insist(lambda: not self._has_ended.is_set(), self._has_ended.wait)
        if self._is_done[BACKWARD]:
            _idle.append(thread)
        failure, self._failure = self._failure, None
        with nullcontext() if failure is None else suppress(RuntimeError):  # of a lost device
            self._take_state(FORWARD)
        if failure is not None:
            try:
                raise failure
            finally:
                del failure  # a cycle with this frame would keep activations alive

    def give_way(self) -> None:
        """Let the other action run until it gives way, too, or ends. Local."""
        own, other = self._running, 1 - self._running
        if not self._is_done[other]:
            self._states[own] = self._state()
            self._pass_to(other)
            self._wait(own)
            self._take_state(own)
        if self._failure is not None:
            raise _Stopped

    def _act(self, side: int, action: Callable[[], None]) -> None:
        try:
            if self._failure is None:
                self._take_state(side)
                action()
        except _Stopped:
            pass
        except BaseException as error:
            self._failure = self._failure or error
        try:
            self._states[side] = self._state()
        except BaseException as error:  # of a lost device
            self._failure = self._failure or error
        self._is_done[side] = True
        if not self._is_done[1 - side]:
            self._pass_to(1 - side)

    def _pass_to(self, side: int) -> None:
        self._running = side
        if self._gates[side].locked():
            self._gates[side].release()

    def _wait(self, side: int) -> None:
        self._insist(lambda: self._running != side, self._gates[side].acquire)

    def _insist(self, goes_on: Callable[[], bool], wait: Callable[[], object]) -> None:
        """Wait to the end: what a signal handler raises meanwhile stops both actions, at their next messages."""
        while goes_on():
            try:
                wait()
            except BaseException as error:
                self._failure = self._failure or error

    def _state(self) -> _ProcessState:
        on_device = torch.cuda.get_rng_state(self.device) if self.stream else None
        return _ProcessState(torch.get_default_dtype(), torch.get_rng_state(), on_device)

    def _take_state(self, side: int) -> None:
        state = self._states[side]
        torch.set_default_dtype(state.dtype)
        torch.set_rng_state(state.random)
        if state.random_of_device is not None:
            torch.cuda.set_rng_state(state.random_of_device, self.device)


@functools.cache
def _stream_of_messages(device: torch.device) -> torch.cuda.Stream:
    """Return the same stream for all pairs, so that they use the same memory."""
    return torch.cuda.Stream(device, priority=-1)
