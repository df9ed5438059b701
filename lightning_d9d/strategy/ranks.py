"""The ranks of a job and how they join: process groups, mesh, timeouts, collectives."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.fabric.utilities.distributed import (
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
)
from torch import Tensor

from lightning_d9d.errors import ConfigError
from lightning_d9d.log import name_rank
from lightning_d9d.loop.launch import choose_network_interface, local_store
from lightning_d9d.mesh import Axis, MeshConfig, MeshDomains
from lightning_d9d.mesh.native_threads import guard_native_threads
from lightning_d9d.waits import waiting

T = TypeVar("T")


_REPORT_SIGNALS = ("SIGUSR1", "SIGUSR2", "SIGHUP", "SIGQUIT")
"""Signals that have no other meaning for ranks, except those that requeue a job."""


@dataclass(frozen=True, kw_only=True)
class TimeoutConfig:
    """How long ranks wait for each other, and where they report the rank for which others wait."""

    init_seconds: float = 1800
    """Timeout of collectives until the first optimizer step of a run is done: ranks may start, load and compile at
    different speeds."""

    step_seconds: float = 300
    """Timeout of collectives from then on. Raise it if one rank works alone for longer, for example on a checkpoint."""

    shutdown_seconds: float = 5
    """How long ranks have to stop together after Ctrl-C, SIGTERM or another rank's failure before each is ended. Raise
    it if a checkpoint must be finished first."""

    groups_seconds: float = 120
    """How long ranks that have joined may take to make their process groups. After it the job ends, and the ranks that
    are not ready are named."""

    report_signal: str | None = "SIGUSR2"
    """The signal on which ranks write a [report](../how-to/debug-a-hang.md) of where all are, and continue; None for
    none. It is enough if one rank receives it."""

    report_directory: str | None = None
    """The directory of reports, also of those after too long a wait; by default the Trainer's `default_root_dir`. All
    nodes must see it."""

    def __post_init__(self) -> None:
        for name in ("init_seconds", "step_seconds", "shutdown_seconds", "groups_seconds"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"TimeoutConfig.{name}={getattr(self, name)!r} must be greater than 0 seconds")
        if self.report_signal is not None and self.report_signal not in _REPORT_SIGNALS:
            raise ConfigError(
                f"TimeoutConfig.report_signal={self.report_signal!r} must be None or one of "
                f"{', '.join(_REPORT_SIGNALS)}"
            )


_BLIND_TO_COPIES = (dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.MIN)
"""Operations whose result does not change if equal copies of a value take part equally often."""


class JobRanks:
    """The ranks of a job, from the viewpoint of one of them.

    Before `place` there is only one.

    Args:
        mesh: Parallel degrees.
        timeouts: Limits for collectives.
        backend: "gloo", "nccl", ...; None chooses the one for the device.
        apart: Whether replicas mix their weights: the mesh is then that of one replica.
    """

    def __init__(self, mesh: MeshConfig, timeouts: TimeoutConfig, backend: str | None, *, apart: bool = False) -> None:
        self.config = mesh
        self._apart = apart
        self.timeouts = timeouts
        self.rank = 0
        self.world_size = 1
        self.device = torch.device("cpu")
        """This process's device."""
        self.data_group: dist.ProcessGroup | None = None
        """The ranks over which batches are split; None for one process."""
        self.are_described = False
        """True once the log has their mesh."""
        self._backend = backend
        self._mesh: MeshDomains | None = None
        self._has_step_timeout = False
        self._seed: int | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> JobRanks:
        """Share the process groups with a copy, because they cannot be copied."""
        return copy.copy(self)

    def place(self, rank: int, world_size: int) -> None:
        """Record the ranks of this process. Local."""
        self.rank, self.world_size = rank, world_size

    @property
    def backend(self) -> str:
        """The backend of the default process group."""
        return self._backend or _get_default_process_group_backend_for_device(self.device)

    def join(self, environment: ClusterEnvironment, num_nodes: int) -> None:
        """Join the process group, if this process has not joined one yet. Collective; does nothing for one process.

        Args:
            environment: Environment that knows where the ranks join.
            num_nodes: Number of nodes of the job.
        """
        if self.world_size > 1 and not dist.is_initialized():
            choose_network_interface(num_nodes)
            timeout = timedelta(seconds=self.timeouts.init_seconds)
            _init_dist_connection(
                environment,
                self.backend,
                store=local_store(environment, num_nodes, timeout),
                timeout=timeout,
                device_id=self.device if self.device.type != "cpu" else None,
            )
        if self.world_size > 1:
            guard_native_threads()

    def spread(self) -> None:
        """Build the mesh and agree on a seed. Collective; does nothing for one process."""
        if self.world_size > 1:
            is_whole = self.dp_size == self.world_size
            self.data_group = dist.group.WORLD if is_whole else self.mesh.group_of_replicas(Axis.DP)
            name_rank(self.mesh.rank_name)
            self._seed = self.broadcast(torch.initial_seed())

    def close(self) -> None:
        """Forget the mesh, and restore the first timeout of groups that stay. Local."""
        mesh, self._mesh, self.data_group = self._mesh, None, None
        if mesh is not None:
            if self._has_step_timeout:
                mesh.set_timeout(self.timeouts.init_seconds)
            mesh.close()
        self._has_step_timeout = False

    @property
    def seed(self) -> int:
        """The seed of the job, equal on all ranks: rank 0's, as set by `seed_everything` or torch."""
        return torch.initial_seed() if self._seed is None else self._seed

    # The mesh

    @property
    def mesh(self) -> MeshDomains:
        """The mesh domains, of one replica if replicas are apart. With one process nothing is built earlier.

        Raises:
            ConfigError: The ranks have not joined.
        """
        if self._mesh is None:
            if self.world_size > 1 and not dist.is_initialized():
                raise ConfigError("D9DStrategy.mesh before the ranks have joined; use it in setup() or later")
            config = self.config
            if self._apart:
                config = replace(config.resolve(self.world_size), data_parallel_replicate=1)
            num_replicas = self.num_replicas
            seconds = self.timeouts.init_seconds
            self._mesh = MeshDomains.build(config, self.device.type, timeout_seconds=seconds, num_replicas=num_replicas)
        return self._mesh

    @property
    def num_replicas(self) -> int:
        """The number of separate replicas; 1 if gradients are summed over all ranks."""
        return self.config.resolve(self.world_size).data_parallel_replicate if self._apart else 1

    @property
    def mesh_of_several(self) -> MeshDomains | None:
        """The mesh domains; None for one process, and for a separate replica of one process."""
        return self.mesh if self.world_size > self.num_replicas else None

    @property
    def dp_size(self) -> int:
        """The number of data ranks, those of all replicas."""
        return 1 if self.world_size == 1 else self.mesh.dp_size * self.num_replicas

    @property
    def num_summed(self) -> int:
        """The number of data ranks over which gradients are summed."""
        return self.dp_size // self.num_replicas

    @property
    def dp_rank(self) -> int:
        """The coordinate of this rank among the data ranks."""
        return 0 if self.world_size == 1 else self.mesh.replica * self.mesh.dp_size + self.mesh.dp_rank

    @property
    def coordinates(self) -> dict[str, int]:
        """The coordinates of this rank in the mesh, with data ranks counted over all replicas."""
        mesh = self.mesh
        if self.num_replicas == 1:
            return mesh.coordinates
        return {**mesh.coordinates, Axis.DP.value: self.dp_rank, Axis.DP_REPLICATE.value: mesh.replica}

    def size(self, axis: str) -> int:
        """Return the size of an axis of the mesh; 1 for one process."""
        return 1 if self.world_size == 1 else self.mesh.sizes[axis]

    @property
    def pipeline_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the other stages; None if this rank has all of them."""
        return self.mesh.group(Axis.PP) if self.size(Axis.PP) > 1 else None

    @property
    def stage_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same pipeline stages of one model; None for all ranks."""
        if self.size(Axis.PP) == 1 and self.num_replicas == 1:
            return None
        return self.mesh.group(Axis.DP, Axis.CP, Axis.TP)

    @property
    def needs_equal_batches(self) -> bool:
        """True if forwards and backwards of a D9DModule may be collective over data ranks. Equal on all ranks."""
        return any(self.size(axis) > 1 for axis in (Axis.DP_CP_SHARD, Axis.EP_SHARD))

    # Timeouts

    def set_step_timeout(self) -> bool:
        """Make ranks wait for `step_seconds`, from the end of the first optimizer step on. Local.

        Returns:
            True if the limit changed.
        """
        if self._has_step_timeout or self.world_size == 1:
            return False
        self.mesh.set_timeout(self.timeouts.step_seconds)
        self._has_step_timeout = True
        return True

    # Collectives

    def barrier(self) -> None:
        """Wait for all ranks. Collective."""
        if self.world_size > 1 and dist.is_initialized():
            with waiting():
                dist.barrier(device_ids=[self.device.index] if self.device.type == "cuda" else None)

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Return rank `src`'s picklable object on every rank. Collective."""
        if self.world_size == 1 or not dist.is_initialized():
            return obj
        objects = [obj]
        with waiting():
            dist.broadcast_object_list(objects, src)
        return objects[0]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: dist.ReduceOp.RedOpType | str | None = "mean") -> Any:
        """Reduce a tensor in place; other values are returned unchanged. Collective over all ranks, or `group`.

        A mean, a maximum or a minimum is over all ranks and equal on all of them. Ranks that hold equal copies, such as
        those of a pipeline, do not change it. A sum counts each data rank once: it is over the ranks among which
        batches are split. The mean of integers is a new tensor of floats.

        Args:
            tensor: Tensor with equal shapes and dtypes on all ranks.
            group: Another process group.
            reduce_op: "mean" (or "avg"), another operation's name such as "sum", or a `ReduceOp`.
        """
        if self.world_size == 1 or not isinstance(tensor, Tensor):
            return tensor
        operation: Any = "mean" if reduce_op is None else reduce_op
        if isinstance(operation, str):
            operation = getattr(dist.ReduceOp, "AVG" if operation.upper() == "MEAN" else operation.upper())
        if group is None:
            group = dist.group.WORLD if any(operation == each for each in _BLIND_TO_COPIES) else self.data_group
        with waiting():  # gloo has no mean
            dist.all_reduce(tensor, dist.ReduceOp.SUM if operation == dist.ReduceOp.AVG else operation, group)
        if operation != dist.ReduceOp.AVG:
            return tensor
        mean = tensor / dist.get_world_size(group)
        return tensor.copy_(mean) if mean.dtype == tensor.dtype else mean

    def agree(self, decision: bool, all: bool = True) -> bool:
        """Return whether all ranks decide True or, without `all`, any rank does. Collective over all ranks."""
        flag = torch.tensor(int(decision), device=self.device)
        return bool(self.reduce(flag, reduce_op="min" if all else "max"))
