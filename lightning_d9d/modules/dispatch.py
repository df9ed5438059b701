from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_d9d.errors import ConfigError
from lightning_d9d.legal import divisors, nearest
from lightning_d9d.ops import Permutation, all_to_all_rows, moe_unpermute
from lightning_d9d.ops.moe_permute import sort_by_expert, sort_by_source

MAX_ROWS = torch.iinfo(torch.int32).max
"""The most rows that the offsets of grouped products can count."""


class Exchange(NamedTuple):
    """How rows came from other ranks."""

    sent: list[int]
    """Number of rows to each rank."""

    received: list[int]
    """Number of rows from each rank."""

    by_expert: Permutation
    """From the order in which they came, by source, to the one by expert."""


class DispatchedTokens(NamedTuple):
    """A copy of each token for each expert that it visits; on the rank of these experts, sorted by expert."""

    x: Tensor
    """The copies for this rank's experts, shape `[rows, hidden]`."""

    weights: Tensor
    """Factor of each row's result, shape `[rows]`."""

    offsets: Tensor
    """The row after the last one of each of this rank's experts, int32, shape `[local experts]`."""

    copies: Permutation
    """From this rank's tokens to their copies, sorted by expert and, within an expert, by token."""

    exchange: Exchange | None = None
    """How the rows came from the ranks of their tokens, if not from here."""


class Dispatch(Protocol):
    """Brings tokens to their experts, and the results back."""

    def dispatch(self, x: Tensor, indices: Tensor, weights: Tensor) -> DispatchedTokens:
        """Copies and sorts the tokens.

        Args:
            x: shape `[tokens, hidden]`.
            indices: the experts of each token, shape `[tokens, top_k]`.
            weights: factors of these experts' results, shape `[tokens, top_k]`.

        Raises:
            ConfigError: More copies than int32 can count.
        """
        ...

    def combine(self, results: Tensor, tokens: DispatchedTokens) -> Tensor:
        """Sums the results of each token's copies, always in the same order, shape `[tokens, hidden]`.

        Args:
            results: one for each row of `tokens.x`, shape `[rows, hidden]`.
            tokens: what `dispatch` has returned.
        """
        ...


class LocalDispatch:
    """`Dispatch` to experts that are all on this device. Nothing waits for the host."""

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts

    def dispatch(self, x: Tensor, indices: Tensor, weights: Tensor) -> DispatchedTokens:
        """See `Dispatch`."""
        tokens = self.sort(x, indices, weights)
        return tokens._replace(x=tokens.copies.copy(x))

    def sort(self, x: Tensor, indices: Tensor, weights: Tensor) -> DispatchedTokens:
        """Sort copies of tokens as `dispatch`, but leave `x` as it is, for experts that make and sum the copies."""
        if indices.numel() > MAX_ROWS:
            raise _too_many(f"there are {indices.numel()} copies of tokens (tokens * top_k)")
        copies = sort_by_expert(indices, self.num_experts)
        return DispatchedTokens(x, copies.spread(weights), copies.offsets, copies)

    def combine(self, results: Tensor, tokens: DispatchedTokens) -> Tensor:
        """See `Dispatch`."""
        return moe_unpermute(results, tokens.copies)


class AllToAllDispatch:
    """`Dispatch` to experts that are spread over the ranks of a process group, evenly and in order.

    Rank r of n holds the experts from r/n to (r + 1)/n of all. Three exchanges bring the tokens there: one small
    message of fixed size, with which every rank learns what all others will send; the rows; their weights. A fourth
    brings the results back. The rows of an expert are ordered by rank, then by token, so all is deterministic. The host
    reads how many rows go where, once a call, and waits for nothing else.

    Both methods, and their backward, are collective, also for ranks without tokens. All ranks agree on which of `x` and
    `weights` require gradients, and on their dtypes.

    Args:
        num_experts: Of all ranks.
        group: Its ranks, in the order of the experts. Only its name is kept, so that modules with it can be copied.

    Raises:
        ConfigError: The experts cannot be spread evenly.
    """

    def __init__(self, num_experts: int, group: dist.ProcessGroup) -> None:
        self.num_experts = num_experts
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self.rank, self.num_ranks, self.group_name = group.rank(), group.size(), group.group_name
        if num_experts % self.num_ranks:
            legal = nearest(self.num_ranks, divisors(num_experts))
            raise ConfigError(
                f"{num_experts} experts cannot be spread evenly over the {self.num_ranks} ranks {list(self.ranks)}: "
                f"expert_parallel must divide the number of experts, as {' and '.join(map(str, legal))} do"
            )

    def dispatch(self, x: Tensor, indices: Tensor, weights: Tensor) -> DispatchedTokens:
        """See `Dispatch`. Collective.

        Raises:
            ConfigError: A rank sends or receives more rows than int32 can count; on every rank.
        """
        copies = sort_by_expert(indices, self.num_experts)
        by_rank = self._gather(copies.counts.long()).unflatten(1, (self.num_ranks, -1))
        traffic = by_rank.sum(-1)
        on_host = traffic.to("cpu", non_blocking=True)
        is_on_host = torch.cuda.current_stream().record_event() if traffic.is_cuda else None

        # While the host waits. Too many rows may find no memory, and then every rank raises below.
        if indices.numel() <= MAX_ROWS:
            x, weights = copies.copy(x), copies.spread(weights)
        if is_on_host is not None:
            is_on_host.synchronize()
        sent, received = self._splits(on_host.tolist())

        x = all_to_all_rows(x, received, sent, self.group_name)
        weights = all_to_all_rows(weights, received, sent, self.group_name)
        by_expert = sort_by_source(by_rank[:, self.rank], len(x))
        exchange = Exchange(sent, received, by_expert)
        return DispatchedTokens(by_expert.copy(x), by_expert.copy(weights), by_expert.offsets, copies, exchange)

    def combine(self, results: Tensor, tokens: DispatchedTokens) -> Tensor:
        """See `Dispatch`. Collective."""
        assert tokens.exchange is not None, "these tokens were dispatched by another class"
        sent, received, by_expert = tokens.exchange
        return tokens.copies.sum(all_to_all_rows(by_expert.sum(results), sent, received, self.group_name))

    def _gather(self, message: Tensor) -> Tensor:
        """Every rank's message. As an all-to-all, so that a recomputation keeps it where it keeps those."""
        once = [1] * self.num_ranks
        return all_to_all_rows(message.expand(self.num_ranks, -1), once, once, self.group_name)

    def _splits(self, traffic: list[list[int]]) -> tuple[list[int], list[int]]:
        """How many rows this rank sends to each and receives from each, if all is well on all ranks."""
        columns = list(zip(*traffic, strict=True))
        for verb, totals in (("sends", map(sum, zip(*columns, strict=True))), ("receives", map(sum, columns))):
            for rank, total in zip(self.ranks, totals, strict=True):
                if total > MAX_ROWS:
                    raise _too_many(f"rank {rank} {verb} {total} copies of tokens (tokens * top_k)")
        return list(traffic[self.rank]), list(columns[self.rank])


def _too_many(what: str) -> ConfigError:
    return ConfigError(
        f"{what}, more than the {MAX_ROWS} that int32 counts: take smaller microbatches, shorter sequences or more "
        "ranks"
    )
