"""A running stage: its module, and the state of each microbatch from forward to backward.

[Note: what is kept] Between forward and backward a microbatch keeps its graph and the inputs that get a gradient. The
edges of the outputs that need a gradient hold the graph. Outputs themselves are not kept: they are freed when they are
sent. After an input backward only the inputs of weight gradients stay (`lightning_d9d.ops.weight_gradients`), and after
the last backward nothing.

[Note: one memory] A parameter's first gradient of a window may be any tensor of autograd. It may share memory with the
gradient of an input or of another parameter (`x.view(shape) + weight.view(shape)`). Later gradients are added to it in
place. The input's gradient may then still wait to be sent to the previous stage, or be on its way. So overlapping
gradients are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_d9d.mesh.sharding import local
from lightning_d9d.ops.linear import split_linears
from lightning_d9d.ops.weight_gradients import WeightGradients, defer
from lightning_d9d.pipeline.types import CountsTokens


@dataclass
class _Microbatch:
    """The state of a microbatch. See [Note: what is kept]."""

    inputs: list[Tensor]
    edges: list[GradientEdge] = field(default_factory=list)
    weights: WeightGradients | None = None


class Stage:
    """A stage's module, which runs the forwards and backwards of microbatches in any order.

    Args:
        module: The stage's part of the model.
        before_first: Called with the module and its arguments before its first forward.
    """

    def __init__(
        self,
        module: nn.Module,
        before_first: Callable[[nn.Module, Sequence[Any], Mapping[str, Any]], None] | None = None,
    ) -> None:
        self.module = module
        self.before_first = before_first
        self._unsplit: Callable[[], None] | None = None
        self._live: dict[int, _Microbatch] = {}
        self._without_gradient: list[nn.Parameter] | None = None
        """Parameters without a gradient in this batch; None before its first backward."""

    def begin(self) -> None:
        """Begin a batch."""
        self._without_gradient = None

    def forward(
        self,
        microbatch: int,
        inputs: Sequence[Tensor],
        received: Any,
        arguments: Mapping[str, Any],
        splits_backward: bool,
    ) -> Any:
        """Run the module's forward and return its output.

        Args:
            microbatch: Index of the microbatch.
            inputs: Tensors of `received` that get a gradient, in order.
            received: Output of the previous stage; None on the first stage.
            arguments: Keyword arguments of this stage.
            splits_backward: True if its backward is split in two halves, so weight gradients are deferred.
        """
        if not torch.is_grad_enabled():
            return self._call(received, arguments)
        if splits_backward and self._unsplit is None:
            self._unsplit = split_linears(self.module)
        live = self._live[microbatch] = _Microbatch(
            list(inputs), weights=WeightGradients() if splits_backward else None
        )
        if live.weights is None:
            return self._call(received, arguments)
        with defer(live.weights):
            return self._call(received, arguments)

    @contextmanager
    def without_counting(self) -> Generator[None]:
        """Keep modules that count tokens from counting those of a dummy microbatch."""
        counting = [module for module in self.module.modules() if isinstance(module, CountsTokens)]
        for module in counting:
            module.counts_tokens = False
        try:
            yield
        finally:
            for module in counting:
                module.counts_tokens = True

    def _call(self, received: Any, arguments: Mapping[str, Any]) -> Any:
        positional = () if received is None or isinstance(received, Mapping) else (received,)
        named = {**received, **arguments} if isinstance(received, Mapping) else arguments
        before, self.before_first = self.before_first, None
        try:
            if before is not None:
                before(self.module, positional, named)
            return self.module(*positional, **named)
        except TypeError as error:
            what = [f"a {type(each).__name__}" for each in positional] + list(named)
            error.add_note(f"{type(self.module).__name__}.forward was called with {', '.join(what) or 'nothing'}")
            raise

    def keep(self, microbatch: int, outputs: Sequence[Tensor]) -> None:
        """Keep the graph of the outputs (or of the loss) for the backward, but not the outputs."""
        self._live[microbatch].edges = [get_gradient_edge(output) for output in outputs if output.requires_grad]

    def backward(self, microbatch: int, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Run the whole backward. Returns the gradients of the inputs, and forgets the microbatch.

        Args:
            microbatch: Index of the microbatch.
            gradients: Gradients of the outputs that need one, in order.
        """
        of_inputs = self.backward_input(microbatch, gradients)
        self.backward_weight(microbatch)
        return of_inputs

    def backward_input(self, microbatch: int, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Run the backward like `backward`, but without the weight gradients that can be deferred."""
        live = self._live[microbatch]
        edges, inputs = live.edges, live.inputs
        live.edges, live.inputs = [], []
        first = self._without_gradient
        if first is None:
            first = [parameter for parameter in self.module.parameters() if parameter.grad is None]
        if edges:
            run = torch.autograd.backward if live.weights is None else live.weights.backward
            run(edges, gradients)
        taken = [torch.zeros_like(each) if each.grad is None else each.grad for each in inputs]
        for each in inputs:
            each.grad = None
        if first:
            _keep_apart(first, taken if live.weights is None else [*taken, *live.weights.noted])
        if first or self._without_gradient is None:
            self._without_gradient = [parameter for parameter in first if parameter.grad is None]
        return taken

    def backward_weight(self, microbatch: int) -> None:
        """Compute the deferred weight gradients, and forget the microbatch."""
        weights = self._live.pop(microbatch).weights
        if weights is not None:
            weights.accumulate()

    def drop(self) -> None:
        """Forget all microbatches, after an error."""
        self._live.clear()

    def close(self) -> None:
        """Restore the module."""
        self.drop()
        if self._unsplit is not None:
            self._unsplit()
            self._unsplit = None


def _keep_apart(parameters: Iterable[nn.Parameter], others: Iterable[Tensor]) -> None:
    """Copy gradients that overlap with other tensors or with one another. See [Note: one memory]."""
    received = [parameter for parameter in parameters if parameter.grad is not None]
    if not received:
        return
    extents = [(*_extent(other), None) for other in others]
    extents += [(*_extent(parameter.grad), parameter) for parameter in received if parameter.grad is not None]
    overlapping: list[nn.Parameter | None] = []
    end = 0
    for start, stop, owner in sorted(extents, key=lambda extent: extent[:2]):
        if start >= end:
            _separate(overlapping)
            overlapping = []
        overlapping.append(owner)
        end = max(end, stop)
    _separate(overlapping)


def _separate(owners: list[nn.Parameter | None]) -> None:
    """Copy the gradients of all parameters except one; of all if other tensors (None) are not among the owners."""
    parameters = [owner for owner in owners if owner is not None]
    for parameter in parameters[0 if None in owners else 1 :]:
        assert parameter.grad is not None
        parameter.grad = parameter.grad.clone()


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Return the tensor's first address and the one after its last.

    Gradients in a bucket share a storage without overlap.
    """
    tensor = local(tensor)
    if tensor.numel() == 0:
        return 0, 0
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + elements * tensor.element_size()
