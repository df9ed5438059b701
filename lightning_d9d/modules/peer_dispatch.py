"""Experts on other ranks of a host: tokens are written into the memory of these ranks, and the host does not wait."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary, finalize

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_d9d.errors import ConfigError
from lightning_d9d.log import logger
from lightning_d9d.modules.dispatch import AllToAllDispatch, DispatchedTokens
from lightning_d9d.ops.backend import runs_triton
from lightning_d9d.ops.collectives import group_named
from lightning_d9d.ops.moe_permute import Permutation, sort_by_expert
from lightning_d9d.ops.moe_ranks import ranks_once
from lightning_d9d.ops.peer_buffers import gathered_objects
from lightning_d9d.ops.peer_exchange import PeerPlan, peer_combine, peer_dispatch, share_counts
from lightning_d9d.ops.peer_memory import (
    LATE,
    LEAST_SPARE_ROOM,
    SPARE_ROOM,
    PeerLayout,
    PeerMemory,
    allocate_peer_memory,
    drop_peer_memory,
    keep_peer_memory,
    peer_memory,
)

_NUMBERS = count()
_EXCHANGES: WeakKeyDictionary[Hashable, PeerExchange] = WeakKeyDictionary()
"""Exchanges by their owner, for all layers and stages."""
_MOST_GROWTH = 1.5
"""The most copies of tokens, as a multiple of the first room, for which "auto" allocates more memory."""


class PeerExchange:
    """The memory that ranks of a group write to, shared by all its `PeerDispatch`, and whether tokens fitted into it.

    Memory is allocated in the first forward. A rank's experts then have room for `capacity` times the token copies of
    the rank that has most. A rank has room for everything that the others may send at the same time.

    Args:
        group: The ranks, all on one host.
        capacity: Room for copies for a rank's experts, as a multiple of an even share.
        timeout_s: The limit of a wait for another rank, in seconds.

    Raises:
        ConfigError: The capacity is below 1 or infinite.
    """

    def __init__(self, group: dist.ProcessGroup, capacity: float = 1.5, *, timeout_s: float = 600.0) -> None:
        if not 1.0 <= capacity < math.inf:
            raise ConfigError(f"capacity={capacity} must be 1 or more: 1 has room only for equal loads")
        self.group_name, self.num_ranks = group.group_name, group.size()
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self.capacity, self.timeout_s = capacity, timeout_s
        self.name = f"{group.group_name}|{next(_NUMBERS)}"
        self.num_rows = 0
        """The number of copies of tokens that a rank's experts have room for."""
        self._first_rows = 0
        self.is_off = False
        """True while tokens travel by all-to-all."""
        self.is_optional = False
        """True if all-to-all may replace this exchange for good, where memory does not suffice."""
        self.is_replaced = False
        """True if it has."""
        finalize(self, drop_peer_memory, self.name)

    def __deepcopy__(self, memo: dict[int, Any]) -> PeerExchange:
        return self

    @property
    def memory(self) -> PeerMemory | None:
        """The memory that ranks write to; None before the first forward."""
        return peer_memory(self.name) if self.num_rows else None

    def prepare(self, x: Tensor, top_k: int, num_local: int) -> bool:
        """Allocate memory for tokens, if there is none yet, or none for rows of this width.

        Collective if it allocates any.

        Returns:
            Whether there is memory; if not, tokens travel by all-to-all.

        Raises:
            ConfigError: Another layer has other numbers of experts.
        """
        row_bytes = x.shape[1] * x.element_size()
        layout = peer_memory(self.name).layout if self.num_rows else None
        if layout is not None and (layout.num_local, layout.top_k) != (num_local, top_k):
            raise ConfigError(
                f"expert_dispatch='peer': a layer with {num_local} experts a rank and {top_k} a token cannot share "
                f"memory with one that has {layout.num_local} and {layout.top_k}; choose 'all_to_all'"
            )
        if not self.is_replaced and (layout is None or layout.row_bytes < row_bytes):
            self._allocate(len(x), row_bytes, top_k, num_local, x.device)
        return not self.is_replaced

    def failures(self) -> Tensor | None:
        """Return the flags `OVERFLOW` and `LATE`, an int32 on the device; None before the first forward."""
        return None if (memory := self.memory) is None else memory.status

    def grow(self, lacking: Callable[[float, float, int], int] = lambda before, after, others: 0) -> None:
        """Allocate as much memory as the last batch needed, with spare room, and clear the flags.

        Collective; the host waits. If the exchange is optional and would need too much even with the least spare room,
        all-to-all replaces it.

        Args:
            lacking: The bytes that this rank lacks for layers with more room. Its arguments are the room before and
                after, as multiples of an even share, and further bytes of the memory that other ranks write to.

        Raises:
            RuntimeError: A rank did not arrive in time.
        """
        memory = self.memory
        if memory is None:
            return
        _, status, tokens, copies, _ = memory.state.tolist()
        self.check(status)
        layout, group = memory.layout, group_named(self.group_name)
        tokens, copies = (max(each) for each in zip(*gathered_objects(group, (tokens, copies)), strict=True))
        if self.is_optional and copies > _MOST_GROWTH * self._first_rows:
            self.replace(
                f"experts of a rank had {copies:,} copies of tokens, and room for {self._first_rows:,}. With so "
                "uneven a load every layer would have memory for as many. Raise ParallelConfig.expert_capacity to keep "
                "'peer'"
            )
            return
        for spare in (SPARE_ROOM, LEAST_SPARE_ROOM):
            num_tokens = layout.num_rows if tokens <= layout.num_rows else math.ceil(tokens * spare)
            num_rows = self.num_rows if copies <= self.num_rows else math.ceil(copies * spare)
            before, after = (self.capacity * rows / self._first_rows for rows in (self.num_rows, num_rows))
            larger = layout._replace(num_rows=num_tokens)
            lacks = lacking(before, after, larger.num_bytes - layout.num_bytes) if self.is_optional else 0
            most = max(gathered_objects(group, lacks))
            if most == 0:
                break
        else:
            missing = f"{most / 2**30:.1f} GiB"
            self.replace(f"with room for {num_rows:,} copies of tokens a step needs {missing} more than a rank has")
            return
        if num_tokens > layout.num_rows:
            self._keep(larger, num_rows, memory.own.device)
        else:
            memory.state[1:] = 0
            self.num_rows = num_rows

    def check(self, status: int) -> None:
        """Raise `RuntimeError` if a rank did not arrive in time."""
        if status & LATE:
            raise RuntimeError(
                f"expert_dispatch='peer': a rank of {list(self.ranks)} did not write its tokens within "
                f"{self.timeout_s:g} s; it has died or hangs"
            )

    def close(self) -> None:
        """Free the memory. Local."""
        drop_peer_memory(self.name)
        self.num_rows = 0

    def replace(self, reason: str) -> None:
        """Send tokens by all-to-all from now on, and free the memory. Local; all ranks of the group call it."""
        self.close()
        self.is_replaced = True
        if self.ranks[0] == dist.get_rank():
            logger.warning("expert_dispatch='auto' takes all_to_all from now on: %s", reason)

    def _allocate(self, num_tokens: int, row_bytes: int, top_k: int, num_local: int, device: torch.device) -> None:
        most = max(1, *gathered_objects(group_named(self.group_name), num_tokens))
        # No rank has more to send. More than that arrives only where the load is very uneven.
        layout = PeerLayout(self.num_ranks, num_local, most * min(self.num_ranks, top_k), row_bytes, top_k)
        worst = self.num_ranks * most * min(top_k, num_local)
        self._first_rows = min(worst, math.ceil(self.capacity * most * top_k))
        self._keep(layout, self._first_rows, device)

    def _keep(self, layout: PeerLayout, num_rows: int, device: torch.device) -> None:
        self.close()
        group = group_named(self.group_name)
        try:
            memory = allocate_peer_memory(group, layout, device, timeout_s=self.timeout_s)
        except ConfigError as error:
            if not self.is_optional:
                raise
            self.replace(str(error))
            return
        keep_peer_memory(self.name, memory)
        self.num_rows = num_rows


def peer_exchange(owner: Hashable, group: dist.ProcessGroup, capacity: float) -> PeerExchange:
    """Return the exchange that all layers of an owner share. Local.

    Args:
        owner: An object that all ranks have made together, such as a mesh. Exchanges of earlier owners are not shared:
            some ranks may have collected them as garbage, and others not.
        group: The ranks.
        capacity: As for `PeerExchange`.
    """
    exchange = _EXCHANGES.get(owner)
    if exchange is None or exchange.capacity != capacity or exchange.is_replaced:
        exchange = _EXCHANGES[owner] = PeerExchange(group, capacity)
    return exchange


def peer_exchanges(modules: Iterable[nn.Module]) -> list[PeerExchange]:
    """Return the exchanges of the mixtures of experts in some modules, each once. Local."""
    dispatches = (getattr(part, "dispatch", None) for module in modules for part in module.modules())
    return list({each.exchange.name: each.exchange for each in dispatches if isinstance(each, PeerDispatch)}.values())


class PeerDispatch:
    """`Dispatch` to experts that are distributed over the ranks of one host, evenly and in order, through their memory.

    The sent data, and the order of rows and sums, are those of `AllToAllDispatch`. But each rank writes its tokens
    directly into the memory of the receiving ranks. Only the device knows how many there are, so the host does not
    wait. In the result of `dispatch`, `x` has room for a fixed number of rows; `offsets` say how many are used, and the
    others are arbitrary.

    If tokens do not fit, a flag on the device is set (`PeerExchange.failures`), and results of this and later forwards
    are invalid until `PeerExchange.grow`. Backwards of earlier forwards stay valid. If no gradient is recorded, tokens
    are sent by all-to-all, as with `PeerExchange.is_off`.

    Both methods, and their backward, are collective, also for ranks without tokens.

    Args:
        num_experts: Number of experts on all ranks.
        group: Group of the ranks, in the order of the experts.
        exchange: The exchange, which other objects of the group share.

    Raises:
        ConfigError: The experts cannot be distributed evenly.
    """

    def __init__(self, num_experts: int, group: dist.ProcessGroup, exchange: PeerExchange | None = None) -> None:
        self.plain = AllToAllDispatch(num_experts, group)
        self.num_experts, self.num_ranks = num_experts, group.size()
        self.exchange = PeerExchange(group) if exchange is None else exchange

    def dispatch(self, x: Tensor, indices: Tensor, weights: Tensor) -> DispatchedTokens:
        """See `Dispatch`. Collective.

        Raises:
            ConfigError: A rank cannot write to another rank's memory; raised on every rank, in the first call.
        """
        exchange, num_local = self.exchange, self.num_experts // self.num_ranks
        is_off = exchange.is_off or not torch.is_grad_enabled()
        if is_off or not exchange.prepare(x, indices.shape[1], num_local):
            return self.plain.dispatch(x, indices, weights)
        triton = runs_triton(x, weights)
        ranks = ranks_once(indices, num_local, self.num_ranks)
        to_ranks = sort_by_expert(ranks, self.num_ranks + 1)
        to_experts = sort_by_expert(indices, self.num_experts)
        shared = (exchange.num_rows, exchange.name, triton)
        table, shifts, offsets = share_counts(to_ranks.counts[:-1], to_experts, *shared)
        plan = PeerPlan(to_ranks.places, ranks, table)
        rows, of_rows, places = peer_dispatch(x, weights, indices, to_experts.places, shifts, plan, *shared)
        copies = Permutation(places, offsets.diff(prepend=offsets.new_zeros(1)), offsets, exchange.num_rows)
        return DispatchedTokens(rows, of_rows, offsets, copies, plan)

    def combine(self, results: Tensor, tokens: DispatchedTokens) -> Tensor:
        """See `Dispatch`. Collective."""
        if not isinstance(tokens.exchange, PeerPlan):
            return self.plain.combine(results, tokens)
        triton = runs_triton(results)
        return peer_combine(results, tokens.copies.places, tokens.exchange, self.exchange.name, triton)
