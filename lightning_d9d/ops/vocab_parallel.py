"""Embedding and cross-entropy of a vocabulary whose rows or columns lie on several ranks."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_d9d.errors import ConfigError
from lightning_d9d.ops.collectives import gather_dim, sum_over
from lightning_d9d.ops.kernels import runs_triton

_LOSS = "lightning_d9d::vocab_parallel_cross_entropy"
_GRADIENT = "lightning_d9d::vocab_parallel_cross_entropy_backward"
_NUMBERS_AT_ONCE = 2**26
"""How many logits are widened at a time: 256 MiB in float32."""


def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    first: int,
    group_name: str,
    *,
    ignore_index: int = -100,
    reduction: Literal["none", "sum"] = "none",
) -> Tensor:
    """`torch.nn.functional.cross_entropy` of logits whose columns lie on several ranks. Collective.

    Computes in float32. Three numbers a token travel, in one message. All ranks get the same loss, bit for bit, and it
    is one loss, not a summand: its backward has no messages. What is kept for that are `logits` and one number a token.
    One operator, `torch.ops.lightning_d9d.vocab_parallel_cross_entropy`. The host waits for nothing on an accelerator,
    where kernels read the logits once in the forward and once in the backward.

    Args:
        logits: the columns `first` to `first + columns` of the whole, shape `[tokens, columns]`. Each column of the
            vocabulary is on one rank; a rank may have none.
        labels: column of the vocabulary that each token should have, int64 `[tokens]`, equal on all ranks.
        first: which column of the vocabulary this rank's first one is.
        group_name: `group_name` of a process group of torch.
        ignore_index: a label without a loss.
        reduction: "none" for one loss a token, 0 where ignored; "sum" for their sum.

    Returns:
        Float32, or float64 for logits in float64: shape `[tokens]` or a scalar. The gradient of `logits` comes in their
        dtype.

    Raises:
        ConfigError: Shapes do not fit, or `reduction` is neither of the two.
        IndexError: A label is on no rank, and not `ignore_index`: on the CPU, on every rank. On CUDA it fails in the
            kernel, as it does in torch.
    """
    if logits.dim() != 2 or labels.shape != logits.shape[:1]:
        raise ConfigError(
            f"logits {list(logits.shape)} and labels {list(labels.shape)} must be [tokens, columns] and [tokens]"
        )
    if reduction not in ("none", "sum"):
        raise ConfigError(f"reduction={reduction!r} must be 'none' or 'sum'")
    loss, _ = torch.ops.lightning_d9d.vocab_parallel_cross_entropy(logits, labels, first, group_name, ignore_index)
    return loss.sum() if reduction == "sum" else loss


def vocab_parallel_cross_entropy_reference(
    logits: Tensor, labels: Tensor, first: int, group_name: str, *, ignore_index: int = -100
) -> Tensor:
    """`vocab_parallel_cross_entropy` without reduction and checks, for moderate logits. Collective."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    columns = torch.arange(first, first + logits.shape[1], device=labels.device)
    is_label = labels.unsqueeze(1) == columns
    exps = sum_over(logits.exp().sum(1), group_name, sums_gradients=False)
    at_label = sum_over((logits * is_label).sum(1), group_name, sums_gradients=False)
    return (exps.log() - at_label).masked_fill(labels == ignore_index, 0)


def vocab_parallel_embedding(ids: Tensor, weight: Tensor, first: int, *, is_first: bool, is_last: bool) -> Tensor:
    """Looks up ids in the rows of one rank: the summand of an embedding whose rows lie on several ranks.

    No message: sum the results over the ranks.

    Args:
        ids: rows of the whole vocabulary, integers `[...]`.
        weight: this rank's rows `first` to `first + rows`, shape `[rows, hidden]`; perhaps none.
        first: which row of the vocabulary this rank's first one is.
        is_first: whether no other rank has rows before.
        is_last: whether no other rank has rows after.

    Returns:
        Shape `[..., hidden]`: zeros for ids of other ranks.

    Raises:
        IndexError: An id is negative and `is_first`, or beyond the vocabulary and `is_last`: on the CPU. On CUDA it
            fails in the kernel, as it does in torch.
    """
    is_ours = (ids >= first) & (ids < first + len(weight))
    if not len(weight):  # others' ids need a row: before `first`, unless that would be that of id -1
        weight, first = F.pad(weight, (0, 0, 0, 1)), first if is_first else first - 1
    # Ids of other ranks look up a border row. The vocabulary's own borders stay open, so that an id beyond them fails.
    local = ids - first
    local = local if is_first else local.clamp(min=0)
    local = local if is_last else local.clamp(max=len(weight) - 1)
    return F.embedding(local, weight).masked_fill(~is_ours.unsqueeze(-1), 0)


def own_columns(logits: Tensor, labels: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Which column is each label's, `[tokens, 1]`, and whether it is one of this rank's, `[tokens]`; else it is any."""
    num_columns = logits.shape[1]
    is_ours = (labels >= first) & (labels < first + num_columns)
    return (labels - first).clamp(0, max(0, num_columns - 1)).unsqueeze(1), is_ours


def _num_rows_at_once(logits: Tensor) -> int:
    return max(1, _NUMBERS_AT_ONCE // max(1, logits.shape[1]))


def _loss(logits: Tensor, labels: Tensor, first: int, group_name: str, ignore_index: int) -> tuple[Tensor, Tensor]:
    """The loss of each token, and the logarithm of the sum of the exponentials of all its logits."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    columns, is_ours = own_columns(logits, labels, first)
    if runs_triton(logits):
        from lightning_d9d.ops import vocab_parallel_kernels

        own_lse, own_label = vocab_parallel_kernels.own_losses(logits, labels, first)
    else:
        own_lse = torch.cat([rows.to(wide).logsumexp(1) for rows in logits.split(_num_rows_at_once(logits))])
        own_label = logits.gather(1, columns).squeeze(1).to(wide) if logits.shape[1] else own_lse
    own = torch.stack([own_lse, own_label.masked_fill(~is_ours, 0), is_ours.to(wide)])
    lses, at_label, owners = gather_dim(own.unsqueeze(0), 0, group_name).unbind(1)
    is_counted = labels != ignore_index
    check_labels(labels, is_counted & (owners.sum(0) == 0))
    lse = lses.logsumexp(0)
    return (lse - at_label.sum(0)).masked_fill(~is_counted, 0), lse


def check_labels(labels: Tensor, is_outside: Tensor) -> None:
    """Raise IndexError if a label is outside of the vocabulary: on the CPU. On CUDA a kernel fails."""
    if labels.device.type != "cpu":
        torch._assert_async(~is_outside.any(), "a label is outside of the vocabulary")
    elif is_outside.any():
        raise IndexError(f"label {labels[is_outside][0].item()} is outside of the vocabulary")


def _new_loss(logits: Tensor, labels: Tensor, first: int, group_name: str, ignore_index: int) -> tuple[Tensor, Tensor]:
    loss = logits.new_empty(len(labels), dtype=torch.promote_types(logits.dtype, torch.float32))
    return loss, torch.empty_like(loss)


def _gradient(
    logits: Tensor, labels: Tensor, lse: Tensor, dloss: Tensor, first: int, ignore_index: int, triton: bool
) -> Tensor:
    """`(softmax - is_label) * dloss`, with the softmax of the whole vocabulary from its `lse`."""
    factors = dloss.masked_fill(labels == ignore_index, 0)
    if triton:
        from lightning_d9d.ops import vocab_parallel_kernels

        return vocab_parallel_kernels.gradient(logits, labels, lse, factors, first)
    result = _new_gradient(logits, labels, lse, dloss, first, ignore_index, triton)
    if not logits.shape[1]:
        return result
    columns, is_ours = own_columns(logits, labels, first)
    label_part = is_ours.to(lse.dtype).neg().unsqueeze(1)
    tensors = (result, logits, lse.unsqueeze(1), columns, label_part, factors.unsqueeze(1))
    for into, *rows in zip(*(tensor.split(_num_rows_at_once(logits)) for tensor in tensors), strict=True):
        logits, lse, columns, label_part, factors = rows
        torch.mul((logits - lse).exp_().scatter_add_(1, columns, label_part), factors, out=into)
    return result


def _new_gradient(logits: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, labels, ctx.first, _, ctx.ignore_index = inputs
    ctx.save_for_backward(logits, labels, output[1])
    ctx.triton = runs_triton(logits)


def _backward(ctx: Any, dloss: Tensor, _: Tensor) -> tuple[Tensor, None, None, None, None]:
    dlogits = torch.ops.lightning_d9d.vocab_parallel_cross_entropy_backward(
        *ctx.saved_tensors, dloss, ctx.first, ctx.ignore_index, ctx.triton
    )
    return dlogits, None, None, None, None


torch.library.define(
    _LOSS, "(Tensor logits, Tensor labels, SymInt first, str group_name, int ignore_index) -> (Tensor, Tensor)"
)
torch.library.define(
    _GRADIENT,
    "(Tensor logits, Tensor labels, Tensor lse, Tensor dloss, SymInt first, int ignore_index, bool triton) -> Tensor",
)
torch.library.impl(_LOSS, "CompositeExplicitAutograd", _loss)
torch.library.impl(_GRADIENT, "CompositeExplicitAutograd", _gradient)
torch.library.register_fake(_LOSS, _new_loss)
torch.library.register_fake(_GRADIENT, _new_gradient)
torch.library.register_autograd(_LOSS, _backward, setup_context=_setup_context)
