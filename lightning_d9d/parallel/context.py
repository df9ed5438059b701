"""Context parallelism: attention over sequences of which each rank holds a shard.

[Note: who holds what] A sequence is split into `2 * size` equal chunks. Rank r holds chunks r and `2 * size - 1 - r`,
an early and a late one (`SequenceShard`). So all ranks have the same number of pairs of queries and keys under a causal
mask. Rank r attends to its own tokens causally, as to a separate sequence, because its chunks are in order. A rank
before it contributes only its early chunk, to all queries of rank r. A rank after it contributes both chunks, only to
the late queries of rank r. All of these are whole blocks of equal size, without a causal border inside.

[Note: partial results] Each block returns a result and the logarithms of its sums of exponentiated scores
(`lightning_d9d.ops.attention_block`). Results are summed in float32, in an order that depends only on the rank. The
forward keeps its inputs and outputs for the backward; keys and values of other ranks are sent again. Their gradients
are sent and summed in float32, too.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_d9d.errors import ConfigError
from lightning_d9d.legal import divisors, nearest
from lightning_d9d.mesh.sharding import local
from lightning_d9d.modules import GroupedQueryAttention
from lightning_d9d.ops import all_to_all_rows, attention, gather_dim
from lightning_d9d.ops.attention_block import attention_block, attention_block_backward, merge, wide
from lightning_d9d.ops.attention_masks import Masks
from lightning_d9d.ops.collectives import all_gather_single, group_named, reduce_scatter_single
from lightning_d9d.ops.operator import define
from lightning_d9d.waits import waiting


@dataclass(frozen=True)
class SequenceShard:
    """The shard of each sequence that a rank holds, as `parallel/context.py` describes. Nothing is communicated."""

    rank: int = 0
    """The index of this rank among those that share sequences."""
    size: int = 1
    """The number of ranks that share sequences; a single one holds them whole."""

    def take(self, whole: Tensor, dim: int) -> Tensor:
        """Return this rank's shard of a tensor with whole sequences along `dim`; for one rank the tensor itself.

        Raises:
            ConfigError: The length of the sequences is not a multiple of `2 * size`.
        """
        if self.size == 1:
            return whole
        length, divisor = whole.shape[dim], 2 * self.size
        if length % divisor:
            legal = " or ".join(map(str, nearest(length, range(divisor, length + divisor, divisor))))
            raise ConfigError(
                f"a sequence of {length} tokens cannot be sharded over {self.size} ranks of context parallelism, which "
                f"needs a multiple of {divisor}. Pad or shorten it to {legal}, or change context_parallel_shard or "
                "context_parallel_replicate of MeshConfig"
            )
        chunks = whole.chunk(divisor, dim)
        return torch.cat([chunks[self.rank], chunks[-1 - self.rank]], dim)

    def positions(self, local_length: int, device: torch.device) -> Tensor:
        """Return the places of this rank's tokens in the whole sequence, int64, shape `[local_length]`.

        Raises:
            ConfigError: The length is odd, so it is not the length of two chunks.
        """
        return self.take(torch.arange(local_length * self.size, device=device), 0)

    def join(self, shards: Tensor, dim: int) -> Tensor:
        """Return whole sequences along `dim` from the shards of all ranks, one after the other along `dim`."""
        if self.size == 1:
            return shards
        chunks = shards.chunk(2 * self.size, dim)
        return torch.cat([*chunks[::2], *chunks[:0:-2]], dim)


class ContextAttention(ABC):
    """Causal attention over sequences that are spread over the ranks of a group.

    A call, and its backward, is collective over the group, for equal shapes and dtypes. All ranks agree on whether
    documents are given and gradients required. The host does not wait.

    Args:
        group: The ranks that share sequences. Only the group's name is stored, so that modules with this object can be
            copied.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.sequence = SequenceShard(group.rank(), group.size())
        self.group_name = group.group_name

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: Tensor | None = None,
        *,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend with this rank's queries to the whole sequences, as `lightning_d9d.ops.attention` on one device.

        Args:
            q: Shape `[batch, heads, local seq, head_dim]`: this rank's shard, as `SequenceShard` defines it.
            k: Shape `[batch, kv_heads, local seq, head_dim]`.
            v: Shape of `k`.
            documents: Integers, shape `[batch, local seq]`: a token attends only to tokens of its row with the same
                number, also on other ranks.
            window: As in `lightning_d9d.ops.attention`; only `HeadsAttention` supports a window.
            sinks: As in `lightning_d9d.ops.attention`, for all heads of `q`; only `HeadsAttention` supports sinks.

        Returns:
            Shape and dtype of `q`.

        Raises:
            ConfigError: The local sequence has an odd length, or the heads, window or sinks do not fit the kind.
        """
        self.check_scores(window, sinks)
        if self.sequence.size > 1 and q.shape[2] % 2:
            raise ConfigError(
                f"rank {self.sequence.rank} of {self.sequence.size} of context parallelism has {q.shape[2]} tokens of "
                "each sequence, not two equal chunks: shard sequences with SequenceShard"
            )
        if documents is not None:
            documents = gather_dim(documents, 1, self.group_name)
        return self._attend(q, k, v, documents, window, sinks)

    def check_scores(self, window: int | None, sinks: Tensor | None) -> None:
        """Raise `ConfigError` for a window or sinks that this kind does not support. Local."""
        if window is not None or sinks is not None:
            raise ConfigError(
                f"{type(self).__name__} supports neither window={window} nor sinks; HeadsAttention (context='heads') "
                "supports both"
            )

    @abstractmethod
    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, window: int | None, sinks: Tensor | None
    ) -> Tensor:
        """Attend, given the `documents` of all ranks, one after the other."""


class GatherAttention(ContextAttention):
    """Causal attention for which each rank all-gathers the keys and values.

    They are gathered while the rank attends to its own, and again in the backward, where one reduce-scatter sums all
    gradients. It takes the memory of one layer's keys and values of whole sequences, in the backward also of their
    gradients in float32.

    One operator, `torch.ops.lightning_d9d.gather_attention`, computes it, so selective recomputation can keep its
    results.
    """

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, window: int | None, sinks: Tensor | None
    ) -> Tensor:
        return _gather_op(q, k, v, documents, self.group_name)[0]


class RingAttention(ContextAttention):
    """Causal attention for which keys and values are passed around the ranks, as in https://arxiv.org/abs/2310.01889.

    While a rank attends to the keys and values of one rank, those of the next are being sent. In the backward they are
    passed around once more, together with their gradients. It takes the memory of two ranks' keys and values, in the
    backward also of their gradients in float32.

    One operator, `torch.ops.lightning_d9d.ring_attention`, computes it, so selective recomputation can keep its
    results.
    """

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, window: int | None, sinks: Tensor | None
    ) -> Tensor:
        return _ring_op(q, k, v, documents, self.group_name)[0]


class HeadsAttention(ContextAttention):
    """Causal attention for which each rank takes some heads of whole sequences, as in https://arxiv.org/abs/2309.14509.

    One all-to-all sends queries, keys and values to the ranks of their heads, and another sends the results back.
    Between these, `lightning_d9d.ops.attention` runs.

    The ranks must be able to share the heads of queries, and those of keys and values, equally.
    """

    def check_scores(self, window: int | None, sinks: Tensor | None) -> None:
        """Accept all: each rank has whole sequences of some heads."""

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, window: int | None, sinks: Tensor | None
    ) -> Tensor:
        size, heads = self.sequence.size, [t.shape[1] for t in (q, k, v)]
        self.check_heads(*heads[:2])
        by_rank = torch.cat([t.unflatten(1, (size, -1)) for t in (q, k, v)], dim=2).transpose(0, 1)
        whole = self.sequence.join(self._exchange(by_rank).movedim(0, 2).flatten(2, 3), dim=2)
        q, k, v = whole.split([num // size for num in heads], dim=1)
        documents = None if documents is None else self.sequence.join(documents, dim=1)
        sinks = None if sinks is None else sinks.chunk(size)[self.sequence.rank]
        out = attention(q, k, v, documents, window=window, sinks=sinks)
        by_rank = torch.stack([SequenceShard(rank, size).take(out, dim=2) for rank in range(size)])
        return self._exchange(by_rank).transpose(0, 1).flatten(1, 2)

    def check_heads(self, num_heads: int, num_key_value_heads: int) -> None:
        """Raise `ConfigError` for numbers of heads on a rank of tensor parallelism that cannot be shared. Local."""
        common = math.gcd(num_heads, num_key_value_heads)
        if common % self.sequence.size:
            legal = " or ".join(map(str, divisors(common)))
            raise ConfigError(
                f"context='heads' over {self.sequence.size} ranks: {num_heads} query heads and {num_key_value_heads} "
                f"key/value heads (of one rank of tensor parallelism) cannot be shared equally. {legal} ranks can; "
                "context='gather' and 'ring' take any number of heads"
            )

    def _exchange(self, by_rank: Tensor) -> Tensor:
        """Send `by_rank[r]` to rank r, and return what came from each rank, in their order."""
        once = [1] * self.sequence.size
        return all_to_all_rows(by_rank, once, once, self.group_name)


KINDS: dict[str, type[ContextAttention]] = {"gather": GatherAttention, "ring": RingAttention, "heads": HeadsAttention}


def shard_context(stage: nn.Module, group: dist.ProcessGroup, kind: str) -> None:
    """Make each `GroupedQueryAttention` of a module attend over the ranks of a group, in place. Local.

    Args:
        stage: Any module. From then on its input is this rank's shard of sequences, as `SequenceShard` defines it. If
            tensor parallelism shards it, `shard_tensors` must have run before.
        group: The ranks that share sequences.
        kind: "gather", "ring" or "heads": see `GatherAttention`, `RingAttention` and `HeadsAttention`.

    Raises:
        ConfigError: The kind is unknown or does not support these heads, a window or sinks, or a module has its own way
            to attend.
    """
    if kind not in KINDS:
        raise ConfigError(f"context={kind!r} must be one of {', '.join(map(repr, KINDS))}")
    attend = KINDS[kind](group)
    for name, module in stage.named_modules():
        if isinstance(module, GroupedQueryAttention):
            if module.attend is not attention and not isinstance(module.attend, ContextAttention):
                raise ConfigError(
                    f"{name}.attend was replaced by {module.attend!r}, and context={kind!r} would replace that. That "
                    "attention sees only the tokens of its own rank; set attend after shard_context, to a "
                    "ContextAttention, or leave MeshConfig.context_parallel_shard at 1"
                )
            attend.check_scores(module.window, module.sinks)
            if isinstance(attend, HeadsAttention):
                attend.check_heads(*(len(local(p.weight)) // module.head_dim for p in (module.q_proj, module.k_proj)))
            module.attend = attend


def check_context(stage: nn.Module) -> None:
    """Raise `ConfigError` for attention of a spread stage that sees only this rank's part of sequences. Local."""
    for name, module in stage.named_modules():
        if isinstance(module, GroupedQueryAttention) and not isinstance(module.attend, ContextAttention):
            raise ConfigError(
                f"context parallelism gives each rank a part of each sequence, but {name} attends only to this rank's "
                "part. Call lightning_d9d.parallel.shard_context in parallelize_stage, and take positions from "
                "TokenShard.of(mesh)"
            )


class _Block(NamedTuple):
    """Some of this rank's queries and some keys and values."""

    ranks: slice
    """Ranks of the keys and values."""
    rows: slice
    """The rows of this rank's queries."""
    keys: slice
    """The places of each rank's keys."""
    masks: Masks
    """Masks that select the pairs of queries and keys that count."""

    def attend(self, q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Attend, given all of this rank's queries as `q`, and the block's keys and values as `kv`."""
        return attention_block(q[:, :, self.rows], kv[0], kv[1], self.masks)

    def gradients(self, grad_out: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of the block's queries and of its `kv`."""
        grad_out, q, out, lse = (t[:, :, self.rows] for t in (grad_out, q, out, lse))
        dq, dk, dv = attention_block_backward(grad_out, q, kv[0], kv[1], out, lse, self.masks)
        return dq, torch.stack((dk, dv))


class _Blocks:
    """The blocks that this rank's queries attend to. [Note: who holds what]."""

    def __init__(self, q: Tensor, documents: Tensor | None, group_name: str) -> None:
        self.group = group_named(group_name)
        self.rank, self.size = self.group.rank(), self.group.size()
        self.own = slice(self.rank, self.rank + 1)
        self._half = q.shape[2] // 2
        self._documents = None if documents is None else documents.unflatten(1, (self.size, -1))

    def with_keys_of(self, ranks: slice) -> _Block:
        """Return the block of consecutive ranks: some before this one, some after it, or it alone."""
        rows = slice(self._half if ranks.start > self.rank else 0, None)
        keys = slice(self._half if ranks.start < self.rank else None)
        documents = self._documents_of(self.own, rows), self._documents_of(ranks, keys)
        return _Block(ranks, rows, keys, Masks(ranks == self.own, None, *documents))

    def _documents_of(self, ranks: slice, places: slice) -> Tensor | None:
        return None if self._documents is None else self._documents[:, ranks, places].flatten(1)

    @property
    def of_others(self) -> list[_Block]:
        """Return the fewest blocks that cover the other ranks' keys."""
        others = [slice(0, self.rank), slice(self.rank + 1, self.size)]
        return [self.with_keys_of(ranks) for ranks in others if ranks.start < ranks.stop]


def _gather_attention(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, group_name: str
) -> tuple[Tensor, Tensor]:
    blocks = _Blocks(q, documents, group_name)
    own_kv = torch.stack((k, v))
    gathered = _gather(own_kv, blocks.group)
    out, lse = blocks.with_keys_of(blocks.own).attend(q, own_kv)
    out = out.to(wide(q.dtype))
    kv = gathered()
    for block in blocks.of_others:
        partial = block.attend(q, _in_a_row(kv, block))
        merge(out[:, :, block.rows], lse[:, :, block.rows], *partial)
    return torch.empty_like(q).copy_(out), lse


def _gather_attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    documents: Tensor | None,
    group_name: str,
) -> tuple[Tensor, ...]:
    blocks = _Blocks(q, documents, group_name)
    own_kv = torch.stack((k, v))
    gathered = _gather(own_kv, blocks.group)
    dq, own_dkv = blocks.with_keys_of(blocks.own).gradients(grad_out, q, own_kv, out, lse)
    dq = dq.to(wide(q.dtype))
    kv = gathered()
    dkv = torch.zeros_like(kv, dtype=dq.dtype)
    dkv[blocks.rank] = own_dkv
    for block in blocks.of_others:
        dq_part, dkv_part = block.gradients(grad_out, q, _in_a_row(kv, block), out, lse)
        dq[:, :, block.rows] += dq_part
        by_rank = dkv[block.ranks, ..., block.keys, :]
        by_rank.copy_(dkv_part.unflatten(-2, (len(by_rank), -1)).movedim(-3, 0))
    summed = torch.empty_like(dkv[0])
    with waiting():
        reduce_scatter_single(summed, dkv.flatten(0, 1), group=blocks.group)
    return _in_form_of((q, k, v), (dq, *summed))


def _gather(tensor: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """Start an all-gather; the result waits for it and returns all tensors, with ranks as a further first dim."""
    gathered = tensor.new_empty(group.size(), *tensor.shape)
    work = all_gather_single(gathered.flatten(0, 1), tensor, group=group, async_op=True)

    def wait() -> Tensor:
        assert work is not None
        with waiting():
            work.wait()
        return gathered

    return wait


def _in_a_row(kv: Tensor, block: _Block) -> Tensor:
    """Return the block's part of `[ranks, 2, batch, kv_heads, local seq, head_dim]`, in the order of ranks."""
    return kv[block.ranks, ..., block.keys, :].movedim(0, -3).flatten(-3, -2)


def _ring_attention(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, group_name: str
) -> tuple[Tensor, Tensor]:
    blocks = _Blocks(q, documents, group_name)
    out = lse = q  # until its own block, the first, is there
    for block, kv in _go_round(torch.stack((k, v)), blocks):
        partial = block.attend(q, kv)
        if block.ranks == blocks.own:
            out, lse = partial[0].to(wide(q.dtype)), partial[1]
        else:
            merge(out[:, :, block.rows], lse[:, :, block.rows], *partial)
    return torch.empty_like(q).copy_(out), lse


def _ring_attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    documents: Tensor | None,
    group_name: str,
) -> tuple[Tensor, ...]:
    blocks = _Blocks(q, documents, group_name)
    dq = torch.zeros_like(q, dtype=wide(q.dtype))
    dkv: Callable[[], Tensor] | None = None
    for block, kv in _go_round(torch.stack((k, v)), blocks):
        dq_part, dkv_part = block.gradients(grad_out, q, kv, out, lse)
        dq[:, :, block.rows] += dq_part
        if dkv is None:
            sum_so_far = dkv_part.to(dq.dtype)
        else:
            sum_so_far = dkv()
            sum_so_far[..., block.keys, :] += dkv_part
        dkv = _pass_on(sum_so_far, blocks)
    assert dkv is not None
    return _in_form_of((q, k, v), (dq, *dkv()))


def _go_round(kv: Tensor, blocks: _Blocks) -> Iterator[tuple[_Block, Tensor]]:
    """Yield each rank's block with its keys and values, this rank's first, and pass them on meanwhile."""
    for step in range(blocks.size):
        next_kv = _pass_on(kv, blocks) if step < blocks.size - 1 else None
        rank = (blocks.rank - step) % blocks.size
        block = blocks.with_keys_of(slice(rank, rank + 1))
        yield block, kv[..., block.keys, :]
        if next_kv is not None:
            kv = next_kv()


def _pass_on(tensor: Tensor, blocks: _Blocks) -> Callable[[], Tensor]:
    """Start to send a tensor to the next rank; the result waits for the tensor of the previous rank."""
    if blocks.size == 1:
        return lambda: tensor
    received = torch.empty_like(tensor)
    messages = [
        dist.P2POp(dist.isend, tensor, group=blocks.group, group_peer=(blocks.rank + 1) % blocks.size),
        dist.P2POp(dist.irecv, received, group=blocks.group, group_peer=(blocks.rank - 1) % blocks.size),
    ]
    works = dist.batch_isend_irecv(messages)

    def wait() -> Tensor:
        with waiting():
            for work in works:
                work.wait()
        return received

    return wait


def _in_form_of(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return values in the dtypes and memory order of the tensors, as `_new_gradients` declares to the compiler."""
    return tuple(torch.empty_like(t).copy_(value) for t, value in zip(tensors, values, strict=True))


def _new_results(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=wide(q.dtype))


def _new_gradients(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _define(name: str, forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """Define an operator for the forward and one for its backward, which `torch.compile` does not look into."""
    qkv, rest = "Tensor q, Tensor k, Tensor v", "Tensor? documents, str group_name"
    gradients = define(
        f"{name}_backward",
        f"(Tensor grad_out, {qkv}, Tensor out, Tensor lse, {rest}) -> (Tensor, Tensor, Tensor)",
        backward,
        _new_gradients,
    )

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, documents, ctx.group_name = inputs
        ctx.save_for_backward(q, k, v, *output, documents)
        ctx.mark_non_differentiable(output[1])

    def differentiate(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return *gradients(grad_out, *ctx.saved_tensors, ctx.group_name), None, None

    schema = f"({qkv}, {rest}) -> (Tensor, Tensor)"
    return define(name, schema, forward, _new_results, setup_context=keep, backward=differentiate)


_gather_op = _define("gather_attention", _gather_attention, _gather_attention_backward)
_ring_op = _define("ring_attention", _ring_attention, _ring_attention_backward)

CONTEXT_OPS = (torch.ops.lightning_d9d.gather_attention.default, torch.ops.lightning_d9d.ring_attention.default)
"""Operators that compute attention in the forward. Selective recomputation keeps their results."""
