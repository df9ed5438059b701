"""Operators of `linear_cross_entropy`, which iterate over chunks of tokens.

[Note: gradients of chunks] describes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lightning_d9d.ops.collectives import gather_dim, group_size
from lightning_d9d.ops.operator import define
from lightning_d9d.ops.rows import ceil_div
from lightning_d9d.ops.vocab_parallel import check_labels, own_columns

_CHUNK_BYTES = 2**30
_MOST_ROUNDINGS = 8
_TOKENS_OF_CHUNKS = (2048, 128)
"""Sizes of chunks: a chunk is a multiple of the first of these for which there is room. [Note: gradients of chunks]"""


class ChunkOptions(NamedTuple):
    """The arguments of the operators that are not tensors."""

    ignore_index: int
    soft_cap: float
    """Bound of the logits; 0 for none."""
    z_loss: float
    label_smoothing: float
    chunk_bytes: int
    """Bytes that the logits of a chunk may take; 0 for None."""
    first: int
    vocab_size: int
    group_name: str
    """Group of `VocabShard`; empty for none."""
    triton: bool


# The operators


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return losses, log-sum-exps, and the gradients of the losses' sum with respect to `x`, `weight`, `bias`, logits.

    The last four arguments select the gradients to compute; the others are empty. Gradients of logits need one chunk.
    """
    options, wanted = ChunkOptions(*arguments[:-4]), arguments[-4:]
    is_counted = labels != options.ignore_index
    check_labels(labels, is_counted & ((labels < 0) | (labels >= options.vocab_size)))
    matrix = weight.to(x.dtype)
    gradients = _Gradients(x, weight, matrix, bias, options, wanted) if any(wanted) else None
    statistics = x.new_empty(3, len(x), dtype=torch.promote_types(x.dtype, torch.float32))
    for rows, logits in _chunks(x, matrix, bias, options):
        of_rows = statistics[:, rows]
        if gradients is None or options.group_name or not options.triton:
            _write_statistics(logits, labels[rows], of_rows, options)
            if gradients is not None:
                lse = of_rows[0]
                factors = _factors(lse, is_counted[rows], torch.ones_like(lse), torch.zeros_like(lse), options)
                _write_gradient(logits, labels[rows], lse, factors, options)
        else:
            from lightning_d9d.ops.kernels import linear_cross_entropy as kernels

            kernels.write_statistics_and_gradient(
                logits,
                labels[rows],
                of_rows,
                ignore_index=options.ignore_index,
                soft_cap=options.soft_cap,
                z_loss=options.z_loss,
                label_smoothing=options.label_smoothing,
            )
        if gradients is not None:
            gradients.add(rows, logits)
    lse, at_label, total = statistics
    loss = lse - (1 - options.label_smoothing) * at_label + options.z_loss * lse**2
    if options.label_smoothing:
        loss -= total * (options.label_smoothing / options.vocab_size)
    made = _new_gradients(x, weight, bias, wanted) if gradients is None else gradients.finish()
    return loss.masked_fill_(~is_counted, 0), lse.clone(), *made


def _new_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    loss = x.new_empty(len(x), dtype=torch.promote_types(x.dtype, torch.float32))
    return loss, torch.empty_like(loss), *_new_gradients(x, weight, bias, arguments[-4:])


def _backward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    lse: Tensor,
    dloss: Tensor,
    dlse: Tensor,
    *arguments: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of `_forward` from those of losses and log-sum-exps."""
    options = ChunkOptions(*arguments[:-4])
    matrix = weight.to(x.dtype)
    gradients = _Gradients(x, weight, matrix, bias, options, arguments[-4:])
    factors = _factors(lse, labels != options.ignore_index, dloss, dlse, options)
    for rows, logits in _chunks(x, matrix, bias, options):
        _write_gradient(logits, labels[rows], lse[rows], factors[:, rows], options)
        gradients.add(rows, logits)
    return gradients.finish()


def _new_backward(
    x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, lse: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _new_gradients(x, weight, bias, arguments[-4:])


# Chunks of tokens


def rows_at_once(x: Tensor, options: ChunkOptions) -> int:
    """Return the number of tokens in a chunk; all ranks get the same, as if they had equally many columns."""
    columns = ceil_div(options.vocab_size, group_size(options.group_name) if options.group_name else 1)
    itemsize = x.element_size() if options.triton else max(4, x.element_size())
    room = (options.chunk_bytes or _CHUNK_BYTES) // max(1, _padded(columns) * itemsize)
    if room >= len(x):
        return max(1, len(x))
    rows = next((room // step * step for step in _TOKENS_OF_CHUNKS if room >= step), max(1, room))
    if options.chunk_bytes or len(x) <= _MOST_ROUNDINGS * rows:
        return rows
    step = _TOKENS_OF_CHUNKS[0]
    enough = ceil_div(len(x), _MOST_ROUNDINGS * step) * step
    is_cheaper = (enough - rows) * itemsize <= x.shape[1] * torch.float32.itemsize
    return enough if is_cheaper else rows


def is_one_chunk(x: Tensor, options: ChunkOptions) -> bool:
    """Return True if the logits of all tokens are computed at once."""
    return rows_at_once(x, options) >= len(x)


def _padded(columns: int) -> int:
    """Pad rows of the buffer to multiples of 128 bytes, for products and kernels alike."""
    return ceil_div(columns, 64) * 64


def _new_logits(x: Tensor, rows: int, columns: int) -> Tensor:
    return x.new_empty(rows, _padded(columns))[:, :columns]


def _chunks(x: Tensor, matrix: Tensor, bias: Tensor | None, options: ChunkOptions) -> Iterator[tuple[slice, Tensor]]:
    """Yield chunks of tokens and their logits; the next chunk overwrites the memory."""
    size = rows_at_once(x, options)
    buffer = _new_logits(x, min(size, len(x)), len(matrix))
    for start in range(0, len(x), size):
        rows = slice(start, min(start + size, len(x)))
        logits = buffer[: rows.stop - start]
        if bias is None:
            torch.mm(x[rows], matrix.t(), out=logits)
        else:
            torch.addmm(bias.to(x.dtype), x[rows], matrix.t(), out=logits)
        yield rows, logits


class _Gradients:
    """Sums of the `wanted` gradients of chunks: of `x`, `weight`, `bias` and logits."""

    def __init__(
        self,
        x: Tensor,
        weight: Tensor,
        matrix: Tensor,
        bias: Tensor | None,
        options: ChunkOptions,
        wanted: tuple[bool, ...],
    ) -> None:
        self._x, self._matrix, self._wanted = x, matrix, wanted
        self._dtypes = weight.dtype, weight.dtype if bias is None else bias.dtype
        self._dx, self._dw, self._db, self._dlogits = _new_gradients(
            x, weight, bias, (*wanted[:3], wanted[3] and not len(x))
        )
        if wanted[1] and len(x) > _MOST_ROUNDINGS * rows_at_once(x, options):
            self._dw = torch.empty_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        if not len(x):
            self._dw.zero_()
        self._db = torch.zeros_like(self._db, dtype=torch.promote_types(self._db.dtype, torch.float32))

    def add(self, rows: slice, dlogits: Tensor) -> None:
        """Add the gradients of a chunk."""
        wants_x, wants_weight, wants_bias, keep = self._wanted
        if wants_x:
            torch.mm(dlogits, self._matrix, out=self._dx[rows])
        if wants_weight:
            _add_product(self._dw, dlogits, self._x[rows], is_first=rows.start == 0)
        if wants_bias:
            self._db += dlogits.sum(0, dtype=self._db.dtype)
        if keep:
            self._dlogits = dlogits

    def finish(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the gradients, in the dtypes of their tensors."""
        weight_dtype, bias_dtype = self._dtypes
        return self._dx, self._dw.to(weight_dtype), self._db.to(bias_dtype), self._dlogits


def _new_gradients(
    x: Tensor, weight: Tensor, bias: Tensor | None, wanted: tuple[bool, ...]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wants_x, wants_weight, wants_bias, keep = wanted
    return (
        x.new_empty(x.shape if wants_x else (0,)),
        weight.new_empty(weight.shape if wants_weight else (0,)),
        weight.new_empty(0) if bias is None or not wants_bias else bias.new_empty(bias.shape),
        _new_logits(x, len(x), len(weight)) if keep else x.new_empty(0),
    )


def weight_gradient(dtype: torch.dtype, dlogits: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of a weight from that of all logits."""
    dw = x.new_empty(dlogits.shape[1], x.shape[1], dtype=dtype)
    return _add_product(dw, dlogits, x, is_first=True)


def _add_product(total: Tensor, dlogits: Tensor, x: Tensor, *, is_first: bool) -> Tensor:
    """Add `dlogits.T @ x` to `total`, rounded once; `total` is in their dtype or in a wider one."""
    beta = 0 if is_first else 1
    if total.dtype == x.dtype:
        return torch.addmm(total, dlogits.t(), x, beta=beta, out=total)
    if total.is_cuda:
        return torch.addmm(total, dlogits.t(), x, out_dtype=total.dtype, beta=beta, out=total)
    return total.addmm_(dlogits.t().to(total.dtype), x.to(total.dtype), beta=beta)


# Operations on the logits of a chunk


def _write_statistics(logits: Tensor, labels: Tensor, statistics: Tensor, options: ChunkOptions) -> None:
    """Write each token's log-sum-exp, logit of its label and sum of logits, over the whole vocabulary."""
    if options.triton:
        from lightning_d9d.ops.kernels import linear_cross_entropy as kernels

        kernels.write_statistics(logits, labels, statistics, first=options.first, soft_cap=options.soft_cap)
    else:
        wide = capped(logits.to(statistics.dtype), options.soft_cap)
        column, is_ours = own_columns(logits, labels, options.first)
        at_label = wide.gather(1, column).squeeze(1).masked_fill(~is_ours, 0) if wide.shape[1] else wide.sum(1)
        torch.stack([wide.logsumexp(1), at_label, wide.sum(1)], out=statistics)
    if options.group_name:
        message = statistics if options.label_smoothing else statistics[:2]
        of_ranks = gather_dim(message.contiguous().unsqueeze(0), 0, options.group_name)
        statistics[0] = of_ranks[:, 0].logsumexp(0)
        statistics[1 : len(message)] = of_ranks[:, 1:].sum(0)


def _factors(lse: Tensor, is_counted: Tensor, dloss: Tensor, dlse: Tensor, options: ChunkOptions) -> Tensor:
    """Return the factors of the softmax, of minus the label's one-hot and of minus 1 in the gradient: `[3, tokens]`."""
    dloss = dloss.masked_fill(~is_counted, 0)
    of_softmax = dloss * (1 + 2 * options.z_loss * lse) + dlse
    of_all = dloss * (options.label_smoothing / max(1, options.vocab_size))
    return torch.stack([of_softmax, dloss * (1 - options.label_smoothing), of_all])


def _write_gradient(logits: Tensor, labels: Tensor, lse: Tensor, factors: Tensor, options: ChunkOptions) -> None:
    """Overwrite logits with their gradient."""
    if options.triton:
        from lightning_d9d.ops.kernels import linear_cross_entropy as kernels

        kernels.write_gradient(logits, labels, lse, factors, first=options.first, soft_cap=options.soft_cap)
        return
    if not logits.shape[1]:
        return
    of_softmax, of_label, of_all = factors.unsqueeze(2)
    column, is_ours = own_columns(logits, labels, options.first)
    wide = capped(logits.to(lse.dtype), options.soft_cap)
    gradient = (wide - lse.unsqueeze(1)).exp_().mul_(of_softmax).sub_(of_all)
    gradient.scatter_add_(1, column, -of_label * is_ours.unsqueeze(1))
    if options.soft_cap:
        gradient.mul_(1 - (wide / options.soft_cap).square_())
    logits.copy_(gradient)


def capped(logits: Tensor, soft_cap: float | None) -> Tensor:
    """Return logits within `soft_cap`; 0 or None for none."""
    return soft_cap * torch.tanh(logits / soft_cap) if soft_cap else logits


_OPTIONS = (
    "int ignore_index, float soft_cap, float z_loss, float label_smoothing, int chunk_bytes, SymInt first, "
    "SymInt vocab_size, str group_name, bool triton, bool dx, bool dw, bool db, bool dlogits"
)
forward_op = define(
    "linear_cross_entropy",
    f"(Tensor x, Tensor weight, Tensor? bias, Tensor labels, {_OPTIONS}) -> ({', '.join(['Tensor'] * 6)})",
    _forward,
    _new_forward,
)
backward_op = define(
    "linear_cross_entropy_backward",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor labels, Tensor lse, Tensor dloss, Tensor dlse, "
    f"{_OPTIONS}) -> ({', '.join(['Tensor'] * 4)})",
    _backward,
    _new_backward,
)


@register_flop_formula(
    [torch.ops.lightning_d9d.linear_cross_entropy, torch.ops.lightning_d9d.linear_cross_entropy_backward]
)
def _flops(x_shape: torch.Size, weight_shape: torch.Size, *arguments: Any, **kwargs: Any) -> int:
    """Count the products of the logits, and of the gradients of `x` and `weight` if these are computed."""
    makes_dx, makes_dw = arguments[-4:-2]
    return 2 * x_shape[0] * weight_shape[0] * weight_shape[1] * (1 + makes_dx + makes_dw)
