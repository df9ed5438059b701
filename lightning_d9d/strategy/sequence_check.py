"""The first check of stages that get parts of sequences: `lightning_d9d.parallel.probe` with the inputs of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_d9d.errors import ConfigError
from lightning_d9d.mesh.agreement import Ranks
from lightning_d9d.parallel.fsdp import reset
from lightning_d9d.parallel.probe import Loss, apart, check_inputs, probe
from lightning_d9d.parallel.token_axis import TokenAxis
from lightning_d9d.pipeline.executor import SplitBatch
from lightning_d9d.pipeline.types import WeightedLoss
from lightning_d9d.strategy.module import D9DModule


class SequenceCheck:
    """Checks that stages and hooks support parts of sequences, if ranks share them.

    It checks once in training and once in evaluation.

    Args:
        module: The module with its stages built and on their device.
    """

    def __init__(self, module: D9DModule) -> None:
        self.module = module
        self.pipeline = module.pipeline
        self._checked: set[bool] = set()
        """The modes, training or not, that have had their first batch."""

    def check(self, microbatch: Any, forward_context: Callable[[], AbstractContextManager] = nullcontext) -> None:
        """Probe the stages and hooks with the first microbatch of a mode. Collective over the ranks that share it.

        Args:
            microbatch: Microbatch with this rank's tokens.
            forward_context: The precision context of a forward.

        Raises:
            ConfigError: A module or hook mixes or counts the tokens of its own rank; raised on all of these ranks. See
                `probe`.
        """
        axis = self._token_axis(microbatch)
        if axis is None or self.module.training in self._checked:
            return
        self._checked.add(self.module.training)
        module, mesh = self.module, self.pipeline.mesh
        problems, modes = list[ConfigError](), dict[nn.Module, bool]()
        assert mesh is not None
        name = type(module).__name__
        make_loss = self._loss_in(forward_context)
        loss = Loss(make_loss, microbatch) if module.makes_loss else None
        last = module.indexed_stages.get(len(self.pipeline.placement) - 1)

        def look(stage: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
            try:
                probe(stage, args, kwargs, mesh, axis, modes=modes, loss=loss if stage is last else None)
            except ConfigError as problem:
                problems.append(problem)

        executor = self.pipeline.executor(module, module.indexed_stages, forward_context, look)
        try:
            with module.schedule_running(), apart(module.stages) as before:
                modes.update(before)
                try:
                    check_inputs(self._inputs_of, microbatch, f"{name}.microbatch_inputs", mesh, axis)
                except ConfigError as problem:
                    problems.append(problem)
                batch = SplitBatch([microbatch], [None], num_dummies=1)
                executor.outputs(self.pipeline.forward_only(1), batch, lambda output: None)
        finally:
            reset([each for each in module.stages.modules() if isinstance(each, FSDPModule)])
        with Ranks(self.pipeline.readers).agreed(f"{name} cannot train on parts of sequences"):
            if problems:
                raise problems[0]

    def _inputs_of(self, microbatch: Any) -> Mapping[str, Any]:
        inputs = self.module.microbatch_inputs(microbatch)
        return {**inputs.first, **inputs.shared}

    def _loss_in(
        self, forward_context: Callable[[], AbstractContextManager]
    ) -> Callable[[Any, Any], dict[str, list[Tensor]]]:
        name = type(self.module).__name__

        def make_loss(output: Any, microbatch: Any) -> dict[str, list[Tensor]]:
            with forward_context():
                loss = self.module.microbatch_loss(output, microbatch)
                metrics = self.module.microbatch_metrics(output, microbatch)
            made = {f"the loss that {name}.microbatch_loss or the last stage makes": _numbers_of(loss)}
            return made | {
                f"the metric {key!r} that {name}.microbatch_metrics makes": _numbers_of(metrics[key])
                for key in sorted(metrics)
            }

        return make_loss

    def _token_axis(self, microbatch: Any) -> TokenAxis | None:
        """Return an object that finds tokens in values of a microbatch; None without shared sequences."""
        tokens = self.pipeline.tokens
        if tokens.multiple == 1 or not isinstance(microbatch, Mapping):
            return None
        for name, dim in self.module.sequence_dims.items():
            if isinstance(tensor := microbatch.get(name), Tensor):
                return TokenAxis.of(tokens, tensor.numel() // tensor.shape[dim], tensor.shape[dim])
        return None


def _numbers_of(value: Tensor | WeightedLoss) -> list[Tensor]:
    numbers = (value.value_sum, value.weight) if isinstance(value, WeightedLoss) else (value,)
    return [torch.as_tensor(number) for number in numbers]
