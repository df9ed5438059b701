"""Which ranks a run has and how they meet: devices, process groups, mesh, timeouts, collectives."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self, TypeVar, cast

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import (
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
)
from lightning.fabric.utilities.rank_zero import rank_zero_only, rank_zero_warn
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.strategies.parallel import ParallelStrategy
from torch import Tensor

from lightning_d9d import env
from lightning_d9d.errors import ConfigError, RankError
from lightning_d9d.log import name_rank
from lightning_d9d.loop.launch import (
    check_launcher_is_noticed,
    check_number_of_ranks,
    choose_network_interface,
    local_store,
)
from lightning_d9d.loop.patches import Patches
from lightning_d9d.loop.shutdown import Shutdown, end_children_at_exit
from lightning_d9d.mesh import MeshConfig, MeshDomains
from lightning_d9d.mesh.native_threads import guard_native_threads
from lightning_d9d.strategy.configuration import check_equal_configuration

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class TimeoutConfig:
    """How long ranks wait for each other."""

    init_seconds: float = 1800
    """Timeout of collectives until the first optimizer step of a run is done: ranks may start, load and compile at
    different speeds."""

    step_seconds: float = 300
    """Timeout of collectives from then on. Raise it where one rank works alone for longer, on a checkpoint say."""

    shutdown_seconds: float = 5
    """How long ranks have to stop together after Ctrl-C, SIGTERM or another rank's failure before each is ended. Raise
    it where a checkpoint must be finished first."""

    def __post_init__(self) -> None:
        for name in ("init_seconds", "step_seconds", "shutdown_seconds"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"TimeoutConfig.{name}={getattr(self, name)!r} must be greater than 0 seconds")


_BLIND_TO_COPIES = (dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.MIN)
"""Operations whose result is the same whether equal copies of a value take part once or equally often."""


class RankedStrategy(ParallelStrategy):
    """The part of `D9DStrategy` that knows ranks and nothing of modules.

    Args:
        mesh: Parallel degrees.
        timeouts: Limits for collectives and for stopping.
        process_group_backend: "gloo", "nccl", ...; by default the one for the device.
    """

    def __init__(self, mesh: MeshConfig | None, timeouts: TimeoutConfig, process_group_backend: str | None) -> None:
        super().__init__()
        self.mesh_config = MeshConfig(data_parallel_replicate=-1) if mesh is None else mesh
        self.timeouts = timeouts
        self.num_nodes = 1
        self._process_group_backend = process_group_backend
        self._mesh: MeshDomains | None = None
        self._group: dist.ProcessGroup | None = None
        self._patches: Patches | None = None
        self._shutdown: Shutdown | None = None
        self._has_step_timeout = False
        self._seed: int | None = None

    shared_by_copies = ("_mesh", "_group", "_launcher")
    """Attributes that a copy shares: groups, processes and hooks of a run, of which there are no second ones."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy of a Trainer, or of a progress bar that refers to one, may be made at any time, also in a run."""
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        state = cast(dict[str, Any], self.__getstate__())  # without what Lightning makes anew
        shared = {name: state.pop(name) for name in self.shared_by_copies}
        copied.__setstate__({**copy.deepcopy(state, memo), **shared})
        return copied

    @abstractmethod
    def settings(self) -> Mapping[str, object]:
        """What ranks must agree on, by the names of arguments."""

    @property
    def root_device(self) -> torch.device:
        """This process's device."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def is_one_process(self) -> bool:
        """Whether the Trainer asks for a single process, whose rank nobody need be asked for."""
        return self.num_nodes * self.num_processes == 1

    @property
    def global_rank(self) -> int:
        """This process's number among all."""
        return 0 if self.is_one_process else super().global_rank

    @property
    def local_rank(self) -> int:
        """This process's number on its node."""
        return 0 if self.is_one_process else super().local_rank

    @property
    def node_rank(self) -> int:
        """The number of this process's node."""
        return 0 if self.is_one_process else super().node_rank

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return 1 if self.is_one_process else super().world_size

    @property
    def num_processes(self) -> int:
        """Processes on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 1

    @property
    def is_distributed(self) -> bool:
        """Whether there are several ranks; Lightning reduces logged values, and injects samplers, then."""
        return not self.is_one_process

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """Number of data-parallel ranks and the coordinate of this one."""
        if self.world_size == 1:
            return {"num_replicas": 1, "rank": 0}
        return {"num_replicas": self.mesh.dp_size, "rank": self.mesh.dp_rank}

    @property
    def process_group_backend(self) -> str:
        """Backend of the default process group."""
        return self._process_group_backend or _get_default_process_group_backend_for_device(self.root_device)

    def set_world_ranks(self) -> None:
        """Tell the cluster environment and Lightning's rank-zero functions who this process is."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        check_launcher_is_noticed(self.cluster_environment)
        several = self.num_nodes * self.num_processes > 1
        if several and not self.cluster_environment.creates_processes_externally:
            self._launcher = _SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def setup_environment(self) -> None:
        """Take the device and, with more than one process, join the process group. Collective."""
        assert self.cluster_environment is not None
        check_number_of_ranks(self.cluster_environment, self.num_processes, self.num_nodes)
        self.mesh_config.resolve(self.world_size)  # before anyone waits for the others
        if (warning := env.untested()) is not None:
            rank_zero_warn(warning)
        assert self.lightning_module is not None
        if self._patches is not None:
            self._patches.undo()  # this run began inside of another, in a callback say
        self._patches = Patches(self.lightning_module.trainer)
        callbacks = cast(Any, self.lightning_module.trainer).callbacks
        if self.world_size > 1 and any(isinstance(callback, BatchSizeFinder) for callback in callbacks):
            raise ConfigError(
                f"the batch size cannot be tuned on {self.world_size} ranks, as one of them may run out of memory "
                "alone; tune it on one"
            )
        super().setup_environment()
        if self.world_size > 1:  # one process goes on with its random state, as on Lightning's one-device strategy
            reset_seed()
        self.set_world_ranks()
        if self.world_size > 1 and not dist.is_initialized():
            choose_network_interface(self.num_nodes)
            timeout = timedelta(seconds=self.timeouts.init_seconds)
            _init_dist_connection(
                self.cluster_environment,
                self.process_group_backend,
                store=local_store(self.cluster_environment, self.num_nodes, timeout),
                timeout=timeout,
                device_id=self.root_device if self.root_device.type != "cpu" else None,
            )
        if self.world_size > 1:
            guard_native_threads()
            assert self.lightning_module is not None
            trainer = self.lightning_module.trainer
            self._shutdown = Shutdown(self.patches, trainer, self.timeouts.shutdown_seconds, self.timeouts.init_seconds)
            self._group = dist.group.WORLD if self.mesh.dp_size == self.world_size else self.mesh.group("dp")
            name_rank(self.mesh.rank_name)
            self._seed = self.broadcast(torch.initial_seed())
            check_equal_configuration(self.settings(), trainer)

    @property
    def patches(self) -> Patches:
        """The place for what this run replaces on its Trainer's objects; from `setup_environment` to `teardown`."""
        assert self._patches is not None
        return self._patches

    @property
    def seed(self) -> int:
        """The seed of the job, equal on all ranks: rank 0's, as `seed_everything` or torch has set it."""
        return torch.initial_seed() if self._seed is None else self._seed

    @property
    def mesh(self) -> MeshDomains:
        """The mesh domains of this run. Modules and callbacks find them from `setup` on.

        With one process nothing is built, and no process group made, before it is asked for here.
        """
        if self._mesh is None:
            if self.world_size > 1 and not dist.is_initialized():
                raise ConfigError("D9DStrategy.mesh before the ranks have joined; use it in setup() or later")
            self._mesh = MeshDomains.build(
                self.mesh_config, self.root_device.type, timeout_seconds=self.timeouts.init_seconds
            )
        return self._mesh

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks over which batches are split; None for one process."""
        return self._group

    @property
    def is_pipelined(self) -> bool:
        """Whether ranks hold different stages."""
        return self.world_size > 1 and self.mesh.sizes["pp"] > 1

    @property
    def stage_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same pipeline stages; None for all ranks."""
        return self.mesh.group("dp", "cp", "tp") if self.is_pipelined else None

    # Timeouts, failures, the end

    def set_step_timeout(self) -> None:
        """From the end of the first optimizer step on, ranks wait for each other for `step_seconds`. Local."""
        if self._has_step_timeout or self.world_size == 1:
            return
        self.mesh.set_timeout(self.timeouts.step_seconds)
        if self._shutdown is not None:
            self._shutdown.watch.wait_seconds = self.timeouts.step_seconds
        self._has_step_timeout = True

    def check_ranks(self) -> None:
        """Raise `RankError` if a rank is known to have failed. Before a collective to which it will not come. Local."""
        if self._shutdown is not None and self._shutdown.watch.failure is not None:
            raise RankError(str(self._shutdown.watch.failure))

    def on_exception(self, exception: BaseException) -> None:
        """See to it that other ranks hear of it, and that ranks launched by this process end with it."""
        super().on_exception(exception)
        if self._shutdown is not None:
            self._shutdown.watch.report(exception)  # where a tuner had put the Trainer's callbacks away
        else:
            end_children_at_exit(self.launcher, self.global_rank, self.timeouts.shutdown_seconds)

    def close_mesh(self) -> None:
        """Forget the mesh, and give groups that stay their first timeout back. Local."""
        mesh, self._mesh, self._group = self._mesh, None, None
        if mesh is not None:
            if self._has_step_timeout:
                mesh.set_timeout(self.timeouts.init_seconds)
            mesh.close()
        self._has_step_timeout = False

    # Collectives for Lightning and callbacks

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks. Collective."""
        if self.world_size > 1 and dist.is_initialized():
            dist.barrier(device_ids=[self.root_device.index] if self.root_device.type == "cuda" else None)

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Rank `src`'s object on every rank. Collective."""
        if self.world_size == 1 or not dist.is_initialized():
            return obj
        objects = [obj]
        dist.broadcast_object_list(objects, src)
        return objects[0]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: dist.ReduceOp.RedOpType | str | None = "mean") -> Any:
        """Reduce a tensor in place; other values return as they are. Collective over all ranks, or `group`.

        A mean, a maximum or a minimum is over all ranks and equal on all of them. Ranks that hold equal copies, such as
        those of a pipeline, do not change it. A sum counts each data rank once: it is over the ranks among which
        batches are split. The mean of integers is a new tensor of floats.

        Args:
            tensor: Equal shapes and dtypes on all ranks.
            group: Another process group.
            reduce_op: "mean" (or "avg"), another operation's name such as "sum", or a `ReduceOp`.
        """
        if self.world_size == 1 or not isinstance(tensor, Tensor):
            return tensor
        operation: Any = "mean" if reduce_op is None else reduce_op
        if isinstance(operation, str):
            operation = getattr(dist.ReduceOp, "AVG" if operation.upper() == "MEAN" else operation.upper())
        if group is None:
            group = dist.group.WORLD if any(operation == each for each in _BLIND_TO_COPIES) else self.group
        if operation != dist.ReduceOp.AVG:
            dist.all_reduce(tensor, op=operation, group=group)
            return tensor
        dist.all_reduce(tensor, group=group)  # gloo has no mean
        mean = tensor / dist.get_world_size(group)
        return tensor.copy_(mean) if mean.dtype == tensor.dtype else mean

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks decide so or, without `all`, any. Collective over all ranks."""
        flag = torch.tensor(int(decision), device=self.root_device)
        return bool(self.reduce(flag, reduce_op="min" if all else "max"))
