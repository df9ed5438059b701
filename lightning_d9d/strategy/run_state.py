"""The state of a module and its optimizers in checkpoints, by the names of one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import lightning as L
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_d9d.checkpoint import AVERAGES, GROUPS, MODEL, ONE_PROCESS, OPTIMIZER, group_records, optimizer_state
from lightning_d9d.strategy.module import D9DModule
from lightning_d9d.strategy.optimizers import first_names
from lightning_d9d.strategy.ranks import JobRanks
from lightning_d9d.strategy.sharding import is_sharded


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The state of a module and its optimizers on this rank in checkpoints."""

    module: L.LightningModule
    """The module."""
    state_dict: Callable[..., Mapping[str, Any]]
    """The module's."""
    pipeline: dist.ProcessGroup | None
    """The ranks that hold the other stages; None if this rank has all of them."""
    is_spread: bool
    """True if ranks hold parts of the model."""
    is_directory: bool
    """True if a checkpoint is a directory."""
    optimizers: Sequence[Optimizer] = ()
    scheduled: Sequence[int | None] = ()
    """The index of the optimizer of each scheduler."""
    order_of_pipeline: Callable[[], Sequence[str]] = list
    """Returns the names of all stages' parameters, in the order of one process that has all of them; used in a
    pipeline."""

    @classmethod
    def of(
        cls,
        module: L.LightningModule,
        ranks: JobRanks,
        mode: str,
        optimizers: Sequence[Optimizer],
        schedulers: Sequence[Any],
    ) -> RunState:
        """Describe a module of a job. Local.

        Args:
            module: This rank's.
            ranks: The ranks of the job.
            mode: As in `CheckpointConfig`.
            optimizers: The module's optimizers, if it trains.
            schedulers: Of these.
        """
        sharded = is_sharded(module)
        indices = {id(optimizer): index for index, optimizer in enumerate(optimizers)}
        pipeline = ranks.pipeline_group
        return cls(
            module=module,
            state_dict=module.state_dict,
            pipeline=pipeline,
            is_spread=pipeline is not None or sharded,
            is_directory=(isinstance(module, D9DModule) or sharded) if mode == "auto" else mode == "sharded",
            optimizers=optimizers,
            scheduled=[indices.get(id(getattr(scheduler, "optimizer", None))) for scheduler in schedulers],
            order_of_pipeline=module.parameter_order if isinstance(module, D9DModule) else list,
        )

    @cached_property
    def names(self) -> dict[nn.Parameter, str]:
        """The names of this rank's parameters; the first name of a parameter that has several."""
        return first_names(self.state_dict(keep_vars=True))

    @property
    def parameter_order(self) -> list[str]:
        """The names of all parameters, in the order of one process."""
        return [*(self.names.values() if self.pipeline is None else self.order_of_pipeline())]

    def take_out(self, checkpoint: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return this rank's tensors and named values, and remove their entries from the checkpoint. Local.

        Args:
            checkpoint: Lightning's checkpoint, with the module's state dict; with "optimizer_states" if optimizers are
                saved.
        """
        state = {f"{MODEL}{name}": value for name, value in checkpoint.pop("state_dict").items()}
        tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        named_values = {name: value for name, value in state.items() if name not in tensors}
        tensors |= {f"{AVERAGES}.{name}": value for name, value in checkpoint.pop(AVERAGES, {}).items()}
        if "optimizer_states" in checkpoint:
            checkpoint["optimizer_states"] = len(self.optimizers)
            place = 0 if self.pipeline is None else dist.get_rank(self.pipeline)
            for index, optimizer in enumerate(self.optimizers):
                of_optimizer = optimizer_state(optimizer, self.names, OPTIMIZER.format(index))
                tensors.update(of_optimizer[0])
                named_values.update(of_optimizer[1])
                named_values[GROUPS.format(index, place)] = group_records(optimizer, self.names)
            checkpoint[ONE_PROCESS] = {"parameters": self.parameter_order, "scheduled": [*self.scheduled]}
        return tensors, named_values
