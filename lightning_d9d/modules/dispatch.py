from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_d9d.errors import ConfigError
from lightning_d9d.legal import divisors, nearest
from lightning_d9d.ops import Permutation, all_to_all_copies, all_to_all_rows, moe_unpermute
from lightning_d9d.ops.messages import give_way, launched, sending, sending_after, takes_turns
from lightning_d9d.ops.moe_permute import sort_by_expert
from lightning_d9d.ops.moe_ranks import ranks_once
from lightning_d9d.ops.peer_exchange import PeerPlan

MAX_ROWS = torch.iinfo(torch.int32).max
"""The largest number of rows that the offsets of grouped products can count."""


class Exchange(NamedTuple):
    """The record of how tokens came from other ranks."""

    sent: list[int]
    """Number of tokens to each rank."""

    received: list[int]
    """Number of tokens from each rank."""

    to_ranks: Permutation
    """Permutation from this rank's tokens to those that it sent: one for each rank with experts of the token."""


class DispatchedTokens(NamedTuple):
    """A copy of each token for each expert that it visits, on the rank of these experts, sorted by expert."""

    x: Tensor
    """The copies for this rank's experts, shape `[rows, hidden]`."""

    weights: Tensor
    """Factor of each row's result, shape `[rows]`."""

    offsets: Tensor
    """One past the last row of each of this rank's experts, int32, shape `[local experts]`."""

    copies: Permutation
    """Permutation from the tokens on this rank to their copies, sorted by expert and, within an expert, by token."""

    exchange: Exchange | PeerPlan | None = None
    """The exchange that brought the tokens here; None if all are this rank's own."""


class Dispatch(Protocol):
    """Sends tokens to their experts, and the results back."""

    def dispatch(self, x: Tensor, indices: Tensor, weights: Tensor) -> DispatchedTokens:
        """Copy and sort the tokens.

        Args:
            x: Shape `[tokens, hidden]`.
            indices: The experts of each token, shape `[tokens, top_k]`.
            weights: Factors of these experts' results, shape `[tokens, top_k]`.

        Raises:
            ConfigError: There are more copies than int32 can count.
        """
        ...

    def combine(self, results: Tensor, tokens: DispatchedTokens) -> Tensor:
        """Sum the results of each token's copies, always in the same order, shape `[tokens, hidden]`.

        Args:
            results: One result for each row of `tokens.x`, shape `[rows, hidden]`.
            tokens: Result of `dispatch`.
        """
        ...


class LocalDispatch:
    """`Dispatch` to experts that are all on this device. The host does not wait."""

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts

    def dispatch(self, x: Tensor, indices: Tensor, weights: Tensor) -> DispatchedTokens:
        """See `Dispatch`."""
        tokens = self.sort(x, indices, weights)
        return tokens._replace(x=tokens.copies.copy(x))

    def sort(self, x: Tensor, indices: Tensor, weights: Tensor) -> DispatchedTokens:
        """Sort copies of tokens like `dispatch`, but do not copy `x`: the experts make and sum the copies."""
        if indices.numel() > MAX_ROWS:
            raise _too_many(f"there are {indices.numel()} copies of tokens (tokens * top_k)")
        copies = sort_by_expert(indices, self.num_experts)
        return DispatchedTokens(x, copies.spread(weights), copies.offsets, copies)

    def combine(self, results: Tensor, tokens: DispatchedTokens) -> Tensor:
        """See `Dispatch`."""
        return moe_unpermute(results, tokens.copies)


class AllToAllDispatch:
    """`Dispatch` to experts that are distributed over the ranks of a process group, evenly and in order.

    Rank r of n holds the experts from r/n to (r + 1)/n of all. A token is sent to each rank at most once, however many
    of its experts are there, with the numbers and weights of its experts. The receiving rank makes the copies for its
    experts, and sums their results in float32. One row in the tokens' dtype is sent back, and the token's rank sums
    these rows.

    Three exchanges send the tokens. The first is a small message of fixed size, which tells every rank what all others
    will send. The second has the tokens, and the third their experts and weights. A fourth returns the results. The
    rows of an expert are ordered by rank, then by token, so the result is deterministic. The host reads the numbers of
    rows once in each call, and does not wait otherwise.

    Both methods, and their backward, are collective, also for ranks without tokens. All ranks must agree on which of
    `x` and `weights` require gradients, and on their dtypes.

    Args:
        num_experts: Number of experts on all ranks.
        group: Group of the ranks, in the order of the experts. Only its name is stored, so that modules with this
            object can be copied.

    Raises:
        ConfigError: The experts cannot be distributed evenly.
    """

    def __init__(self, num_experts: int, group: dist.ProcessGroup) -> None:
        self.num_experts = num_experts
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self.rank, self.num_ranks, self.group_name = group.rank(), group.size(), group.group_name
        if num_experts % self.num_ranks:
            legal = nearest(self.num_ranks, divisors(num_experts))
            raise ConfigError(
                f"{num_experts} experts cannot be distributed evenly over the {self.num_ranks} ranks "
                f"{list(self.ranks)}: expert_parallel must divide the number of experts, as "
                f"{' and '.join(map(str, legal))} do"
            )

    def dispatch(self, x: Tensor, indices: Tensor, weights: Tensor) -> DispatchedTokens:
        """See `Dispatch`. Collective.

        Raises:
            ConfigError: A rank sends or receives more rows than int32 can count; on every rank.
        """
        experts_of_rank = self.num_experts // self.num_ranks
        ranks = indices // experts_of_rank
        to_ranks = sort_by_expert(ranks_once(indices, experts_of_rank, self.num_ranks), self.num_ranks + 1)
        copies = (ranks.view(-1, 1) == torch.arange(self.num_ranks, device=ranks.device)).sum(0)
        counts = torch.stack([to_ranks.counts[:-1], copies])
        most = to_ranks._replace(num_rows=len(x) * min(self.num_ranks, indices.shape[1]))
        make = partial(_rows_to_send, x, indices, weights, most)
        rows = make() if takes_turns() else None
        point = launched() if rows and rows[1] else None  # of copies that are made later there is no point yet
        give_way()
        with sending_after(point) if takes_turns() else nullcontext():  # the compiler does not enter others
            with sending() if takes_turns() else nullcontext():
                traffic = self._gather(counts)  # kept until the copy is made
                on_host = traffic.to("cpu", non_blocking=True)
                is_on_host = torch.cuda.current_stream().record_event() if counts.is_cuda else None
            notes, made = rows or make()  # while the host waits
            if is_on_host is not None:
                is_on_host.synchronize()
            sent, received, num_rows = self._splits(on_host.tolist())

            made = made or _made(most, x, notes)
            x, notes = all_to_all_copies(x, notes, made, most, received, sent, self.group_name)
        to_ranks = to_ranks._replace(num_rows=sum(sent))
        of_tokens, experts = notes.split(indices.shape[1], dim=1)
        own = experts.detach().to(indices.dtype) - self.rank * experts_of_rank
        own = torch.where((own >= 0) & (own < experts_of_rank), own, experts_of_rank)
        to_experts = sort_by_expert(own, experts_of_rank + 1)._replace(num_rows=num_rows)
        of_rows = to_experts.spread(of_tokens).to(weights.dtype)
        offsets = to_experts.offsets[:-1]
        return DispatchedTokens(to_experts.copy(x), of_rows, offsets, to_experts, Exchange(sent, received, to_ranks))

    def combine(self, results: Tensor, tokens: DispatchedTokens) -> Tensor:
        """See `Dispatch`. Collective."""
        assert isinstance(tokens.exchange, Exchange), "these tokens were dispatched by another class"
        sent, received, to_ranks = tokens.exchange
        return to_ranks.sum(all_to_all_rows(tokens.copies.sum(results), sent, received, self.group_name))

    def _gather(self, message: Tensor) -> Tensor:
        """Return every rank's message.

        It is an all-to-all, so that a recomputation that keeps all-to-alls also keeps it.
        """
        once = [1] * self.num_ranks
        return all_to_all_rows(message.expand(self.num_ranks, *message.shape), once, once, self.group_name)

    def _splits(self, traffic: list[list[list[int]]]) -> tuple[list[int], list[int], int]:
        """Return the tokens sent to each rank, those received from each, and the number of copies made from these.

        Args:
            traffic: The numbers of tokens from each rank to each other, and of their copies there.
        """
        tokens, copies = zip(*traffic, strict=True)
        arriving = [*map(sum, zip(*copies, strict=True))]
        for verb, totals in (("sends", map(sum, copies)), ("receives", arriving)):
            for rank, total in zip(self.ranks, totals, strict=True):
                if total > MAX_ROWS:
                    raise _too_many(f"rank {rank} {verb} {total} copies of tokens (tokens * top_k)")
        return list(tokens[self.rank]), [each[self.rank] for each in tokens], arriving[self.rank]


def _rows_to_send(
    x: Tensor, indices: Tensor, weights: Tensor, permutation: Permutation
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """Return weights and experts of tokens, exact in float32, and the copies to send unless they are too many."""
    wide = torch.promote_types(weights.dtype, torch.float32)
    notes = torch.cat([weights.to(wide), indices.to(wide)], dim=1)
    return notes, _made(permutation, x, notes) if permutation.num_rows <= MAX_ROWS else None


@torch.no_grad()
def _made(permutation: Permutation, x: Tensor, notes: Tensor) -> tuple[Tensor, Tensor]:
    """Return copies of tokens and of their expert indices and weights, without gradient."""
    return permutation.copy(x), permutation.copy(notes)


def _too_many(what: str) -> ConfigError:
    return ConfigError(
        f"{what}, more than the {MAX_ROWS} that int32 counts: take smaller microbatches, shorter sequences or more "
        "ranks"
    )
