"""Weight gradients that wait: the mechanism of split backwards, for schedules that fill bubbles with them.

[Note: split backward]
A split backward first computes what the stage before waits for, the gradients of the stage's inputs, and later, when
there is nothing better to do, those of its weights (Qi et al. 2023, arXiv:2401.10241). Here the first phase is one
ordinary backward over the whole graph. Only, ops that know how (`linear`, `grouped_gemm`), called inside `defer`,
hide their weight from autograd: their backward returns the gradient of their input and notes a function of saved
tensors that will give the weight's. The second phase calls the noted functions. Whatever is not such an op has its
weight gradients computed in the first phase, with its inputs': always right, and only less to fill bubbles with. So
every graph is walked once, the way autograd walks it: outputs with several parts, weights met several times or shared,
functions of the user's own and recomputed activations need no care, and activations that no noted function needs are
freed by the first phase.

*The weight is hidden*, not given an undefined gradient, because autograd would pass that on to the parameter's hooks.
Therefore nothing in the stage's forward can itself ask autograd for the gradient of such a weight
(`torch.autograd.grad` says that it is not part of the graph; a `.backward()` called there leaves it out), nor
differentiate twice through such an op (it raises).

*Recomputation* (`torch.utils.checkpoint`) calls the ops again in the middle of a backward, perhaps on a thread of
autograd's own. They must save there exactly what they had saved in the forward, so they need to know that they are
inside `WeightGradients.backward`; the id of autograd's running graph task tells. What they record there is not hidden,
so a function that differentiates what it recomputes (the reentrant checkpoint) has all its gradients at once.
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

# New gradients that `accumulate` hands to autograd in one call: calls cost the host time, and gradients cost memory.
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
                f"one of the tensors of shapes {shapes} that a weight gradient needs was modified in place between the "
                "input backward and the weight backward. A parameter's gradient may share their memory: give the "
                "parameter's .grad memory of its own, or choose a schedule without split backwards"
            )
        return self.compute(*self.tensors)


class WeightGradients:
    """The weight gradients of one microbatch in one stage that wait for the weight backward.

    ```python
    gradients = WeightGradients()
    with defer(gradients):
        output = stage(x)
    gradients.backward(output, output_gradient)  # x.grad is there, and the gradients of what did not wait
    gradients.accumulate()  # the gradients of all weights are there
    ```

    Several objects may be under way at once, in several threads, too. See [Note: split backward].
    """

    def __init__(self) -> None:
        self._notes: dict[Tensor, list[_Note]] = {}
        self._stream: torch.cuda.Stream | None = None  # of the running backward, where it is one of CUDA tensors
        self._in_backward = False

    def backward(
        self, outputs: Tensor | GradientEdge | Sequence[Tensor] | Sequence[GradientEdge], gradients: Any = None
    ) -> None:
        """The input backward: `torch.autograd.backward(outputs, gradients)`, in which what is deferred is only noted.

        May be called several times before `accumulate`, with outputs of one forward. It keeps the tensors in
        `gradients` until then: do not reuse their memory. An exception of the backward leaves nothing noted.
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
        """Note that `compute(*tensors)` is a part of the gradient of `weight`; called by the backward of an op.

        Outside of `WeightGradients.backward` nothing is noted: then somebody asked for other gradients than those of
        the weights, in the middle of the stage's forward.

        Args:
            weight: A leaf, on which the op's own node in the graph does not depend.
            compute: Called without grad mode by `accumulate`. For a DTensor it may give this rank's part.
            tensors: All that it needs; kept until then, and not to be modified in place.

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
                to_local = getattr(tensor, "to_local", None)  # a DTensor is none of the allocator's
                (to_local() if to_local else tensor).record_stream(stream)  # the weight backward reads it there
        tensors = tuple(tensor.detach() for tensor in tensors)
        note = _Note(compute, tensors, tuple(tensor._version for tensor in tensors))
        self._notes.setdefault(weight, []).append(note)

    @property
    def noted(self) -> list[Tensor]:
        """The tensors that `accumulate` will read."""
        return [tensor for notes in self._notes.values() for note in notes for tensor in note.tensors]

    def accumulate(self) -> None:
        """The weight backward: add what was deferred into the `.grad` of the weights, and forget it.

        As a backward does, it calls the hooks of each weight once, with the sum of its parts, and adds in place where
        there is a gradient. Noted tensors are freed one after the other. Runs on the current stream, which must be that
        of `backward`.

        Raises:
            RuntimeError: A tensor that is needed has been modified in place. What was noted is lost then.
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
    """On its device. `torch.cuda.current_stream` would make an object for every weight of every microbatch."""
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
_split_tasks: set[int] = set()  # ids of the graph tasks, never used again, of running `WeightGradients.backward`s

AT_ONCE = WeightGradients()
"""Takes nothing: the op is to be recorded as inside `defer`, with its weight in the graph."""


@contextmanager
def defer(gradients: WeightGradients | None) -> Iterator[None]:
    """Ops called inside, in this thread, leave their weight gradients to `gradients`; None: compute them as ever.

    To be opened around the forward of a stage, of a microbatch whose backward is split. Then `gradients.backward` and
    `gradients.accumulate` make one full backward; an ordinary one would leave out the weights of these ops.
    """
    previous, _thread.gradients = _thread.gradients, gradients
    try:
        yield
    finally:
        _thread.gradients = previous


def receiver(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> WeightGradients | None:
    """Who takes the weight gradients of an op that is being called; `AT_ONCE` in a recomputation, None: nobody.

    Nobody does outside `defer`; for a weight or bias that is not a leaf, since gradients must go on from there; for a
    frozen weight; for an `x` without gradient, since there is nothing to do first; inside `torch.compile` and
    transformations such as vmap.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return None
    gradients = AT_ONCE if torch._C._current_graph_task_id() in _split_tasks else _thread.gradients
    if gradients is None or not (torch.is_grad_enabled() and x.requires_grad and weight.requires_grad):
        return None
    return gradients if weight.is_leaf and (bias is None or bias.is_leaf) else None
