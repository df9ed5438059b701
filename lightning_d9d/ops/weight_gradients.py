"""Deferred weight gradients: the mechanism of split backwards, for schedules that fill bubbles with them.

[Note: split backward] A split backward first computes the gradients of the stage's inputs, for which the previous stage
waits. Later, when the rank would idle, it computes those of its weights (Qi et al. 2023, arXiv:2401.10241). Here the
first phase is one ordinary backward over the whole graph. But ops that support it (`linear`, `grouped_gemm`), called
inside `defer`, hide their weight from autograd. Their backward returns the gradient of their input, and records a
function of saved tensors for the gradient of the weight. The second phase calls the recorded functions. Weight
gradients of other ops are computed in the first phase, with those of inputs. This is always correct, and only leaves
less work to fill bubbles. So autograd walks every graph once. Outputs with several parts, shared weights, the user's
own functions and recomputed activations work without special care. The first phase frees all activations that recorded
functions do not need.

*The weight is hidden*, instead of having an undefined gradient, because autograd would pass such a gradient to the
parameter's hooks. Therefore the stage's forward cannot itself ask autograd for the gradient of such a weight.
`torch.autograd.grad` raises that it is not part of the graph, and a `.backward()` called there leaves it out.
Differentiating twice through such an op raises an error.

*Recomputation* (`torch.utils.checkpoint`) calls the ops again in the middle of a backward, perhaps on a thread of
autograd's own. There they must save exactly the tensors that they saved in the forward. So they must know that they are
inside `WeightGradients.backward`: the id of autograd's running graph task shows it. Weights recorded there are not
hidden. So a function that differentiates its recomputation (the reentrant checkpoint) gets all its gradients at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from lightning_d9d.ops.sharded_weights import as_gradient

# Number of new gradients that `accumulate` passes to autograd in one call: calls cost host time, gradients memory.
_BYTES_AT_ONCE = 256 * 2**20


@dataclass(frozen=True)
class _Note:
    compute: Callable[..., Tensor]
    tensors: tuple[Tensor, ...]
    versions: tuple[int, ...]

    def gradient(self) -> Tensor:
        if self.versions != tuple(tensor._version for tensor in self.tensors):
            shapes = [tuple(tensor.shape) for tensor in self.tensors]
            raise RuntimeError(
                f"one of the tensors of shapes {shapes} that a weight gradient needs was modified in place between "
                "input and weight backward. A parameter's gradient may share their memory. Give the parameter's .grad "
                "separate memory, or choose a schedule without split backwards"
            )
        return self.compute(*self.tensors)


class WeightGradients:
    """The deferred weight gradients of one microbatch in one stage.

    ```python
    gradients = WeightGradients()
    with defer(gradients):
        output = stage(x)
    gradients.backward(output, output_gradient)  # x.grad is complete, and so are gradients that were not deferred
    gradients.accumulate()  # the gradients of all weights are complete
    ```

    Several objects may be in use at once, also in several threads. `ops/weight_gradients.py` describes what a split
    backward is.
    """

    def __init__(self) -> None:
        self._notes: dict[Tensor, list[_Note]] = {}
        self._stream: torch.cuda.Stream | None = None  # of the running backward, if it is on CUDA
        self._in_backward = False

    def backward(
        self, outputs: Tensor | GradientEdge | Sequence[Tensor] | Sequence[GradientEdge], gradients: Any = None
    ) -> None:
        """Run the input backward: `torch.autograd.backward(outputs, gradients)`, which only records deferred gradients.

        It may be called several times before `accumulate`, with outputs of one forward. It keeps the tensors in
        `gradients` until then: do not reuse their memory. After an exception nothing is recorded.
        """
        tasks: list[int] = []

        def on_start(_: object) -> None:
            tasks.append(torch._C._current_graph_task_id())
            _split_tasks.add(tasks[-1])

        roots = [outputs] if isinstance(outputs, Tensor | GradientEdge) else outputs
        nodes = [root.grad_fn if isinstance(root, Tensor) else root.node for root in roots]
        handles = [node.register_prehook(on_start) for node in nodes if node is not None]
        if torch.cuda.is_initialized():
            self._stream = torch.cuda.current_stream()
        self._in_backward = True
        try:
            torch.autograd.backward(outputs, gradients)
        except BaseException:
            self._notes.clear()
            raise
        finally:
            self._in_backward = False
            _split_tasks.difference_update(tasks)
            for handle in handles:
                handle.remove()

    def add(self, weight: Tensor, compute: Callable[..., Tensor], *tensors: Tensor) -> None:
        """Record that `compute(*tensors)` is a part of the gradient of `weight`; called by the backward of an op.

        Outside of `WeightGradients.backward` nothing is recorded: there the stage's forward itself requested gradients
        other than the weights'.

        Args:
            weight: A leaf on which the op's own node in the graph does not depend.
            compute: Function that `accumulate` calls without grad mode. For a DTensor it may return this rank's part.
            tensors: Tensors for `compute`; they are kept until then, and must not be modified in place.

        Raises:
            RuntimeError: The backward is itself recorded (`create_graph=True`).
        """
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a stage differentiates twice through an op whose weight gradient is deferred; choose a schedule "
                "without split backwards"
            )
        if not self._in_backward:
            return
        stream = self._stream
        if stream is not None and weight.is_cuda and not _is_current(stream):
            for tensor in tensors:
                to_local = getattr(tensor, "to_local", None)  # a DTensor itself has no memory of the allocator
                (to_local() if to_local else tensor).record_stream(stream)  # the weight backward reads it there
        tensors = tuple(tensor.detach() for tensor in tensors)
        note = _Note(compute, tensors, tuple(tensor._version for tensor in tensors))
        self._notes.setdefault(weight, []).append(note)

    @property
    def noted(self) -> list[Tensor]:
        """Return the tensors that `accumulate` will read."""
        return [tensor for notes in self._notes.values() for note in notes for tensor in note.tensors]

    def accumulate(self) -> None:
        """Run the weight backward: add deferred gradients into the `.grad` of the weights, and forget them.

        Like a backward, it calls the hooks of each weight once, with the sum of its parts, and adds in place to an
        existing gradient. Recorded tensors are freed one after the other. It runs on the current stream, which must be
        that of `backward`.

        Raises:
            RuntimeError: A needed tensor has been modified in place. The recorded gradients are then lost.
        """
        notes, self._notes = self._notes, {}
        while notes:
            weights: list[Tensor] = []
            gradients: list[Tensor] = []
            num_bytes = 0
            while notes and num_bytes < _BYTES_AT_ONCE:
                weight = next(iter(notes))
                weights.append(weight)
                gradient = _sum(notes.pop(weight))
                gradients.append(as_gradient(gradient, weight))
                num_bytes += gradient.nbytes
            torch.autograd.backward(weights, gradients)


def _is_current(stream: torch.cuda.Stream) -> bool:
    """Return whether this is its device's current stream, without making an object like `torch.cuda.current_stream`."""
    return stream.cuda_stream == torch._C._cuda_getCurrentRawStream(stream.device_index)


@torch.no_grad()
def _sum(notes: list[_Note]) -> Tensor:
    gradient = notes.pop(0).gradient()
    while notes:
        gradient = gradient + notes.pop(0).gradient()
    return gradient


class _Thread(threading.local):
    gradients: WeightGradients | None = None


_thread = _Thread()
_split_tasks: set[int] = set()  # ids, never reused, of the graph tasks of running `WeightGradients.backward` calls

AT_ONCE = WeightGradients()
"""Marker for a recomputation, which defers nothing: the op is recorded as inside `defer`, but with its weight in the
graph."""


@contextmanager
def defer(gradients: WeightGradients | None) -> Iterator[None]:
    """Make ops called inside, in this thread, defer their weight gradients to `gradients`; None does not defer.

    Use it around a stage's forward for a microbatch whose backward is split. Then `gradients.backward` and
    `gradients.accumulate` make one full backward; an ordinary backward would leave out the weights of these ops.
    """
    previous, _thread.gradients = _thread.gradients, gradients
    try:
        yield
    finally:
        _thread.gradients = previous


def receiver(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> WeightGradients | None:
    """Return the object that defers the weight gradients of the called op; `AT_ONCE` in a recomputation, else None.

    Gradients are not deferred outside `defer`, for a frozen weight, and inside `torch.compile` and transformations such
    as vmap. They are not deferred either for a weight or bias that is not a leaf, because gradients must flow on from
    it. Nor are they for an `x` without gradient, because then there is nothing to compute first.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return None
    gradients = AT_ONCE if torch._C._current_graph_task_id() in _split_tasks else _thread.gradients
    if gradients is None or not (torch.is_grad_enabled() and x.requires_grad and weight.requires_grad):
        return None
    return gradients if weight.is_leaf and (bias is None or bias.is_leaf) else None
