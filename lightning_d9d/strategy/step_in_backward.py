"""Optimizer steps inside the backward: parameters are updated as soon as their gradients are complete.

[Note: parts of a step] The last backward of an accumulation window completes gradients. A gradient is complete when
autograd or FSDP2 has written it, or when the sum of its bucket has arrived. Complete parameters are collected until
their gradients take `part_bytes`. Then the optimizer steps with groups of only these parameters, and their gradients
are freed. The remaining parameters are updated by the one ordinary step, which Lightning and schedules count. These are
parameters in the last, smaller part, those of several stages, and those that are summed afterwards.

[Note: streams] FSDP2 calls hooks on the stream of its reduction, so each stream collects its own parts. On CUDA parts
are updated on a further stream, beside the products of the backward; it waits until the gradients of a part are
complete. Their memory belongs to the stream that computed them. That stream waits for the update when its next part is
complete, and then frees them. So at most two parts exist, however far the host is ahead. The backward ends with all
updates.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import lightning as L
import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop

from lightning_d9d.errors import ConfigError
from lightning_d9d.memory import part_bytes, weight_bytes
from lightning_d9d.mesh.sharding import local
from lightning_d9d.strategy.optimizer_step import OptimizerStep, hooks_on_gradients, scalars
from lightning_d9d.strategy.torn import TornWeights
from lightning_d9d.strategy.window import cast_gradients, scale_gradients
from lightning_d9d.sync.norm import SquaredNorms, clip_gradients_by_value

_EACH_ALONE = {ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop}
"""Optimizers of torch whose update of a parameter depends on no other; a subclass may behave differently."""


class StepInBackward:
    """Updates complete parameters during the backward. See [Note: parts of a step].

    Args:
        optimizer: The only optimizer.
        steps: Step that knows whether it skips on the device.
        torn: Notified when the first part is updated, and when the step is over.
        bucket_bytes: The size of a full bucket; see `part_bytes`.
    """

    def __init__(self, optimizer: Optimizer, steps: OptimizerStep, torn: TornWeights, bucket_bytes: int) -> None:
        self.torn = torn
        self.gone = SquaredNorms()
        """Squares of the gradients that this step has freed, if `keeps_norm`."""
        self.keeps_norm = False
        self.max_value: float | None = None
        """Elements of gradients are at most so far from 0; None: they are not clipped."""
        self.skip: Tensor | None = None
        """True if the step is left out, a bool on the device."""
        self.decision: Tensor | None = None
        """The same on the host, if the optimizer cannot look on the device."""
        self._optimizer = optimizer
        self._steps = steps
        self._bucket_bytes = self._part_bytes = bucket_bytes
        self._is_active = False
        self._factor: Tensor | None = None
        self._found_inf: Tensor | None = None
        self._group_of: dict[nn.Parameter, int] = {}
        self._taken: set[nn.Parameter] = set()
        self._parts: dict[torch.cuda.Stream | None, _Part] = {}
        self._under_way: dict[torch.cuda.Stream, _Update] = {}
        """The last update of each stream's gradients, which are still there. [Note: streams]."""
        self._own_streams: dict[torch.device, torch.cuda.Stream] = {}

    def begin(self, skip: Tensor | None, factor: Tensor | None) -> None:
        """Begin the last batch of a window. The host waits once if the optimizer does not skip on the device.

        Args:
            skip: A bool on the device: skip the whole step. None: never.
            factor: Factor of the gradients. None means no factor.
        """
        groups = self._optimizer.param_groups
        self._group_of = {parameter: index for index, group in enumerate(groups) for parameter in group["params"]}
        self._part_bytes = part_bytes(weight_bytes(self._group_of), self._bucket_bytes)
        self._taken.clear()
        self._parts.clear()
        self.gone.clear()
        on_device = skip is not None and self._steps.skips_on_device(self._optimizer)
        self.skip = skip
        self.decision = skip if skip is None or on_device else skip.cpu()
        self._found_inf = skip.float() if on_device and skip is not None else None
        self._is_active = on_device or self.decision is None or not self.decision.item()
        self._factor = factor

    def take(self, parameter: nn.Parameter) -> None:
        """Take a parameter whose gradient is complete, and update it now or with later ones.

        Sparse gradients are left to the ordinary step.

        Raises:
            RuntimeError: The gradient was already complete.
        """
        if not self._is_active or parameter.grad is None or parameter not in self._group_of:
            return
        if parameter.grad.layout != torch.strided:
            return
        if parameter in self._taken:
            raise RuntimeError(
                f"a parameter of shape {tuple(parameter.shape)} received a second gradient in the backward that "
                "updates it. Reentrant activation checkpointing and sharded modules that run twice do this: use "
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or leave step_in_backward out of "
                "D9DStrategy"
            )
        self._taken.add(parameter)
        gradient = local(parameter.grad)
        stream = torch.cuda.current_stream(gradient.device) if gradient.is_cuda else None
        part = self._parts.setdefault(stream, _Part())
        part.parameters.append(parameter)
        part.num_bytes += gradient.nbytes
        if part.num_bytes >= self._part_bytes:
            del self._parts[stream]
            self._update(part.parameters, stream)

    def take_rest(self, parameters: Iterable[nn.Parameter]) -> None:
        """Take those parameters that have not been taken yet; all their gradients are complete."""
        for parameter in parameters:
            if parameter not in self._taken:
                self.take(parameter)

    def end_backward(self) -> None:
        """Make the stream wait for all updates; remaining parameters keep their gradients. [Note: streams]."""
        self._is_active = False
        self._parts.clear()
        for stream in [*self._under_way]:
            torch.cuda.current_stream(stream.device).wait_event(self._under_way[stream].end)
            self._free(stream)

    def fail(self, error: BaseException) -> None:
        """Record after a failed backward that weights are torn, if they are, and wait as at its end."""
        self.torn.note(error)
        with suppress(RuntimeError):  # a device that is lost cannot wait either
            self.end_backward()

    @torch.no_grad()
    def _update(self, parameters: Sequence[nn.Parameter], stream: torch.cuda.Stream | None) -> None:
        """Make the optimizer's step for only these parameters, and take their gradients. [Note: streams]."""
        if stream is None:
            self._step(parameters)
            return
        gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
        own = self._stream_of_updates(stream)
        own.wait_stream(stream)
        if all(parameter in self._optimizer.state for parameter in parameters):
            with torch.cuda.stream(own):
                self._step(parameters)
        else:  # states are made where the memory of activations has become free
            stream.wait_stream(own)
            self._step(parameters)
            own.wait_stream(stream)
        self._free(stream)
        end = torch.cuda.Event()
        end.record(own)
        self._under_way[stream] = _Update(end, gradients)

    def _stream_of_updates(self, stream: torch.cuda.Stream) -> torch.cuda.Stream:
        """Return the stream of updates for gradients that are complete on a stream."""
        if stream.device not in self._own_streams:
            self._own_streams[stream.device] = torch.cuda.Stream(stream.device)
        return self._own_streams[stream.device]

    def _free(self, stream: torch.cuda.Stream) -> None:
        """Free the gradients of a stream's last update, when it is over."""
        update = self._under_way.pop(stream, None)
        if update is None:
            return
        stream.wait_event(update.end)
        for gradient in update.gradients:
            gradient.record_stream(stream)  # memory of another stream's must not be used again before

    def _step(self, parameters: Sequence[nn.Parameter]) -> None:
        """Update parameters on the current stream."""
        gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
        if self._factor is not None:
            scale_gradients(gradients, self._factor)
        if self.keeps_norm:
            self.gone.add(parameters)
        if self.max_value is not None:
            clip_gradients_by_value(parameters, self.max_value)
        cast_gradients(parameters, self._optimizer)
        self.torn.begin()
        with self._only(parameters), scalars(self._optimizer, self._found_inf):
            type(self._optimizer).step(self._optimizer)  # without the wrapper by which schedules count steps
        for parameter in parameters:
            parameter.grad = None

    @contextmanager
    def _only(self, parameters: Sequence[nn.Parameter]) -> Generator[None]:
        """Restrict a step of the optimizer to these parameters inside the block."""
        groups = self._optimizer.param_groups
        chosen: dict[int, list[nn.Parameter]] = defaultdict(list)
        for parameter in parameters:
            chosen[self._group_of[parameter]].append(parameter)
        all_of = {index: groups[index]["params"] for index in chosen}
        try:
            for index, members in chosen.items():
                groups[index]["params"] = members
            self._optimizer.param_groups = [groups[index] for index in sorted(chosen)]
            yield
        finally:
            self._optimizer.param_groups = groups
            for index, members in all_of.items():
                groups[index]["params"] = members


@dataclass
class _Part:
    """Complete parameters that are updated together."""

    parameters: list[nn.Parameter] = field(default_factory=list)
    num_bytes: int = 0
    """The size of their gradients."""


class _Update(NamedTuple):
    """The update of a part, on a separate stream."""

    end: torch.cuda.Event
    gradients: list[Tensor]
    """Gradients that are read until the update ends."""


class CompleteGradients:
    """Detects when gradients outside of buckets are complete, and passes their parameters to `take`.

    Args:
        of_stages: Parameters of a single stage, by its index, whose gradients are summed over no ranks.
        sharded: Parameters that FSDP2 reduces to the optimizer's form.
        steps: Takes them.
    """

    def __init__(
        self,
        of_stages: Mapping[int, Collection[nn.Parameter]],
        sharded: Mapping[int, Collection[nn.Parameter]],
        steps: StepInBackward,
    ) -> None:
        self.steps = steps
        self._of_stages = of_stages
        self._last: set[int] = set()
        """Stages whose last gradients of the window are being made."""
        self._handles = [
            parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, stage))
            for by_stage in (of_stages, sharded)
            for stage, parameters in by_stage.items()
            for parameter in parameters
            if parameter.requires_grad
        ]

    def begin(self) -> None:
        """Begin a batch."""
        self._last.clear()

    def last_backward(self, stage: int) -> None:
        """Record that the next gradients are the stage's last."""
        self._last.add(stage)

    def reduce(self, stage: int) -> None:
        """Record that all gradients of the stage exist; those that FSDP2 reduces now come next."""
        self.steps.take_rest(self._of_stages.get(stage, ()))
        self._last.add(stage)

    def remove(self) -> None:
        """Remove the hooks from the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _on_gradient(self, stage: int, parameter: nn.Parameter) -> None:
        if stage in self._last:
            self.steps.take(parameter)


def check_step_in_backward(
    module: L.LightningModule, optimizers: Sequence[Optimizer], plugin: Precision, *, offloads: bool, skips: bool
) -> None:
    """Raise `ConfigError` for settings that cannot be combined with updates inside the backward. Local.

    Args:
        module: Module attached to a Trainer, whose callbacks are checked, too.
        optimizers: The module's.
        plugin: Clips gradients.
        offloads: Whether sharded weights and gradients are in the host's memory.
        skips: Whether steps with infinite gradients are skipped.
    """
    trainer: Any = module.trainer
    by_value = trainer.gradient_clip_algorithm == "value"
    clips = bool(trainer.gradient_clip_val)
    own_clipping = type(plugin).clip_grad_by_value is not Precision.clip_grad_by_value
    optimizer = optimizers[0]
    name = type(optimizer).__name__
    is_alone = type(optimizer) in _EACH_ALONE or getattr(optimizer, "updates_each_alone", False)
    hooks = hooks_on_gradients(module)
    problems = {
        f"Trainer(gradient_clip_val={trainer.gradient_clip_val}) needs the norm of all gradients before the first "
        'update; limit each element instead, by gradient_clip_algorithm="value"': clips and not by_value,
        f"{type(plugin).__name__} clips values in a way of its own; use a plugin of Lightning's": clips
        and by_value
        and own_clipping,
        "skip_nonfinite=True needs the norm of all gradients before the first update; leave it out": skips,
        "ParallelConfig.offload=True keeps gradients in the host's memory, where none is saved; leave it out": offloads,
        f"{', '.join(hooks)} may look at gradients between backward and step, when most are gone; leave these hooks "
        "out": bool(hooks),
        f"{name} has hooks before or after its step, which they would see in parts; remove them": bool(
            optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
        ),
        f"it is not known that {name} updates each parameter by itself, without counting its steps; take AdamW, SGD or "
        "StochasticAdamW, or say so by the class attribute updates_each_alone = True": not is_alone,
    }
    for problem, applies in problems.items():
        if applies:
            raise ConfigError(f"D9DStrategy(step_in_backward=True): {problem}, or leave step_in_backward out")
