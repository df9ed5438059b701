"""The first look at stages that get parts of sequences: `lightning_d9d.parallel.probe` on what a batch gives them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_d9d.errors import ConfigError
from lightning_d9d.mesh.agreement import Ranks
from lightning_d9d.parallel.fsdp import reset
from lightning_d9d.parallel.probe import TokenAxis, apart, probe
from lightning_d9d.pipeline.executor import Cut

if TYPE_CHECKING:
    from lightning_d9d.strategy.module import D9DModule


def check_parts_of_sequences(
    module: D9DModule, microbatch: Any, forward_context: Callable[[], AbstractContextManager] = nullcontext
) -> None:
    """See in a run's first batch that stages take parts of sequences, where ranks share them.

    Collective over the ranks that share the batch.

    Raises:
        ConfigError: A module mixes or counts the tokens of its own rank; on all of these ranks. See `probe`.
    """
    axis = _token_axis(module, microbatch)
    if module.takes_parts or axis is None:
        return
    module.takes_parts = True
    mesh, problems = module.pipeline.mesh, list[ConfigError]()
    assert mesh is not None

    def look(stage: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        try:
            probe(stage, args, kwargs, mesh, axis)
        except ConfigError as problem:
            problems.append(problem)

    executor = module.executor(forward_context, look)
    try:
        with module.schedule_running(), apart(module.stages):
            executor.outputs(module.pipeline.forward_only(1), Cut([microbatch], [None], 1), lambda output: None)
    finally:
        reset([each for each in module.stages.modules() if isinstance(each, FSDPModule)])
    with Ranks(module.pipeline.readers).agreed(f"{type(module).__name__} cannot train on parts of sequences"):
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
