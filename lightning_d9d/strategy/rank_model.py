"""The model of a run on this rank: equal to copies on other ranks, tied to their stages, sharded in units."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_d9d.mesh import MeshDomains
from lightning_d9d.parallel.fsdp import forget_forward, fully_sharded, reset
from lightning_d9d.parallel.graphs import release_graphs
from lightning_d9d.parallel.plan import axes_left, sharding_kind
from lightning_d9d.strategy.replicas import Replicas
from lightning_d9d.strategy.tied import TiedParameters


class RankModel:
    """Keeps a module synchronised with its copies on other ranks, from the setup of a run to its end.

    Making it is collective over all ranks: parameters and buffers start equal.

    Args:
        model: This rank's module, on its device.
        names: The names of its parameters.
        mesh: The mesh of several ranks; None for one process.
        stage_group: The ranks that hold the same stages; None for all.
        data_group: The ranks over which batches are split, if not all: metrics are summed over them.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Callable[[], Mapping[nn.Parameter, str]],
        mesh: MeshDomains | None,
        stage_group: dist.ProcessGroup | None,
        data_group: dist.ProcessGroup | None,
    ) -> None:
        self.model = model
        self.tied = TiedParameters()
        self._units: Sequence[FSDPModule] = [unit for unit in model.modules() if isinstance(unit, FSDPModule)]
        self._replicas: Replicas | None = None
        if mesh is not None:
            self._replicas = Replicas(model, stage_group)
            self._replicas.make_equal()
            units = fully_sharded(model)
            self.tied = TiedParameters.find(names(), lambda parameter: axes_left(sharding_kind(parameter, units)), mesh)
            self.tied.make_equal()
            if data_group is not None:
                self._replicas.group_metrics(data_group)

    def __deepcopy__(self, memo: dict[int, Any]) -> RankModel:
        """Return this object: groups of ranks belong to one run, and copies of its Trainer share them."""
        return self

    def mark_buffers_stale(self) -> None:
        """Record that a step was taken: buffers such as running means then differ. Local."""
        if self._replicas is not None:
            self._replicas.mark_buffers_stale()

    def sync_buffers(self) -> None:
        """Overwrite buffers by the first replica's if a step was taken. Collective."""
        if self._replicas is not None:
            self._replicas.sync_buffers()

    @contextmanager
    def evaluating(self) -> Generator[None]:
        """Run forwards without a backward inside the block: sharded units must not wait for one."""
        try:
            yield
        except BaseException:
            reset(self._units)
            raise
        forget_forward(self._units)  # of stages that are kept, and of the parts of others that are their own unit

    def close(self) -> None:
        """Drop hooks and graphs. Local."""
        release_graphs(self.model)
        if self._replicas is not None:
            self._replicas.close()
