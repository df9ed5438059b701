"""Kernels of a backward are compiled while the forward runs.

[Note: compiling ahead] A first step meets its kernels one after the other, and each waits for its compiler. But an
operator's forward determines everything about its backward. So its first calls start a thread that runs the backward
with tensors that have no values. In that thread, kernels are compiled and not launched. Several threads compile
concurrently. A real backward that starts before they have finished waits only for the lock of its own kernel; see
`lightning_d9d.ops.kernels.compiling`. Once it has run, forwards start no more threads.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from lightning_d9d.log import logger

_MOST_AT_A_TIME = 8
"""Maximum number of running compilers, each a process or a thread: those of other ranks need processors, too."""
THREAD_PREFIX = "compiles "
"""Beginning of the names of threads that compile ahead."""
_slots = threading.Semaphore(min(_MOST_AT_A_TIME, os.cpu_count() or 1))
_of_thread = threading.local()


def only_compiles() -> bool:
    """Return True in a thread whose kernels are compiled and not launched."""
    return getattr(_of_thread, "only_compiles", False)


class BackwardAhead:
    """The backward of one operator, to be compiled for each form of arguments that its forward is called with.

    Args:
        name: Name of the operator.
        fake: Function that returns the operator's results without values.
        setup_context: Function that saves the tensors for `backward`.
        backward: Function that returns the gradients.
    """

    def __init__(
        self,
        name: str,
        fake: Callable[..., Any],
        setup_context: Callable[[Any, tuple[Any, ...], Any], None],
        backward: Callable[..., Any],
    ) -> None:
        def forward(ctx: Any, *args: Any) -> Any:
            output = fake(*args)
            setup_context(ctx, args, output)
            return output

        self._name = name
        self._apply = type(
            name, (Function,), {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        ).apply
        self._seen: set[tuple[Any, ...]] = set()

    def start(self, args: tuple[Any, ...]) -> None:
        """Begin to compile in a thread, unless arguments of this form have been seen before. Local.

        Args:
            args: Arguments of the forward.
        """
        device = next((arg.device for arg in args if isinstance(arg, Tensor)), None)
        if device is None or not _has_compiler(device):
            return
        form = tuple(map(_form_of, args))
        if form in self._seen:
            return
        self._seen.add(form)
        # not a daemon: a process that ends inside of the compiler would abort
        threading.Thread(target=self._run, args=(form, device), name=THREAD_PREFIX + self._name, daemon=False).start()

    def _run(self, form: tuple[Any, ...], device: torch.device) -> None:
        _of_thread.only_compiles = True
        try:
            with _slots:
                _set_device(device)
                args = [each.empty() if isinstance(each, _Form) else each for each in form]
                inputs = [arg for arg in args if isinstance(arg, Tensor) and arg.requires_grad]
                outputs = self._apply(*args)
                outputs = outputs if isinstance(outputs, tuple) else (outputs,)
                wanted = [output for output in outputs if output.requires_grad and output.numel()]
                gradients = [torch.empty_like(output) for output in wanted]
                torch.autograd.grad(wanted, inputs, gradients, allow_unused=True)
        except Exception:  # the real backward compiles what it needs, and says what fails there
            logger.debug("the backward of %s was not compiled ahead", self._name, exc_info=True)


class _Form(tuple[Any, ...]):
    """The properties of a tensor that compilers see."""

    def empty(self) -> Tensor:
        size, stride, dtype, requires_grad = self
        return torch.empty_strided(size, stride, dtype=dtype, device="meta", requires_grad=requires_grad)


def _form_of(arg: Any) -> Any:
    if isinstance(arg, Tensor):
        return _Form((arg.shape, arg.stride(), arg.dtype, arg.requires_grad))
    return arg


def _has_compiler(device: torch.device) -> bool:
    return device.type == "cuda" and os.environ.get("TRITON_INTERPRET") != "1"


def _set_device(device: torch.device) -> None:
    torch.cuda.set_device(device)
