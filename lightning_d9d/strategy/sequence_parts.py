"""The first look at stages that get parts of sequences: `lightning_d9d.parallel.probe` on what a batch gives them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_d9d.errors import ConfigError
from lightning_d9d.mesh.agreement import Ranks
from lightning_d9d.parallel.fsdp import reset
from lightning_d9d.parallel.probe import Loss, apart, check_inputs, probe
from lightning_d9d.parallel.token_axis import TokenAxis
from lightning_d9d.pipeline.executor import Cut
from lightning_d9d.pipeline.types import WeightedLoss

if TYPE_CHECKING:
    from lightning_d9d.strategy.module import D9DModule


def check_parts_of_sequences(
    module: D9DModule, microbatch: Any, forward_context: Callable[[], AbstractContextManager] = nullcontext
) -> None:
    """See that stages and hooks take parts of sequences, where ranks share them: in a run's first batch of each mode.

    Collective over the ranks that share the batch.

    Raises:
        ConfigError: A module mixes or counts the tokens of its own rank; on all of these ranks. See `probe`.
    """
    axis = _token_axis(module, microbatch)
    if axis is None or module.training in module.takes_parts:
        return
    module.takes_parts.add(module.training)
    mesh, problems, modes = module.pipeline.mesh, list[ConfigError](), dict[nn.Module, bool]()
    assert mesh is not None
    name = type(module).__name__

    def inputs_of(microbatch: Any) -> Mapping[str, Any]:
        inputs = module.microbatch_inputs(microbatch)
        return {**inputs.first, **inputs.shared}

    def make_loss(output: Any, microbatch: Any) -> list[Tensor]:
        with forward_context():
            loss = module.microbatch_loss(output, microbatch)
        numbers = (loss.value_sum, loss.weight) if isinstance(loss, WeightedLoss) else (loss,)
        return [torch.as_tensor(number) for number in numbers]

    has_loss = not module.trainer.predicting
    loss = Loss(make_loss, microbatch, f"{name}.microbatch_loss or the last stage") if has_loss else None
    last = module.indexed_stages.get(len(module.pipeline.placement) - 1)

    def look(stage: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        try:
            probe(stage, args, kwargs, mesh, axis, modes=modes, loss=loss if stage is last else None)
        except ConfigError as problem:
            problems.append(problem)

    executor = module.executor(forward_context, look)
    try:
        with module.schedule_running(), apart(module.stages) as before:
            modes.update(before)
            try:
                check_inputs(inputs_of, microbatch, f"{name}.microbatch_inputs", mesh, axis)
            except ConfigError as problem:
                problems.append(problem)
            executor.outputs(module.pipeline.forward_only(1), Cut([microbatch], [None], 1), lambda output: None)
    finally:
        reset([each for each in module.stages.modules() if isinstance(each, FSDPModule)])
    with Ranks(module.pipeline.readers).agreed(f"{name} cannot train on parts of sequences"):
        if problems:
            raise problems[0]


def _token_axis(module: D9DModule, microbatch: Any) -> TokenAxis | None:
    """How to find tokens in what stages compute from a microbatch; None where ranks do not share sequences."""
    tokens = module.pipeline.tokens
    if tokens.multiple == 1 or not isinstance(microbatch, Mapping):
        return None
    for name, dim in module.sequence_dims.items():
        if isinstance(tensor := microbatch.get(name), Tensor):
            return TokenAxis.of(tokens, tensor.numel() // tensor.shape[dim], tensor.shape[dim])
    return None
