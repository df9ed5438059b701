"""One pool of process groups for all mesh domains.

[Note: group pool] A *partition* splits all ranks into groups of equal size: the groups of an axis, or of several axes
together. Axes of two domains often split the ranks in the same way, as `pp` does in four of them. Torch would make a
communicator for each. The pool makes one group for each partition, *lane*, backend and priority, and returns the same
object to every caller. A rank that is alone has a single group for all such partitions. The partition whose only part
is the world uses the default group.

Collectives of one group run one after another. Traffic that should overlap therefore needs other groups over the same
ranks: lanes. Only callers that ask for another lane get one.

There is one pool for the default group, and its groups live as long as the default group. Domains that are built again
get the same groups. Reusing groups is also needed for correctness. DTensor caches results by mesh, and treats meshes
with equal ranks and names as equal even if their groups differ. With new groups it would continue to use the groups of
the earlier mesh.

All ranks must ask for new groups in the same order, as with `torch.distributed.new_group`.

A message that was sent and never received would meet the first receive of a later run. On gloo, a receive whose buffer
is gone even blocks all later messages of that rank. Code that leaves a group in this state calls `abandon`. The ranks
that next ask for the group get a new one.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, Literal, get_args

import torch
import torch.distributed as dist

from lightning_d9d.errors import ConfigError
from lightning_d9d.mesh.collectives import all_gather_object
from lightning_d9d.mesh.native_threads import guard_native_threads

_MESSAGE_BLOCKS = 16
"""Thread blocks of nccl's kernel for a message, which occupies them while it waits for its peer. On an H200 a large
product ran 11 % slower beside a kernel of nccl's own size (32), and at full speed beside one of 8. With 8 blocks, 16
MiB took 0.13 ms instead of 0.07. Between two H200, pipeline steps of 16 microbatches of 8192 tokens took the same time
with 4, 8 and 16.
"""

Lane = Literal["default", "moe", "reduce", "pipeline", "pipeline_backward", "mixing", "checkpoint"]
_ASYNCHRONOUS = ("pipeline", "pipeline_backward", "mixing")
"""Lanes whose messages may be under way when a run ends with an error. Only their groups can be abandoned."""
Partition = tuple[tuple[int, ...], ...]
"""All ranks in groups, as `partition` returns them."""


def partition(shape: Mapping[str, int], axes: Sequence[str]) -> Partition:
    """Return all ranks of a domain in groups; the ranks of a group differ only along `axes`.

    Groups are ordered by their first ranks, and ranks ascend. So equal partitions are equal tuples, also if names of
    axes differ.
    """
    offsets, starts, stride = [0], [0], math.prod(shape.values())
    for axis, size in shape.items():
        stride //= size
        steps = range(0, size * stride, stride)
        if axis in axes:
            offsets = [base + step for base in offsets for step in steps]
        else:
            starts = [base + step for base in starts for step in steps]
    return tuple(tuple(start + offset for offset in offsets) for start in starts)


@dataclass(eq=False, kw_only=True)
class PooledGroup:
    """A process group that contains this rank."""

    group: dist.ProcessGroup
    ranks: tuple[int, ...]
    """Global ranks of the group, ascending."""
    lane: Lane
    description: str
    """The first caller that asked for the group."""
    neighbours: bool = False
    """If True, consecutive ranks exchange messages."""
    is_warm: bool = False
    are_connected: bool = False
    """True after the neighbours have been connected."""
    is_abandoned: bool = False
    """True after this rank has left the group with messages under way."""


class GroupPool:
    """A pool that makes, keeps and destroys process groups; `acquire` returns it. [Note: group pool]."""

    _living: ClassVar[GroupPool | None] = None

    def __init__(self, device_type: str) -> None:
        guard_native_threads()
        self._owns_world = not dist.is_initialized()
        if self._owns_world:
            backend = dist.get_default_backend_for_device(device_type)
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        assert dist.group.WORLD is not None
        self._world = dist.group.WORLD
        self._rank = dist.get_rank()
        self._timeout: timedelta | None = None
        self._by_key: dict[tuple[Partition, Lane, str, bool], PooledGroup] = {}
        self._num_users = 0

    @classmethod
    def acquire(cls, device_type: str, *, timeout_seconds: float | None = None) -> GroupPool:
        """Return the pool of the default process group. Every user calls `release` at the end.

        Without a default process group it makes one of this rank alone, in memory, for as long as it has users.

        Args:
            device_type: "cpu" or "cuda": device of a default process group made here.
            timeout_seconds: Time limit of a pooled group's collectives; None leaves the limit unchanged (at first
                torch's own). The default group keeps its own limit.
        """
        pool = cls.living()
        if pool is None:
            pool = cls._living = cls(device_type)
        if timeout_seconds is not None:
            pool._timeout = timedelta(seconds=timeout_seconds)
            for pooled in pool.groups:
                if pooled.group is not pool._world:
                    set_group_timeout(pooled.group, pool._timeout)
        pool._num_users += 1
        return pool

    @classmethod
    def living(cls) -> GroupPool | None:
        """Return the pool of the default process group, if it has one. A pool ends with its default group."""
        if cls._living is not None and (not dist.is_initialized() or cls._living._world is not dist.group.WORLD):
            cls._living = None
        return cls._living

    @property
    def groups(self) -> tuple[PooledGroup, ...]:
        """Return this rank's groups in the order in which they were made."""
        return tuple(self._by_key.values())

    def group(
        self,
        split_ranks: Partition,
        *,
        description: str,
        lane: Lane = "default",
        backend: str | None = None,
        high_priority: bool = False,
        neighbours: bool = False,
    ) -> PooledGroup:
        """Return this rank's group of a partition. Collective over all ranks if it is new.

        Args:
            split_ranks: All ranks in groups, the largest first.
            description: Text for messages and torch's flight recorder; that of the first call stays.
            lane: The lane; equal partitions in another lane have another group.
            backend: "gloo", "nccl", ...; by default the default group's.
            high_priority: On nccl, the group's kernels run before other work of the GPU; other backends have no
                priorities.
            neighbours: If True, consecutive ranks will exchange messages; `warm_up` connects them.

        Raises:
            ConfigError: The lane does not exist.
        """
        if lane not in get_args(Lane):
            raise ConfigError(f"lane={lane!r} must be one of {', '.join(map(repr, get_args(Lane)))}")
        own_backend = dist.get_backend(self._world)
        backend = backend or own_backend
        high_priority = high_priority and backend == "nccl"
        if len(split_ranks[0]) == 1:  # this rank is alone and has nothing to wait for, in any lane
            split_ranks, lane, high_priority = tuple((rank,) for rank in range(dist.get_world_size())), "default", False
        key = (split_ranks, lane, backend, high_priority)
        if lane in _ASYNCHRONOUS and key in self._by_key and self._is_abandoned_anywhere(key):
            _end(self._by_key.pop(key).group)
        if key not in self._by_key:
            is_world = len(split_ranks) == 1 and (lane, backend, high_priority) == ("default", own_backend, False)
            self._by_key[key] = PooledGroup(
                group=self._world
                if is_world
                else self._make(split_ranks, description, lane, backend, high_priority, for_messages=neighbours),
                ranks=next(ranks for ranks in split_ranks if self._rank in ranks),
                lane=lane,
                description=description,
            )
        self._by_key[key].neighbours |= neighbours
        return self._by_key[key]

    def warm_up(self, device_type: str) -> None:
        """Connect the ranks of every group made since the last call, and new neighbours with each other. Collective.

        nccl connects a group at its first collective, and two ranks at their first message. Without a warm-up this
        happens during the first step, when memory is full.
        """
        for pooled in self.groups:
            connect = pooled.neighbours and not pooled.are_connected
            if len(pooled.ranks) == 1 or (pooled.is_warm and not connect):
                continue
            token = torch.ones(1, device="cpu" if dist.get_backend(pooled.group) == "gloo" else device_type)
            if not pooled.is_warm:
                dist.all_reduce(token, group=pooled.group)
            if connect:
                _exchange_with_neighbours(pooled, token)
            token.item()  # on CUDA the collective has only been queued
            pooled.is_warm, pooled.are_connected = True, pooled.are_connected or connect

    def set_timeout(self, seconds: float) -> None:
        """Set the time limit of collectives of every pooled group and the default group. Local.

        The lane "checkpoint" is left out: saves run in the background, and disks may be slow.
        """
        self._timeout = timedelta(seconds=seconds)
        for pooled in self.groups:
            if pooled.lane != "checkpoint":
                set_group_timeout(pooled.group, self._timeout)

    def release(self) -> None:
        """Count one user less; after the last, `close` if the pool made the default group."""
        self._num_users -= 1
        if self._num_users == 0 and self._owns_world:
            self.close()

    def close(self) -> None:
        """Destroy all groups, and the default group if the pool made it.

        Every rank must call it; meshes cannot be used afterwards.
        """
        if GroupPool.living() is not self:
            return  # the default group has ended, and all groups with it
        GroupPool._living = None
        for pooled in reversed(self.groups):
            if pooled.group is not self._world:
                dist.destroy_process_group(pooled.group)
        if self._owns_world:
            dist.destroy_process_group()

    def _is_abandoned_anywhere(self, key: tuple[Partition, Lane, str, bool]) -> bool:
        return any(all_gather_object(self._by_key[key].is_abandoned, self._world))

    def _make(
        self,
        split_ranks: Partition,
        description: str,
        lane: Lane,
        backend: str,
        high_priority: bool,
        for_messages: bool,
    ) -> dist.ProcessGroup:
        options = None
        if high_priority or (for_messages and backend == "nccl"):
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=high_priority)
            if for_messages:
                options.config.max_ctas = _MESSAGE_BLOCKS
        settings: dict[str, Any] = {
            "timeout": self._timeout,
            "pg_options": options,
            "group_desc": description if lane == "default" else f"{description}@{lane}",
        }
        own = None
        if len(split_ranks[0]) == 1:  # this rank is alone in the group
            own = dist.new_group([self._rank], backend=backend, use_local_synchronization=True, **settings)
        elif self._world.bound_device_id is not None and backend == dist.get_backend(self._world):
            own = dist.split_group(split_ranks=[list(ranks) for ranks in split_ranks], **settings)
        else:
            for (
                ranks
            ) in split_ranks:  # every rank takes part in making every group, else torch numbers them differently
                if len(ranks) == 1 and self._rank not in ranks:
                    continue
                group = dist.new_group(
                    list(ranks), backend=backend, use_local_synchronization=len(ranks) == 1, **settings
                )
                own = group if self._rank in ranks else own
        assert isinstance(own, dist.ProcessGroup)
        return own


def _exchange_with_neighbours(pooled: PooledGroup, token: torch.Tensor) -> None:
    """Exchange one message each way between consecutive ranks, the last and the first included."""
    index, size = pooled.group.rank(), pooled.group.size()
    peers = [pooled.ranks[(index + step) % size] for step in (1, -1)]
    sends = [dist.P2POp(dist.isend, token, peer, pooled.group) for peer in peers]
    receives = [dist.P2POp(dist.irecv, torch.empty_like(token), peer, pooled.group) for peer in reversed(peers)]
    for work in dist.batch_isend_irecv([*sends, *receives]):
        work.wait()


def abandon(group: dist.ProcessGroup) -> None:
    """Mark a group that may have undelivered messages after an error: a later run gets a new group. Local."""
    pool = GroupPool.living()
    for pooled in () if pool is None else pool.groups:
        pooled.is_abandoned |= pooled.group is group


def _end(group: dist.ProcessGroup) -> None:
    """End a group, also with messages under way. An aborted group keeps its name: torch numbers new ones.

    Gloo's object is never freed: that would wait for collectives under way, which other ranks may never join.
    """
    if dist.get_backend(group) == "nccl":
        group.abort()
    else:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        dist.destroy_process_group(group)


def set_group_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Set the time limit of a group's collectives (on gloo not of its messages). Local."""
    # Before torch 2.14 there is no public function for this.
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    set_timeout(timeout, group)
