from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_d9d.errors import ConfigError
from lightning_d9d.ops import all_to_all_rows

MAX_ROWS = torch.iinfo(torch.int32).max
"""The most rows that the offsets of grouped products can count."""


class Copies(NamedTuple):
    """Which rows of one tensor are copies of which rows of another."""

    source_of_copy: Tensor
    """Of each copy the row that it copies, shape `[copies]`."""

    copies_of_source: Tensor
    """Of each row its copies, shape `[rows, copies / rows]`."""

    def copy(self, rows: Tensor) -> Tensor:
        """Shape `[rows, ...]` to `[copies, ...]`. Its backward is `sum`."""
        return _CopyRows.apply(rows, *self)

    def sum(self, copies: Tensor) -> Tensor:
        """Shape `[copies, ...]` to `[rows, ...]`. Its backward is `copy`."""
        return _SumCopies.apply(copies, *self)


class Exchange(NamedTuple):
    """How rows came from other ranks."""

    sent: list[int]
    """Number of rows to each rank."""

    received: list[int]
    """Number of rows from each rank."""

    by_expert: Copies
    """From the order in which they came, by source, to the one by expert."""


class DispatchedTokens(NamedTuple):
    """A copy of each token for each expert that it visits; on the rank of these experts, sorted by expert."""

    x: Tensor
    """The copies for this rank's experts, shape `[rows, hidden]`."""

    weights: Tensor
    """Factor of each row's result, shape `[rows]`."""

    offsets: Tensor
    """The row after the last one of each of this rank's experts, int32, shape `[local experts]`."""

    copies: Copies
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
        if indices.numel() > MAX_ROWS:
            raise _too_many(f"there are {indices.numel()} copies of tokens (tokens * top_k)")
        copies, order, ends = _sort(indices, self.num_experts)
        rows = copies.copy(x)
        return DispatchedTokens(rows, weights.flatten().index_select(0, order), ends.to(torch.int32), copies)

    def combine(self, results: Tensor, tokens: DispatchedTokens) -> Tensor:
        """See `Dispatch`."""
        return tokens.copies.sum(results)


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
            legal = [n for n in range(1, num_experts + 1) if num_experts % n == 0]
            below, above = (max(n for n in legal if n < self.num_ranks), [n for n in legal if n > self.num_ranks][:1])
            raise ConfigError(
                f"{num_experts} experts cannot be spread evenly over the {self.num_ranks} ranks {list(self.ranks)}: "
                f"expert_parallel must divide the number of experts, as {' and '.join(map(str, [below, *above]))} do"
            )

    def dispatch(self, x: Tensor, indices: Tensor, weights: Tensor) -> DispatchedTokens:
        """See `Dispatch`. Collective.

        Raises:
            ConfigError: A rank sends or receives more rows than int32 can count; on every rank.
            FloatingPointError: Weights are NaN or infinite; on every rank.
        """
        copies, order, ends = _sort(indices, self.num_experts)
        num_bad = weights.detach().isfinite().logical_not().sum()
        counts = self._gather(torch.cat([ends.diff(prepend=ends.new_zeros(1)), num_bad.view(1)]))
        by_rank = counts[:, :-1].unflatten(1, (self.num_ranks, -1))
        traffic = torch.cat([by_rank.sum(-1), counts[:, -1:]], dim=1)
        on_host = traffic.to("cpu", non_blocking=True)
        is_on_host = torch.cuda.current_stream().record_event() if traffic.is_cuda else None

        # While the host waits. Too many rows may find no memory, and then every rank raises below.
        offsets = by_rank[:, self.rank].sum(0).cumsum(0).to(torch.int32)
        if indices.numel() <= MAX_ROWS:
            x, weights = copies.copy(x), weights.flatten().index_select(0, order)
        if is_on_host is not None:
            is_on_host.synchronize()
        sent, received = self._splits(on_host.tolist())

        x = all_to_all_rows(x, received, sent, self.group_name)
        weights = all_to_all_rows(weights, received, sent, self.group_name)
        by_expert = _by_expert(by_rank[:, self.rank], len(x))
        exchange = Exchange(sent, received, by_expert)
        return DispatchedTokens(by_expert.copy(x), by_expert.copy(weights), offsets, copies, exchange)

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
        *columns, num_bad = zip(*traffic, strict=True)
        for verb, totals in (("sends", map(sum, zip(*columns, strict=True))), ("receives", map(sum, columns))):
            for rank, total in zip(self.ranks, totals, strict=True):
                if total > MAX_ROWS:
                    raise _too_many(f"rank {rank} {verb} {total} copies of tokens (tokens * top_k)")
        if any(num_bad):
            bad = ", ".join(f"{n} on rank {rank}" for rank, n in zip(self.ranks, num_bad, strict=True) if n)
            raise FloatingPointError(
                f"router weights are NaN or infinite: {bad}. The router's logits, so its inputs or its own parameter, "
                "are not finite there: go on from an earlier checkpoint with a lower learning rate or gradient "
                "clipping, or look for the first module that puts out NaN (torch.autograd.set_detect_anomaly)"
            )
        return list(traffic[self.rank][:-1]), list(columns[self.rank])


def _too_many(what: str) -> ConfigError:
    return ConfigError(
        f"{what}, more than the {MAX_ROWS} that int32 counts: take smaller microbatches, shorter sequences or more "
        "ranks"
    )


def _sort(indices: Tensor, num_experts: int) -> tuple[Copies, Tensor, Tensor]:
    """Copies of tokens sorted by expert, the place in `indices` of each, and the end of each expert's."""
    sorted_indices, order = indices.flatten().sort(stable=True)
    ends = torch.searchsorted(sorted_indices, torch.arange(num_experts, device=indices.device), right=True)
    return Copies(order // indices.shape[1], _inverse(order).view_as(indices)), order, ends


def _by_expert(counts: Tensor, num_rows: int) -> Copies:
    """From rows sorted by rank, then expert, to rows sorted by expert, then rank; `counts` is `[ranks, experts]`."""
    starts = (counts.flatten().cumsum(0).view_as(counts) - counts).t()
    counts = counts.t()
    sorted_starts = counts.flatten().cumsum(0).view_as(counts) - counts
    shifts = (starts - sorted_starts).flatten().repeat_interleave(counts.flatten(), output_size=num_rows)
    order = torch.arange(num_rows, device=counts.device) + shifts
    return Copies(order, _inverse(order).unsqueeze(1))


def _inverse(order: Tensor) -> Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


# Copying and summing are each other's backward. Left to autograd, the backward of the copy would add the gradients of a
# token one by one in the model's dtype, in no fixed order on CUDA.


class _CopyRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, source_of_copy: Tensor, copies_of_source: Tensor) -> Tensor:
        ctx.save_for_backward(source_of_copy, copies_of_source)
        return rows.index_select(0, source_of_copy)

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        return _SumCopies.apply(*grad_outputs, *ctx.saved_tensors), None, None


class _SumCopies(torch.autograd.Function):
    @staticmethod
    def forward(ctx, copies: Tensor, source_of_copy: Tensor, copies_of_source: Tensor) -> Tensor:
        # Not saved in autograd's way, since a recomputation goes on until it has all that was saved so: it would bring
        # the results of other ranks' experts back once more, for nothing but these.
        ctx.where = source_of_copy, copies_of_source
        sorted_copies = copies.index_select(0, copies_of_source.flatten())
        if copies_of_source.shape[1] == 1:
            return sorted_copies
        return sorted_copies.view(*copies_of_source.shape, *copies.shape[1:]).sum(1)

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        return _CopyRows.apply(*grad_outputs, *ctx.where), None, None
