"""The first look at stages that get parts of sequences: `lightning_d9d.parallel.probe` on what a batch gives them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_d9d.errors import ConfigError
from lightning_d9d.mesh.agreement import Ranks
from lightning_d9d.parallel.fsdp import reset
from lightning_d9d.parallel.probe import TokenAxis, apart, probe
from lightning_d9d.pipeline.executor import SplitBatch
from lightning_d9d.strategy.module import D9DModule


class SequenceCheck:
    """Checks once in a run that stages take parts of sequences, where ranks share them.

    Args:
        module: The module with its stages built and on their device.
    """

    def __init__(self, module: D9DModule) -> None:
        self.module = module
        self.pipeline = module.pipeline
        self._is_done = self.pipeline.tokens.multiple == 1

    def check(self, microbatch: Any, forward_context: Callable[[], AbstractContextManager] = nullcontext) -> None:
        """Probe the stages with the run's first microbatch. Collective over the ranks that share the batch.

        Raises:
            ConfigError: A module mixes or counts the tokens of its own rank; on all of these ranks. See `probe`.
        """
        axis = None if self._is_done else self._token_axis(microbatch)
        if axis is None:
            return
        self._is_done = True
        module, mesh, problems = self.module, self.pipeline.mesh, list[ConfigError]()
        assert mesh is not None

        def look(stage: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
            try:
                probe(stage, args, kwargs, mesh, axis)
            except ConfigError as problem:
                problems.append(problem)

        executor = self.pipeline.executor(module, module.indexed_stages, forward_context, look)
        try:
            with module.schedule_running(), apart(module.stages):
                batch = SplitBatch([microbatch], [None], num_dummies=1)
                executor.outputs(self.pipeline.forward_only(1), batch, lambda output: None)
        finally:
            reset([each for each in module.stages.modules() if isinstance(each, FSDPModule)])
        with Ranks(self.pipeline.readers).agreed(f"{type(module).__name__} cannot train on parts of sequences"):
            if problems:
                raise problems[0]

    def _token_axis(self, microbatch: Any) -> TokenAxis | None:
        """How to find tokens in what stages compute from a microbatch; None for batches of another form."""
        if not isinstance(microbatch, Mapping):
            return None
        for name, dim in self.module.sequence_dims.items():
            if isinstance(tensor := microbatch.get(name), Tensor):
                return TokenAxis.of(self.pipeline.tokens, tensor.numel() // tensor.shape[dim], tensor.shape[dim])
        return None
