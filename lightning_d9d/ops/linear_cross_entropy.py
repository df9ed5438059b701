"""Cross-entropy of hidden states times a vocabulary's matrix, some tokens at a time: all logits never exist at once.

[Note: gradients of chunks] The forward iterates over chunks of tokens. The logits of a chunk are a product of cuBLAS
into one buffer, which the next chunk reuses. A kernel computes the losses from this buffer. If only the sum of the
losses is requested, the derivative of each loss is known except for a factor. Then the kernel overwrites the logits
with their gradient in the same pass. Two more products add the chunk to the gradients of `x` and `weight`. The backward
only has to scale these gradients, and touches no memory if the factor is 1. So nothing is computed twice. With one loss
a token the backward computes the logits of each chunk again. In float16 it does so, too, because gradients without the
factor (a loss scale) underflow.

*The weight's gradient* is the sum of the products of all chunks. In float32 it is summed in place. The gradient of a
narrower weight has the weight's dtype; each product adds to it in float32 and rounds the sum. After n chunks of equal
size these roundings have the error of sqrt((n + 1) / 2) roundings of the result. Roundings of logits and of their
gradients are added, as in torch. For n = 8 the error is 1.7 times torch's (measured; 2.1 if the other roundings were
zero). More chunks are first summed in float32, in a separate buffer.

*Chunks* have a multiple of 2048 tokens if there is room. At hidden size 2048 the gradient of `x` then has 128 tiles of
128 x 256, or a multiple. An H100 or H200 computes 128 of them at a time on its 132 multiprocessors.

*Inside `defer`* the product for the weight's gradient is deferred to the weight backward. If all logits are one chunk,
their gradient is kept for it, which takes at most `chunk_bytes` a microbatch. With more chunks nothing of the sum of
the losses is deferred, because logits would be computed again. With one loss a token they are: four products instead of
three. The gradient of `bias` is not deferred.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, NamedTuple, overload

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_d9d.errors import ConfigError
from lightning_d9d.ops.backend import runs_triton
from lightning_d9d.ops.collectives import sum_over
from lightning_d9d.ops.linear import autocast_dtype
from lightning_d9d.ops.linear_cross_entropy_chunks import (
    ChunkOptions,
    backward_op,
    capped,
    forward_op,
    is_one_chunk,
    weight_gradient,
)
from lightning_d9d.ops.sharded_weights import is_sharded, local_shard
from lightning_d9d.ops.weight_gradients import AT_ONCE, WeightGradients, receiver

IGNORED = -100
"""The label that does not count, as in torch."""
Reduction = Literal["none", "sum"]
_Later = tuple[WeightGradients, Tensor]


class LossOptions(NamedTuple):
    """Options of the loss that `linear_cross_entropy` computes."""

    soft_cap: float | None = None
    """Bound of the logits; None leaves them unbounded."""
    z_loss: float = 0.0
    """Factor of the squared log-sum-exp."""
    label_smoothing: float = 0.0
    """Smoothing of labels, from 0 to 1."""
    ignore_index: int = IGNORED
    """A label without a loss."""

    def capped(self, logits: Tensor) -> Tensor:
        """Return `soft_cap * tanh(logits / soft_cap)`, or the logits themselves without a soft cap."""
        return capped(logits, self.soft_cap)

    def check(self) -> None:
        """Raise ConfigError for a value that is outside of its range."""
        if self.soft_cap is not None and not self.soft_cap > 0:
            raise ConfigError(f"soft_cap={self.soft_cap} must be above 0, or None")
        if not 0 <= self.label_smoothing <= 1:
            raise ConfigError(f"label_smoothing={self.label_smoothing} must be from 0 to 1")


class VocabShard(NamedTuple):
    """The rows of a vocabulary's matrix that this rank holds, if each row is on one rank of a group."""

    group_name: str
    """`group_name` of a process group of torch."""
    first: int
    """The row of the whole matrix that is this rank's first one."""
    vocab_size: int
    """Rows of the whole matrix."""


@overload
def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    options: LossOptions = LossOptions(),
    reduction: Reduction = "none",
    return_lse: Literal[False] = False,
    chunk_bytes: int | None = None,
    shard: VocabShard | None = None,
) -> Tensor: ...


@overload
def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    options: LossOptions = LossOptions(),
    reduction: Reduction = "none",
    return_lse: Literal[True],
    chunk_bytes: int | None = None,
    shard: VocabShard | None = None,
) -> tuple[Tensor, Tensor]: ...


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    options: LossOptions = LossOptions(),
    reduction: Reduction = "none",
    return_lse: bool = False,
    chunk_bytes: int | None = None,
    shard: VocabShard | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute the cross-entropy of `x @ weight.T + bias` with `labels`, in the memory of some tokens' logits.

    The logits are `z`, or `soft_cap * tanh(z / soft_cap)`. With `lse = log(sum(exp(z)))` and `s = label_smoothing`, the
    loss of a token is `lse - (1 - s) * z[label] - s * mean(z) + z_loss * lse**2`, and 0 if its label is `ignore_index`.
    `options` has these settings.

    Products are in the dtype of `x`, or that of autocast. Logits and their gradients are rounded to it, and all
    computation between is in float32 (float64 for float64). `ops/linear_cross_entropy.py`
    describes when gradients are computed, in how many products, and in which dtype the weight's is summed. Only
    requested gradients are computed. Inside `defer`, and with a leaf as `weight`, the gradient of `weight` is deferred.
    The op cannot be differentiated twice. The host does not wait.

    With `shard` the vocabulary is spread over several ranks, each with some rows of the matrix. The call is then
    collective, with one message for each chunk in the forward: two numbers a token (three with `label_smoothing`). All
    ranks get the same loss, bit for bit; it is one loss, not a summand. The backward has no messages: the gradient of
    `x` is the contribution of this rank's rows, which the caller must sum.

    Operators: The operators are `torch.ops.lightning_d9d.linear_cross_entropy` and `.linear_cross_entropy_backward`.

    Args:
        x: Hidden states, shape `[..., hidden]`.
        weight: Shape `[vocab, hidden]`, in the dtype of `x` (any under autocast). It may be a DTensor: a replicated
            one, or with `shard` the part that this rank holds. Its gradient is a DTensor with the same placements, to
            which only this rank has contributed.
        labels: Row of the (whole) matrix that each token should predict, int64 `[...]`.
        bias: Shape `[vocab]`, with the placements of `weight`.
        options: Soft cap, z-loss, label smoothing and the ignored label.
        reduction: "none" for one loss for each token; "sum" for their sum.
        return_lse: Whether to return `lse`, too, also for ignored tokens. With "none" gradients flow through it, too.
        chunk_bytes: Bytes that the logits of a chunk may take; a chunk has at least one token. With torch's kernels
            these are counted in float32, and there are copies. None takes 1 GiB, or as much as eight chunks need. The
            second applies if it takes no more memory than a float32 gradient of `weight`, in which more chunks would be
            summed.
        shard: The rows of the whole matrix that this rank holds; None for all.

    Returns:
        Float32 (or float64): The loss, in the shape of `labels` or a scalar; with `return_lse` also `lse`, in the shape
            of `labels`.

    Raises:
        ConfigError: Shapes, dtypes or options do not fit, `x` is a DTensor, or `weight` is sharded without `shard`.
        IndexError: On the CPU: a label is outside of the vocabulary, and not `ignore_index`. On CUDA it fails in a
            kernel, as in torch.
    """
    _check(x, weight, labels, bias, options, reduction, chunk_bytes, shard)
    gradients, leaf = receiver(x, weight), weight
    weight, bias = local_shard(weight, x), None if bias is None else local_shard(bias, x)
    shape, dtype = labels.shape, autocast_dtype(x)
    x, labels = x.flatten(0, -2).to(dtype), labels.flatten()
    chunk_options = _chunk_options(options, chunk_bytes, shard or VocabShard("", 0, len(weight)), runs_triton(x))
    trained = (each for each in (x, leaf, bias) if each is not None)
    is_early = (
        reduction == "sum"
        and dtype != torch.float16
        and torch.is_grad_enabled()
        and any(each.requires_grad for each in trained)
    )
    if is_early and not is_one_chunk(x, chunk_options):
        gradients = None
    later: _Later | None = None
    if gradients is not None and gradients is not AT_ONCE:
        weight, later = weight.detach(), (gradients, leaf)
    if is_early:
        loss, lse = _SumOfLosses.apply(x, weight, bias, labels, gradients is not None, later, chunk_options)
    else:
        loss, lse = _Losses.apply(x, weight, bias, labels, later, chunk_options)
        loss, lse = (loss.sum(), lse.detach()) if reduction == "sum" else (loss.view(shape), lse)
    return (loss, lse.view(shape)) if return_lse else loss


def _chunk_options(options: LossOptions, chunk_bytes: int | None, shard: VocabShard, triton: bool) -> ChunkOptions:
    return ChunkOptions(
        ignore_index=options.ignore_index,
        soft_cap=options.soft_cap or 0.0,
        z_loss=options.z_loss,
        label_smoothing=options.label_smoothing,
        chunk_bytes=chunk_bytes or 0,
        first=shard.first,
        vocab_size=shard.vocab_size,
        group_name=shard.group_name,
        triton=triton,
    )


def linear_cross_entropy_reference(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    options: LossOptions = LossOptions(),
    reduction: Reduction = "none",
    shard: VocabShard | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `linear_cross_entropy` with `return_lse` from all logits at once; sharded logits must be moderate."""
    first, vocab_size = (0, len(weight)) if shard is None else (shard.first, shard.vocab_size)

    def sum_of_ranks(x: Tensor) -> Tensor:
        return x if shard is None else sum_over(x, shard.group_name, sums_gradients=False)

    logits = F.linear(x, weight, bias)
    logits = options.capped(logits.to(torch.promote_types(logits.dtype, torch.float32)))
    columns = torch.arange(first, first + len(weight), device=labels.device)
    at_label = sum_of_ranks((logits * (labels.unsqueeze(-1) == columns)).sum(-1))
    lse = logits.logsumexp(-1) if shard is None else sum_of_ranks(logits.exp().sum(-1)).log()
    loss = lse - (1 - options.label_smoothing) * at_label + options.z_loss * lse**2
    if options.label_smoothing:
        loss = loss - options.label_smoothing * sum_of_ranks(logits.sum(-1)) / vocab_size
    loss = loss.masked_fill(labels == options.ignore_index, 0)
    return (loss.sum() if reduction == "sum" else loss), lse


def _check(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    options: LossOptions,
    reduction: str,
    chunk_bytes: int | None,
    shard: VocabShard | None,
) -> None:
    if x.dim() < 2 or labels.shape != x.shape[:-1] or weight.shape[1:] != x.shape[-1:]:
        raise ConfigError(
            f"x {list(x.shape)}, weight {list(weight.shape)} and labels {list(labels.shape)} must be [..., hidden], "
            f"[vocab, hidden] and [...]"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ConfigError(f"bias {list(bias.shape)} must be [{len(weight)}], because weight has {len(weight)} rows")
    for name, each in (("weight", weight), ("bias", bias)):
        if each is not None and autocast_dtype(each) != autocast_dtype(x):
            raise ConfigError(f"{name} is {each.dtype}, but x is {x.dtype}; cast one of them, or use autocast")
    if isinstance(x, DTensor):
        raise ConfigError("x is a DTensor; pass this rank's tensor, x.to_local()")
    if shard is None and is_sharded(weight):
        raise ConfigError("weight is a sharded DTensor; name the group of its ranks (shard), or gather it")
    if reduction not in ("none", "sum"):
        raise ConfigError(f"reduction={reduction!r} must be 'none' or 'sum'")
    options.check()
    if chunk_bytes is not None and chunk_bytes < 1:
        raise ConfigError(f"chunk_bytes={chunk_bytes} must be at least 1")


# Autograd


class _Losses(torch.autograd.Function):
    """Losses and log-sum-exps of tokens; `later` names the leaf of a detached weight, and the receiver of its gradient.

    This is not `torch.library.register_autograd`, because the gradient of the leaf is not one of the op's.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        later: _Later | None,
        options: ChunkOptions,
    ) -> tuple[Tensor, Tensor]:
        loss, lse, *_ = forward_op(x, weight, bias, labels, *options, False, False, False, False)
        ctx.save_for_backward(x, weight, bias, labels, lse)
        ctx.later, ctx.options = later, options
        return loss, lse

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivatives()
        x, weight, bias, labels, lse = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        keep = ctx.later is not None and is_one_chunk(x, ctx.options)
        dx, dw, db, dlogits = backward_op(
            x, weight, bias, labels, lse, *grad_outputs, *ctx.options, needs_x, needs_weight, needs_bias, keep
        )
        if ctx.later is not None:
            gradients, leaf = ctx.later
            if keep:
                gradients.add(leaf, partial(weight_gradient, weight.dtype), dlogits, x)
            else:
                kept = (x, weight, labels, lse, *(() if bias is None else (bias,)))
                gradients.add(leaf, partial(_weight_gradient_again, ctx.options), *grad_outputs, *kept)
        return dx if needs_x else None, dw if needs_weight else None, db if needs_bias else None, None, None, None


class _SumOfLosses(torch.autograd.Function):
    """The sum of the losses, with gradients computed in the forward; and log-sum-exps, without a gradient.

    If the weight's gradient is deferred, which needs one chunk, it is not computed there. Then `later` names its
    receiver, and is None in a recomputation.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        waits: bool,
        later: _Later | None,
        options: ChunkOptions,
    ) -> tuple[Tensor, Tensor]:
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        loss, lse, dx, dw, db, dlogits = forward_op(
            x, weight, bias, labels, *options, needs_x, needs_weight and not waits, needs_bias, waits
        )
        ctx.save_for_backward(dx, dw, db, *((dlogits, x) if waits else ()))
        ctx.later, ctx.options, ctx.waits, ctx.weight_dtype = later, options, waits, weight.dtype
        ctx.mark_non_differentiable(lse)
        return loss.sum(), lse

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivatives()
        dx, dw, db, *kept = ctx.saved_tensors
        dtotal = grad_outputs[0]
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dx, db = _scaled(dx, dtotal, ctx.options), _scaled(db, dtotal, ctx.options)
        if ctx.later is not None:
            gradients, leaf = ctx.later
            gradients.add(leaf, partial(_scaled_weight_gradient, ctx.weight_dtype), dtotal, *kept)
        elif not ctx.waits:
            dw = _scaled(dw, dtotal, ctx.options)
        elif needs_weight:
            dw = _scaled_weight_gradient(ctx.weight_dtype, dtotal, *kept)
        return dx if needs_x else None, dw if needs_weight else None, db if needs_bias else None, *4 * (None,)


def _refuse_second_derivatives() -> None:
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError("linear_cross_entropy cannot be differentiated twice; call torch's linear and cross_entropy")


def _keeps_graph() -> bool:
    return torch._C._autograd._get_current_graph_task_keep_graph()  # type: ignore[attr-defined]


def _scaled(gradient: Tensor, factor: Tensor, options: ChunkOptions) -> Tensor:
    """Return the product; computed in place if the input is not needed again."""
    if torch.compiler.is_compiling() or not options.triton or _keeps_graph():
        return gradient * factor
    from lightning_d9d.ops.kernels import linear_cross_entropy as kernels

    kernels.scale_in_place(gradient, factor)
    return gradient


def _scaled_weight_gradient(dtype: torch.dtype, factor: Tensor, dlogits: Tensor, x: Tensor) -> Tensor:
    return weight_gradient(dtype, dlogits, x).mul_(factor)


def _weight_gradient_again(
    options: ChunkOptions,
    dloss: Tensor,
    dlse: Tensor,
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    lse: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    return backward_op(x, weight, bias, labels, lse, dloss, dlse, *options, False, True, False, False)[1]
