"""Answers Lightning's questions about ranks and devices, through `JobRanks`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Self, TypeVar, cast

import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.strategies.parallel import ParallelStrategy

from lightning_d9d.loop.launch import Launcher, check_launcher_is_noticed
from lightning_d9d.mesh import Axis, MeshConfig, MeshDomains
from lightning_d9d.strategy.batch_copies import BatchCopies, changes_first, moves_itself
from lightning_d9d.strategy.module import D9DModule
from lightning_d9d.strategy.ranks import JobRanks, TimeoutConfig

T = TypeVar("T")


class RankHooks(ParallelStrategy):
    """The interface of `D9DStrategy` to Lightning for ranks, devices and collectives.

    Args:
        ranks: Knows them.
    """

    def __init__(self, ranks: JobRanks) -> None:
        super().__init__()
        self.ranks = ranks
        self.num_nodes = 1

    shared_by_copies = ("_launcher",)
    """Attributes that a copy shares: processes and hooks of a run, which cannot be copied."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy a strategy, but share everything that belongs to the run.

        A Trainer may be copied at any time, also during a run.
        """
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        state = cast(dict[str, Any], self.__getstate__())  # without what Lightning makes again
        shared = {name: state.pop(name) for name in self.shared_by_copies}
        copied.__setstate__({**copy.deepcopy(state, memo), **shared})
        return copied

    @property
    def mesh_config(self) -> MeshConfig:
        """The parallel degrees."""
        return self.ranks.config

    @property
    def timeouts(self) -> TimeoutConfig:
        """The limits for collectives and for stopping."""
        return self.ranks.timeouts

    @property
    def mesh(self) -> MeshDomains:
        """The mesh domains of this run. Modules and callbacks can use them from `setup` on.

        With one process, no mesh or process group is made until it is requested here.
        """
        self.ranks.device = self.root_device
        return self.ranks.mesh

    @property
    def is_pipelined(self) -> bool:
        """True if ranks hold different stages."""
        return self.ranks.size(Axis.PP) > 1

    @property
    def stage_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same pipeline stages; None for all ranks."""
        return self.ranks.stage_group

    @property
    def root_device(self) -> torch.device:
        """This process's device."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """The number of processes on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 1

    @property
    def is_distributed(self) -> bool:
        """True if there are several ranks; Lightning then reduces logged values, and injects samplers."""
        return self.num_nodes * self.num_processes > 1

    @property
    def global_rank(self) -> int:
        """The global rank of this process."""
        return super().global_rank if self.is_distributed else 0

    @property
    def local_rank(self) -> int:
        """This process's number on its node."""
        return super().local_rank if self.is_distributed else 0

    @property
    def node_rank(self) -> int:
        """The number of this process's node."""
        return super().node_rank if self.is_distributed else 0

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return super().world_size if self.is_distributed else 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """The number of data-parallel ranks and the coordinate of this one."""
        return {"num_replicas": self.ranks.dp_size, "rank": self.ranks.dp_rank}

    @property
    def process_group_backend(self) -> str:
        """The backend of the default process group."""
        self.ranks.device = self.root_device
        return self.ranks.backend

    def set_world_ranks(self) -> None:
        """Set this process's ranks in the cluster environment and in Lightning's rank-zero functions."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]
        self.ranks.place(self.global_rank, self.world_size)

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        check_launcher_is_noticed(self.cluster_environment)
        if self.is_distributed and not self.cluster_environment.creates_processes_externally:
            self._launcher = Launcher(self.cluster_environment, self.num_processes, self.num_nodes)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks. Collective."""
        self.ranks.barrier()

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Return rank `src`'s picklable object on every rank. Collective."""
        return self.ranks.broadcast(obj, src)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: dist.ReduceOp.RedOpType | str | None = "mean") -> Any:
        """Reduce a tensor in place, like `JobRanks.reduce`. Collective over all ranks, or `group`."""
        return self.ranks.reduce(tensor, group, reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all ranks decide True or, without `all`, any rank does. Collective over all ranks."""
        return self.ranks.agree(decision, all)

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Move a batch to the device, on a GPU from pinned memory through `BatchCopies`. Local.

        A module or data module with its own `transfer_batch_to_device` moves it itself.
        """
        device = device or self.root_device
        if device.type == "cuda" and not moves_itself(*self._owners_of_hooks):
            batch = BatchCopies.to(device).begin(batch)
        return super().batch_to_device(batch, device, dataloader_idx)

    def copier_ahead(self) -> Callable[[Any], None] | None:
        """Return a function that begins to copy a batch that has been read ahead; None if that is useless. Local.

        It is useless without a GPU, and if a module or data module moves batches or changes them first.
        """
        owners = self._owners_of_hooks
        if self.root_device.type != "cuda" or moves_itself(*owners) or changes_first(*owners):
            return None
        return BatchCopies.to(self.root_device).begin_ahead

    @property
    def _owners_of_hooks(self) -> tuple[object, object]:
        """The module, and the data module."""
        module = self.lightning_module
        trainer: Any = module and module._trainer
        return module, getattr(trainer, "datamodule", None)

    def teardown(self) -> None:
        """End a run like Lightning, but leave a D9DModule and the states of its optimizers on their device. Local.

        Lightning moves both to the host's memory. Moving 60 GB takes a minute, and ranks of a node share that memory.
        """
        if self.ranks.device.type == "cuda":
            BatchCopies.to(self.ranks.device).forget()
        if not isinstance(self.lightning_module, D9DModule):
            super().teardown()
            return
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
