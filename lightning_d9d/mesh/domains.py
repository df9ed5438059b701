"""Several meshes over the same ranks, as torch device meshes on one pool of process groups."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_d9d.errors import ConfigError
from lightning_d9d.mesh.axes import Axis, submesh
from lightning_d9d.mesh.config import MeshConfig
from lightning_d9d.mesh.groups import GroupPool, Lane, Partition, PooledGroup, partition, set_group_timeout
from lightning_d9d.startup import start_part

_MAX_LISTED = 8


class MeshDomains:
    """The domains of a mesh, each a different arrangement of its ranks; `build` makes them.

    Each domain is a `DeviceMesh` over all ranks 0, 1, 2, ..., split along its own axes; the last axis changes fastest.
    Axes that split the ranks alike share one process group, also across domains.

    | domain | axes |
    |---|---|
    | `regular` | pp, dp_replicate, dp_shard, cp_shard, cp_replicate, tp |
    | `dense` | pp, dp_replicate, dp_cp_shard, cp_replicate, tp |
    | `expert` | pp, ep_replicate, ep_shard |
    | `batch` | pp, dp, cp, tp |
    | `flat` | world |

    Pickling saves the degrees. Unpickling builds the domains again: it is collective and needs the same number of
    ranks. A deep copy is the object itself.

    With `num_replicas` the world consists of several such meshes side by side, and no group
    spans two of them. All of the above then concerns the ranks of one mesh: they are numbered from 0, and its world is
    not torch's. The ranks of all meshes are arranged as with an axis `dp_replicate` of that size.
    """

    def __init__(
        self, config: MeshConfig, device_type: str, timeout_seconds: float | None, num_replicas: int = 1
    ) -> None:
        self.config = config
        """The resolved degrees, without -1."""
        self.num_replicas = num_replicas
        """The number of meshes of this kind in the world; 1 unless replicas are apart."""
        self.device_type = device_type
        self._timeout_seconds = timeout_seconds
        self._shapes = config.domains()
        self._tensor_shapes: dict[str, dict[str, int]] = {}
        rank = dist.get_rank() if dist.is_initialized() else 0
        stage_size = config.world_size // config.pipeline_parallel
        stage, place = divmod(rank, stage_size * num_replicas)
        self.replica = place // stage_size
        """Which of these meshes this rank is in."""
        self._rank = stage * stage_size + place % stage_size
        self._pool: GroupPool | None = None
        self._meshes: dict[str, DeviceMesh] = {}
        self._described: dict[PooledGroup, str] = {}
        self._closed = False

    @classmethod
    def build(
        cls, config: MeshConfig, device_type: str, *, timeout_seconds: float | None = None, num_replicas: int = 1
    ) -> MeshDomains:
        """Build the domains on the ranks of the default process group, and warm up their groups. Collective.

        If one axis has all ranks, as in plain data parallelism, domains are built at their first use: their group is
        the default one. A single rank does not need a network either. Without a default process group, one of a single
        rank is made.

        Args:
            config: Parallel degrees. They multiply to the number of ranks, or one of them is -1.
            device_type: "cpu" or "cuda".
            timeout_seconds: Time limit of the groups' collectives; None for torch's own. The default process group
                keeps its own limit.
            num_replicas: The number of such meshes in the world; above 1 replicas are apart.

        Raises:
            ConfigError: The degrees do not fit the number of ranks.
        """
        if dist.is_initialized():
            config = config.resolve(dist.get_world_size() // num_replicas)
            domains = cls(config, device_type, timeout_seconds, num_replicas)
            if domains._needs_groups():
                with start_part("mesh"):
                    domains._open()
            return domains
        try:
            return cls(config.resolve(1), device_type, timeout_seconds)
        except ConfigError as error:
            raise ConfigError(
                f"{error}; the default process group is not initialized: to use more ranks, start them first, such "
                "as with torchrun and torch.distributed.init_process_group"
            ) from error

    @property
    def timeout_seconds(self) -> float | None:
        """Time limit of collectives; None is torch's own limit."""
        return self._timeout_seconds

    @property
    def regular(self) -> DeviceMesh:
        """The domain with one axis for each degree except experts'."""
        return self._mesh("regular")

    @property
    def dense(self) -> DeviceMesh:
        """The domain for weights outside of experts, which are sharded over `dp_cp_shard`."""
        return self._mesh("dense")

    @property
    def expert(self) -> DeviceMesh:
        """The domain for experts: `ep_shard` has consecutive ranks of a pipeline stage, along `tp` too."""
        return self._mesh("expert")

    @property
    def expert_weights(self) -> DeviceMesh:
        """The mesh of this rank's experts: `ep_dp_replicate`, `ep_fsdp`, `ep_shard`, a view of `expert`.

        `MeshConfig.expert_weights` describes how `ep_replicate` is split. Collective over all ranks at the first use,
        which makes the missing groups.
        """
        if "expert_weights" not in self._meshes:
            shape = self.config.expert_weights()
            self._open()
            groups = [self._group(shape, (axis,), "expert_weights") for axis in shape]
            self._meshes["expert_weights"] = self._device_mesh(shape, groups)
        return submesh(self._meshes["expert_weights"], Axis.EP_DP_REPLICATE, Axis.EP_FSDP, Axis.EP_SHARD)

    @property
    def weights(self) -> DeviceMesh:
        """The mesh of weights outside of experts: `dp_cp_replicate`, `dp_cp_shard`, `tp`, a view of `dense`.

        Along `dp_cp_replicate` there are copies: it combines `dp_replicate` and `cp_replicate`. After `split_tensor` it
        has `tp_shard` and `tp_replicate` in place of `tp`. Torch combines, for example, tensor and data parallelism of
        one module only if both are parts of one mesh: this one. Collective over all ranks at the first use, which makes
        the missing groups.
        """
        if "weights" not in self._meshes:
            shape = self._tensor_shapes.get("dense", self._shapes["dense"])
            self._open()
            axes = [
                (Axis.PP,),
                (Axis.DP_REPLICATE, Axis.CP_REPLICATE),
                (Axis.DP_CP_SHARD,),
                *((axis,) for axis in self.tensor_axes),
            ]
            groups = [self._group(shape, each, "dense") for each in axes]
            ranks = self._ranks(self.replica).view(*shape.values())
            ranks = ranks.movedim([*shape].index(Axis.CP_REPLICATE), 2).flatten(1, 2)
            names = (Axis.PP, Axis.DP_CP_REPLICATE, Axis.DP_CP_SHARD, *self.tensor_axes)
            self._meshes["weights"] = DeviceMesh.from_group(
                groups, self.device_type, mesh=ranks, mesh_dim_names=tuple(map(str, names))
            )
        return submesh(self._meshes["weights"], Axis.DP_CP_REPLICATE, Axis.DP_CP_SHARD, *self.tensor_axes)

    @property
    def tensor_axes(self) -> tuple[Axis, ...]:
        """The axes of `weights` for tensor parallelism."""
        return (Axis.TP_SHARD, Axis.TP_REPLICATE) if self._tensor_shapes else (Axis.TP,)

    def split_tensor(self, num_shards: int) -> None:
        """Split `tp` in two, like `MeshConfig.split_tensor`, for all modules on this mesh, before `weights` is used.

        Nothing changes if there are at least as many shards as ranks. Collective over all ranks.

        Raises:
            ConfigError: The number does not divide `tp`, or `tp` was split into another number, or `weights` is in use.
        """
        tp = self.sizes[Axis.TP]
        if num_shards >= tp or self._tensor_shapes.get("dense", {}).get(Axis.TP_SHARD) == num_shards:
            return
        if tp % num_shards:
            raise ConfigError(
                f"tensor_parallel={tp} cannot be split into {num_shards} equal parts: one of the two numbers must "
                "divide the other"
            )
        if "weights" in self._meshes:
            raise ConfigError(
                f"tensor_parallel={tp} is in use as {'x'.join(self.tensor_axes)}, and cannot be split into "
                f"{num_shards} parts as well. Give all attention modules the same number of heads of keys and "
                "values"
            )
        self._tensor_shapes = self.config.split_tensor(num_shards)
        _ = self.weights
        self.group(Axis.DP, Axis.CP, Axis.TP_REPLICATE)

    @property
    def batch(self) -> DeviceMesh:
        """The domain for data: samples differ along `dp`, parts of them along `cp`, and `tp` ranks have equal data."""
        return self._mesh("batch")

    @property
    def flat(self) -> DeviceMesh:
        """The domain of all ranks on one axis `world`."""
        return self._mesh("flat")

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each axis of all domains. Builds nothing."""
        shapes = (*self._shapes.values(), *self._tensor_shapes.values())
        return {axis: size for shape in shapes for axis, size in shape.items()}

    @property
    def coordinates(self) -> dict[str, int]:
        """The coordinate of this rank along each axis of all domains. Builds nothing."""
        found = {}
        for shape in (*self._shapes.values(), *self._tensor_shapes.values()):
            rest = self._rank
            for axis, size in reversed(shape.items()):
                rest, found[axis] = divmod(rest, size)
        return {axis: found[axis] for axis in self.sizes}

    @property
    def rank(self) -> int:
        """The number of this rank in this mesh."""
        return self._rank

    @property
    def rank_name(self) -> str:
        """The coordinates of this rank as text: `pp0-dp3`, with the axes of `batch` that have more than one rank."""
        coordinates = self.coordinates
        return "-".join(f"{axis}{coordinates[axis]}" for axis, size in self._shapes["batch"].items() if size > 1)

    @property
    def dp_rank(self) -> int:
        """The index of the part of the samples that this rank reads, out of `dp_size`."""
        return self.coordinates[Axis.DP]

    @property
    def dp_size(self) -> int:
        """The number of parts into which the samples are split."""
        return self.sizes[Axis.DP]

    def for_axes(self, *axes: Axis | str, domain: str | None = None) -> DeviceMesh:
        """Return this rank's part of a domain along some axes, as a mesh with these axes.

        `fully_shard` takes `for_axes("dp_replicate", "dp_cp_shard")` for hybrid sharding. No new group is made.

        Args:
            axes: Axes of one domain, in its order.
            domain: The domain, if several have the axes; by default the first. Meshes that torch combines, such as for
                tensor and data parallelism of one module, must come from one domain.

        Raises:
            ConfigError: No domain has these axes in this order.
        """
        return submesh(self._mesh(self._domain_of(axes, domain)), *axes)

    def group(
        self, *axes: Axis | str, lane: Lane = "default", backend: str | None = None, high_priority: bool = False
    ) -> dist.ProcessGroup:
        """Return the process group of the ranks that differ from this one along some axes only.

        Collective over all ranks if the group does not exist yet; it is then made and warmed up. All ranks must call it
        in the same order. `group(axis)` for a single axis never makes one. Axes whose sizes multiply to 1 do not
        either.

        Args:
            axes: Axes of one domain, in its order.
            lane: The lane. Collectives of groups in different lanes can overlap. "moe" has experts' all-to-all,
                "reduce" gradients, and "pipeline" and "pipeline_backward" activations and their gradients. The lane
                "mixing" has weights of replicas, "checkpoint" saves in the background, and "default" all others.
            backend: "gloo", "nccl", ...; by default that of the default process group.
            high_priority: On nccl, the group's kernels run before other work of the GPU.

        Raises:
            ConfigError: No domain has these axes in this order, or the lane does not exist.
        """
        domain = self._domain_of(axes, None)
        options: dict[str, Any] = {"lane": lane, "backend": backend, "high_priority": high_priority}
        shape = self._shapes[domain] if {*axes} <= {*self._shapes[domain]} else self._tensor_shapes[domain]
        return self._group(shape, axes, domain, **options)

    def _group(self, shape: Mapping[str, int], axes: tuple[str, ...], domain: str, **options: Any) -> dist.ProcessGroup:
        return self._pooled(self._everywhere(partition(shape, axes)), f"{'+'.join(axes)}|{domain}", **options)

    def _pooled(self, split_ranks: Partition, description: str, **options: Any) -> dist.ProcessGroup:
        """Take this rank's group of a partition of the world from the pool. Collective over all ranks."""
        pool = self._open()
        pooled = pool.group(split_ranks, description=description, **options)
        pool.warm_up(self.device_type)
        self._described.setdefault(pooled, description)
        return pooled.group

    def pipeline_group(
        self, parts: Sequence[Sequence[int]], *axes: Axis | str, lane: Lane = "default", neighbours: bool = False
    ) -> dist.ProcessGroup:
        """Return the process group over some pipeline ranks, and over further axes.

        Collective over all ranks. This rank gets the group of the part with its pipeline rank; a rank outside of all
        parts gets a group of its own.

        Args:
            parts: Pipeline ranks that belong together, in parts of equal size, the same on all ranks.
            axes: Further axes of `batch` along which the group's ranks differ.
            lane: The lane, as for `group`.
            neighbours: If True, neighbours will exchange messages and are connected now.

        Raises:
            ConfigError: The domain `batch` lacks an axis.
        """
        shape = self._shapes["batch"]
        if unknown := [axis for axis in axes if axis not in shape]:
            raise ConfigError(
                f"the domain 'batch' has no axis {unknown[0]!r}, only {', '.join(shape)}: parameters that stages share "
                "cannot be sharded over it. Give each stage its own experts and attention"
            )
        ranks = torch.arange(self.config.world_size).view(*shape.values())  # [pp, dp, cp, tp]
        along = [axis for axis, name in enumerate(shape) if name in axes]
        alone = sorted({*range(shape[Axis.PP])} - {rank for part in parts for rank in part})
        split_ranks: list[tuple[int, ...]] = []
        for part in [*parts, *([rank] for rank in alone)]:
            members = along if len(part) > 1 else []
            of_part = ranks[list(part)].movedim([0, *members], list(range(-1 - len(members), 0)))
            split_ranks += map(
                tuple, of_part.reshape(-1, math.prod(of_part.shape[of_part.ndim - 1 - len(members) :])).tolist()
            )
        description = "+".join([f"pp ({'; '.join(' '.join(map(str, part)) for part in parts)})", *axes]) + "|batch"
        everywhere = self._everywhere(tuple(tuple(sorted(group)) for group in split_ranks))
        options: dict[str, Any] = {"lane": lane, "high_priority": neighbours, "neighbours": neighbours}
        return self._pooled(everywhere, description, **options)

    @property
    def everyone(self) -> dist.ProcessGroup | None:
        """All ranks of this mesh: the default process group, unless replicas are apart (`num_replicas` above 1)."""
        return dist.group.WORLD if self.num_replicas == 1 else self.group(Axis.WORLD)

    def group_of_replicas(
        self, *axes: Axis | str, lane: Lane = "default", backend: str | None = None
    ) -> dist.ProcessGroup:
        """Return the group of ranks that differ from this one only along some axes, in all replicas.

        Collective over all ranks.

        This is `group`, unless replicas are apart (`num_replicas` above 1).
        """
        if self.num_replicas == 1:
            return self.group(*axes, lane=lane, backend=backend)
        domain = self._domain_of(axes, None)
        numbers = [self._ranks(replica).tolist() for replica in range(self.num_replicas)]
        split = partition(self._shapes[domain], axes)
        joined = tuple(tuple(own[rank] for own in numbers for rank in ranks) for ranks in split)
        return self._pooled(joined, f"replicas+{'+'.join(axes)}|{domain}", lane=lane, backend=backend)

    def mixing_group(self, edges: Sequence[Sequence[int]]) -> dist.ProcessGroup:
        """Return the group of ranks at this rank's place in the replicas of one edge, in the lane "mixing".

        Collective over all ranks.

        Args:
            edges: Sets of replicas that mix; each replica is in one edge.
        """
        numbers = [self._ranks(replica).tolist() for replica in range(self.num_replicas)]
        largest_first = sorted((tuple(sorted(edge)) for edge in edges), key=lambda edge: (-len(edge), edge))
        split_ranks: list[tuple[int, ...]] = []
        for edge in largest_first:
            split_ranks += zip(*(numbers[each] for each in edge), strict=True)
        exchanges = max(map(len, edges)) == 2
        return self._pooled(tuple(split_ranks), "edges|replicas", lane="mixing", neighbours=exchanges)

    def set_timeout(self, seconds: float) -> None:
        """Set the time limit of collectives of all groups, the default group too. Local: call it on every rank."""
        self._timeout_seconds = seconds
        if self._pool is not None:
            self._pool.set_timeout(seconds)
        elif dist.group.WORLD is not None:
            set_group_timeout(dist.group.WORLD, timedelta(seconds=seconds))

    def describe(self, extra: Mapping[str, object] | None = None) -> str:
        """Return a table of domains and groups, as this rank sees them, for printing. Builds nothing.

        Args:
            extra: Further lines, from name to value.
        """
        world = self.config.world_size
        head = f"{world} {'ranks' if world > 1 else 'rank'} on {self.device_type}, seen from rank {self._rank}"
        if self.num_replicas > 1:
            head = f"replica {self.replica} of {self.num_replicas} apart: {head}"
        coordinates = self.coordinates
        domains = [
            (domain, "  ".join(f"{axis} {coordinates[axis]}/{size}" for axis, size in shape.items()))
            for domain, shape in self._shapes.items()
        ]
        groups = [
            (_ranks_in_short(pooled.ranks), pooled.lane, description)
            for pooled, description in self._described.items()
            if len(pooled.ranks) > 1
        ]
        lines = [head, *_aligned([("domain", "axis rank/size"), *domains])]
        if groups:
            lines += _aligned([("ranks of a group", "lane", "axes|domains"), *groups])
        return "\n".join([*lines, *_aligned([(name, str(value)) for name, value in (extra or {}).items()])])

    def close(self) -> None:
        """Close the domains; others can be built afterwards.

        The default process group is destroyed if it was made for them. Otherwise the groups stay for later domains, as
        long as the default process group lives. Later meshes compare equal to these, so DTensor treats them as the
        same.
        """
        if self._pool is not None:
            self._pool.release()
        self._pool, self._meshes, self._tensor_shapes, self._closed = None, {}, {}, True

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.config, self.device_type, self._timeout_seconds, self.num_replicas)

    def __deepcopy__(self, memo: dict[int, Any]) -> MeshDomains:
        return self

    def _mesh(self, domain: str) -> DeviceMesh:
        self._open()
        return self._meshes[domain]

    def _open(self) -> GroupPool:
        """Return the pool; the first call fills it with all groups of all domains."""
        if self._closed:
            raise RuntimeError("these mesh domains are closed; build new ones with MeshDomains.build")
        if self._pool is None:
            self._pool = pool = GroupPool.acquire(self.device_type, timeout_seconds=self._timeout_seconds)
            groups = {}
            for split_ranks, users in self._partitions().items():
                description = _description(users)
                pooled = pool.group(self._everywhere(split_ranks), description=description)
                self._described[pooled] = description
                groups |= dict.fromkeys(users, pooled.group)
            for domain, shape in self._shapes.items():
                self._meshes[domain] = self._device_mesh(shape, [groups[domain, axis] for axis in shape])
            pool.warm_up(self.device_type)
        return self._pool

    def _device_mesh(self, shape: Mapping[str, int], groups: list[dist.ProcessGroup]) -> DeviceMesh:
        ranks = self._ranks(self.replica).view(*shape.values())
        return DeviceMesh.from_group(groups, self.device_type, mesh=ranks, mesh_dim_names=tuple(shape))

    def _needs_groups(self) -> bool:
        free = (1, self.config.world_size) if self.num_replicas == 1 else (1,)
        return not all(len(split_ranks[0]) in free for split_ranks in self._partitions())

    def _ranks(self, replica: int) -> torch.Tensor:
        """Return torch's numbers of the ranks of one of these meshes, `[ranks]`."""
        stage_size = self.config.world_size // self.config.pipeline_parallel
        ranks = torch.arange(self.config.world_size * self.num_replicas, dtype=torch.int)
        return ranks.view(-1, self.num_replicas, stage_size)[:, replica].flatten().clone()  # torch looks at storage

    def _everywhere(self, split_ranks: Partition) -> Partition:
        """Convert a partition of the ranks of one of these meshes to one of the world."""
        if self.num_replicas == 1:
            return split_ranks
        numbers = [self._ranks(replica).tolist() for replica in range(self.num_replicas)]
        return tuple(tuple(own[rank] for rank in ranks) for ranks in split_ranks for own in numbers)

    def _partitions(self) -> dict[Partition, list[tuple[str, str]]]:
        """Return all partitions in the order in which their groups are made, each with its users (domain, axis)."""
        users = defaultdict(list)
        for domain, shape in self._shapes.items():
            for axis in shape:
                users[partition(shape, (axis,))].append((domain, axis))
        return users

    def _domain_of(self, axes: tuple[str, ...], domain: str | None) -> str:
        """Return the first domain, or `domain`, if it has the axes in this order."""
        shapes = self._shapes if domain is None else {domain: self._shapes.get(domain, {})}
        for name, shape in (*shapes.items(), *(self._tensor_shapes if domain is None else {}).items()):
            if axes and tuple(axis for axis in shape if axis in axes) == axes:
                return name
        known = "; ".join(f"{name}: {', '.join(shape)}" for name, shape in self._shapes.items())
        raise ConfigError(
            f"{f'domain {domain!r} does not have' if domain else 'no domain has'} the axes "
            f"{', '.join(map(repr, axes)) or '()'} in this order; there are {known}"
        )


def _rebuild(config: MeshConfig, device_type: str, timeout_seconds: float | None, num_replicas: int) -> MeshDomains:
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    needed = config.world_size * num_replicas
    if world_size != needed:
        here = f"has {world_size} ranks" if dist.is_initialized() else "is not initialized"
        raise ConfigError(
            f"cannot unpickle the mesh domains of {needed} ranks: the default process group {here}; call "
            f"torch.distributed.init_process_group on {needed} ranks first, or build new domains"
        )
    return MeshDomains.build(config, device_type, timeout_seconds=timeout_seconds, num_replicas=num_replicas)


def _description(users: Sequence[tuple[str, str]]) -> str:
    """Return `pp|regular,dense` for the axis pp of two domains; further axes follow a semicolon."""
    domains = defaultdict(list)
    for domain, axis in users:
        domains[axis].append(domain)
    return ";".join(f"{axis}|{','.join(names)}" for axis, names in domains.items())


def _ranks_in_short(ranks: Sequence[int]) -> str:
    """Return `0, 4, 8, 12`, or `0, 4, ..., 60` for more ranks that are evenly spaced."""
    steps = {after - before for before, after in pairwise(ranks)}
    if len(ranks) <= _MAX_LISTED or len(steps) > 1:
        return ", ".join(map(str, ranks))
    return f"{ranks[0]}, {ranks[1]}, ..., {ranks[-1]} ({len(ranks)})"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
