"""Cross-entropy of hidden states times a vocabulary's matrix, some tokens at a time, so that all logits never exist.

[Note: gradients of chunks] The forward walks over chunks of tokens. The logits of a chunk are a product of cuBLAS into
one buffer, which the next chunk gets, too; a kernel takes the losses from there. If only the sum of the losses is asked
for, the derivative of each loss is known up to a factor: in the same pass the kernel overwrites the logits with their
gradient, and two more products add the chunk to the gradients of `x` and `weight`, which the backward only has to scale
(it touches no memory where the factor is 1). So nothing is computed twice. With one loss a token, or in float16, where
gradients without the factor (a loss scale) underflow, the backward computes the logits of each chunk again.

*The weight's gradient* is the sum of the products of all chunks. In float32 it is added up in place. A narrower weight
has a gradient as narrow; each product adds to it in float32 and rounds the sum. After n chunks of equal size these
roundings have the error of sqrt((n + 1) / 2) roundings of the result, beside those of logits and of their gradients,
which torch has as well. For n = 8 that is 1.7 times torch's error (measured; 2.1 if the others were nothing). More
chunks add up in float32 first, in a buffer of its own.

*Chunks* have a multiple of 2048 tokens where there is room: the gradient of `x` then has as many tiles of 128 x 256 as
the multiprocessors of an H100 or H200 can do at a time (128 of 132 at hidden size 2048), or a multiple.

*Inside `put_off`* the product for the weight's gradient waits for the weight backward. What is kept for it: the
gradient of the logits, if all of them are one chunk, so at most `chunk_bytes` a microbatch. Otherwise nothing but what
the op was given and a number a token, and the weight backward computes the logits again: four products in place of
three. The gradient of `bias` does not wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Literal, NamedTuple, overload

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import register_flop_formula

from lightning_d9d.errors import ConfigError
from lightning_d9d.ops.backend import runs_triton
from lightning_d9d.ops.collectives import gather_dim, group_size, sum_over
from lightning_d9d.ops.linear import autocast_dtype
from lightning_d9d.ops.operator import define
from lightning_d9d.ops.rows import ceil_div
from lightning_d9d.ops.sharded_weights import is_cut, local_part
from lightning_d9d.ops.vocab_parallel import check_labels, own_columns
from lightning_d9d.ops.weight_gradients import AT_ONCE, WeightGradients, receiver

_CHUNK_BYTES = 2**30
_MOST_ROUNDINGS = 8
_TOKENS_OF_CHUNKS = (2048, 128)
"""Chunks are a multiple of the first of these for which there is room. [Note: gradients of chunks]"""

_Later = tuple[WeightGradients, Tensor]


@overload
def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Literal["none", "sum"] = "none",
    soft_cap: float | None = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    return_lse: Literal[False] = False,
    chunk_bytes: int | None = None,
    group_name: str | None = None,
    first: int = 0,
    vocab_size: int | None = None,
) -> Tensor: ...


@overload
def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Literal["none", "sum"] = "none",
    soft_cap: float | None = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    return_lse: Literal[True],
    chunk_bytes: int | None = None,
    group_name: str | None = None,
    first: int = 0,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor]: ...


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Literal["none", "sum"] = "none",
    soft_cap: float | None = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    return_lse: bool = False,
    chunk_bytes: int | None = None,
    group_name: str | None = None,
    first: int = 0,
    vocab_size: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Cross-entropy of `x @ weight.T + bias` with `labels`, in the memory of some tokens' logits.

    With logits `z`, or `soft_cap * tanh(z / soft_cap)` in their place, `lse = log(sum(exp(z)))` and
    `s = label_smoothing`, the loss of a token is
    `lse - (1 - s) * z[label] - s * mean(z) + z_loss * lse**2`, and 0 if its label is `ignore_index`.

    Products are in the dtype of `x`, or that of autocast, logits and their gradients are rounded to it, and all between
    is in float32 (float64 for float64). When gradients are made, in how many products, and in what the weight's adds
    up: [Note: gradients of chunks]. Only those that are asked for are made. Inside `put_off`, and with a leaf as
    `weight`, the gradient of `weight` is put off. Cannot be differentiated twice. The host waits for nothing.

    With `group_name` the vocabulary lies on several ranks, each with some rows of the matrix: a collective, with one
    message a chunk in the forward, of two numbers a token (three with `label_smoothing`). All ranks get the same loss,
    bit for bit, and it is one loss, not a summand. The backward has no messages: the gradient of `x` is what this
    rank's rows add to it, and the caller sums.

    Operators: `torch.ops.lightning_d9d.linear_cross_entropy` and `.linear_cross_entropy_backward`.

    Args:
        x: hidden states, shape `[..., hidden]`.
        weight: shape `[vocab, hidden]`, in the dtype of `x` (any under autocast). It may be a DTensor: one that is
            replicated, or with `group_name` the part that this rank holds. Its gradient is a DTensor placed alike, to
            which this rank alone has contributed.
        labels: row of the (whole) matrix that each token should have, int64 `[...]`.
        bias: shape `[vocab]`, placed as `weight` is.
        ignore_index: a label without a loss.
        reduction: "none" for one loss a token; "sum" for their sum.
        soft_cap: bound of the logits; None for none.
        z_loss: factor of the squared log-sum-exp.
        label_smoothing: from 0 to 1.
        return_lse: also return `lse`, of ignored tokens as well. With "none" gradients flow through it, too.
        chunk_bytes: how many bytes the logits of a chunk may take; it has one token at least. With torch's kernels
            these are counted in float32, and there are copies. None: 1 GiB; or as much as makes eight chunks, where
            that takes no more than the gradient of `weight` in float32, which more chunks would be added up in.
        group_name: `group_name` of a process group of torch.
        first: which row of the whole matrix this rank's first one is.
        vocab_size: rows of the whole matrix, each of them on one rank. Only with `group_name`, and needed there.

    Returns:
        Float32 (or float64): the loss, in the shape of `labels` or a scalar; with `return_lse` also that, in the shape
        of `labels`.

    Raises:
        ConfigError: Shapes, dtypes or options do not fit, `x` is a DTensor, or `weight` is cut without `group_name`.
        IndexError: A label is outside of the vocabulary, and not `ignore_index`: on the CPU. On CUDA it fails in a
            kernel, as it does in torch.
    """
    _check(x, weight, labels, bias, reduction, soft_cap, label_smoothing, chunk_bytes, group_name, vocab_size)
    gradients, leaf = receiver(x, weight), weight
    weight, bias = local_part(weight, x), None if bias is None else local_part(bias, x)
    shape, dtype = labels.shape, autocast_dtype(x)
    x, labels = x.flatten(0, -2).to(dtype), labels.flatten()
    options = _Options(
        ignore_index=ignore_index,
        soft_cap=soft_cap or 0.0,
        z_loss=z_loss,
        label_smoothing=label_smoothing,
        chunk_bytes=chunk_bytes or 0,
        first=first,
        vocab_size=len(weight) if vocab_size is None else vocab_size,
        group_name=group_name or "",
        triton=runs_triton(x),
    )
    later: _Later | None = None
    if gradients is not None and gradients is not AT_ONCE:
        weight, later = weight.detach(), (gradients, leaf)
    trained = (each for each in (x, leaf, bias) if each is not None)
    if (
        reduction == "sum"
        and dtype != torch.float16
        and torch.is_grad_enabled()
        and any(each.requires_grad for each in trained)
    ):
        loss, lse = _SumOfLosses.apply(x, weight, bias, labels, gradients is not None, later, options)
    else:
        loss, lse = _Losses.apply(x, weight, bias, labels, later, options)
        loss, lse = (loss.sum(), lse.detach()) if reduction == "sum" else (loss.view(shape), lse)
    return (loss, lse.view(shape)) if return_lse else loss


def linear_cross_entropy_reference(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Literal["none", "sum"] = "none",
    soft_cap: float | None = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    group_name: str | None = None,
    first: int = 0,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`linear_cross_entropy` with `return_lse`, from all logits at once, for moderate ones if they lie on ranks."""

    def sum_of_ranks(x: Tensor) -> Tensor:
        return x if group_name is None else sum_over(x, group_name, sums_gradients=False)

    logits = F.linear(x, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    columns = torch.arange(first, first + len(weight), device=labels.device)
    at_label = sum_of_ranks((logits * (labels.unsqueeze(-1) == columns)).sum(-1))
    lse = logits.logsumexp(-1) if group_name is None else sum_of_ranks(logits.exp().sum(-1)).log()
    loss = lse - (1 - label_smoothing) * at_label + z_loss * lse**2
    if label_smoothing:
        loss = loss - label_smoothing * sum_of_ranks(logits.sum(-1)) / (vocab_size or len(weight))
    loss = loss.masked_fill(labels == ignore_index, 0)
    return (loss.sum() if reduction == "sum" else loss), lse


def _check(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    reduction: str,
    soft_cap: float | None,
    label_smoothing: float,
    chunk_bytes: int | None,
    group_name: str | None,
    vocab_size: int | None,
) -> None:
    if x.dim() < 2 or labels.shape != x.shape[:-1] or weight.shape[1:] != x.shape[-1:]:
        raise ConfigError(
            f"x {list(x.shape)}, weight {list(weight.shape)} and labels {list(labels.shape)} must be [..., hidden], "
            f"[vocab, hidden] and [...]"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ConfigError(f"bias {list(bias.shape)} must be [{len(weight)}], as weight has {len(weight)} rows")
    for name, each in (("weight", weight), ("bias", bias)):
        if each is not None and autocast_dtype(each) != autocast_dtype(x):
            raise ConfigError(f"{name} is {each.dtype} and x is {x.dtype}; cast one of them, or use autocast")
    if isinstance(x, DTensor):
        raise ConfigError("x is a DTensor; give this rank's tensor, x.to_local()")
    if group_name is None and is_cut(weight):
        raise ConfigError("weight is a DTensor that is cut; name the group of its ranks (group_name), or gather it")
    if (group_name is None) != (vocab_size is None):
        raise ConfigError(f"group_name={group_name!r} and vocab_size={vocab_size!r} go together")
    if reduction not in ("none", "sum"):
        raise ConfigError(f"reduction={reduction!r} must be 'none' or 'sum'")
    if soft_cap is not None and not soft_cap > 0:
        raise ConfigError(f"soft_cap={soft_cap} must be above 0, or None")
    if not 0 <= label_smoothing <= 1:
        raise ConfigError(f"label_smoothing={label_smoothing} must be from 0 to 1")
    if chunk_bytes is not None and chunk_bytes < 1:
        raise ConfigError(f"chunk_bytes={chunk_bytes} must be at least 1")


class _Options(NamedTuple):
    """The arguments of the operators that are not tensors."""

    ignore_index: int
    soft_cap: float
    """0 for none."""
    z_loss: float
    label_smoothing: float
    chunk_bytes: int
    """0 for None."""
    first: int
    vocab_size: int
    group_name: str
    """Empty for none."""
    triton: bool


# Autograd


class _Losses(torch.autograd.Function):
    """Losses and log-sum-exps of tokens; `later` names the leaf behind a detached weight, and who takes its gradient.

    Not `torch.library.register_autograd`, as the gradient of the leaf is not one of the op's.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        later: _Later | None,
        options: _Options,
    ) -> tuple[Tensor, Tensor]:
        loss, lse, *_ = _forward_op(x, weight, bias, labels, *options, False, False, False, False)
        ctx.save_for_backward(x, weight, bias, labels, lse)
        ctx.later, ctx.options = later, options
        return loss, lse

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivatives()
        x, weight, bias, labels, lse = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        keep = ctx.later is not None and _is_one_chunk(x, ctx.options)
        dx, dw, db, dlogits = _backward_op(
            x, weight, bias, labels, lse, *grad_outputs, *ctx.options, needs_x, needs_weight, needs_bias, keep
        )
        if ctx.later is not None:
            gradients, leaf = ctx.later
            if keep:
                gradients.add(leaf, partial(_weight_gradient, weight.dtype), dlogits, x)
            else:
                kept = (x, weight, labels, lse, *(() if bias is None else (bias,)))
                gradients.add(leaf, partial(_weight_gradient_again, ctx.options), *grad_outputs, *kept)
        return dx if needs_x else None, dw if needs_weight else None, db if needs_bias else None, None, None, None


class _SumOfLosses(torch.autograd.Function):
    """The sum of the losses, with gradients made in the forward; and log-sum-exps, without a gradient.

    If the weight's gradient waits, it is not made there; `later` names who takes it, and is None in a recomputation.
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
        options: _Options,
    ) -> tuple[Tensor, Tensor]:
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        keep = waits and _is_one_chunk(x, options)
        loss, lse, dx, dw, db, dlogits = _forward_op(
            x, weight, bias, labels, *options, needs_x, needs_weight and not waits, needs_bias, keep
        )
        again = (x, weight, labels, lse, *(() if bias is None else (bias,)))
        ctx.save_for_backward(dx, dw, db, *(() if not waits else (dlogits, x) if keep else again))
        ctx.later, ctx.options, ctx.waits, ctx.keep, ctx.weight_dtype = later, options, waits, keep, weight.dtype
        ctx.mark_non_differentiable(lse)
        return loss.sum(), lse

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivatives()
        dx, dw, db, *kept = ctx.saved_tensors
        dtotal = grad_outputs[0]
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dx, db = _scaled(dx, dtotal, ctx.options), _scaled(db, dtotal, ctx.options)
        if ctx.waits:
            if ctx.keep:
                compute = partial(_scaled_weight_gradient, ctx.weight_dtype)
                tensors = (dtotal, *kept)
            else:
                compute = partial(_weight_gradient_again, ctx.options)
                lse = kept[3]
                tensors = (dtotal.expand_as(lse), torch.zeros_like(lse), *kept)
            if ctx.later is None:
                dw = compute(*tensors) if needs_weight else dw
            else:
                gradients, leaf = ctx.later
                gradients.add(leaf, compute, *tensors)
        else:
            dw = _scaled(dw, dtotal, ctx.options)
        return dx if needs_x else None, dw if needs_weight else None, db if needs_bias else None, *4 * (None,)


def _refuse_second_derivatives() -> None:
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError("linear_cross_entropy cannot be differentiated twice; call torch's linear and cross_entropy")


def _keeps_graph() -> bool:
    return torch._C._autograd._get_current_graph_task_keep_graph()  # type: ignore[attr-defined]


def _scaled(gradient: Tensor, factor: Tensor, options: _Options) -> Tensor:
    """The product; in place where nobody will ask for it again."""
    if torch.compiler.is_compiling() or not options.triton or _keeps_graph():
        return gradient * factor
    from lightning_d9d.ops.kernels import linear_cross_entropy as kernels

    kernels.scale_in_place(gradient, factor)
    return gradient


def _weight_gradient(dtype: torch.dtype, dlogits: Tensor, x: Tensor) -> Tensor:
    dw = x.new_empty(dlogits.shape[1], x.shape[1], dtype=dtype)
    return _add_product(dw, dlogits, x, is_first=True)


def _scaled_weight_gradient(dtype: torch.dtype, factor: Tensor, dlogits: Tensor, x: Tensor) -> Tensor:
    return _weight_gradient(dtype, dlogits, x).mul_(factor)


def _weight_gradient_again(
    options: _Options,
    dloss: Tensor,
    dlse: Tensor,
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    lse: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    return _backward_op(x, weight, bias, labels, lse, dloss, dlse, *options, False, True, False, False)[1]


# The operators


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Losses, log-sum-exps, and the gradients of the sum: of `x`, `weight`, `bias` and the logits.

    Those of which the last four arguments say so; empty otherwise. The last only if there is one chunk.
    """
    options, wanted = _Options(*arguments[:-4]), arguments[-4:]
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
    """Gradients, as `_forward` has them, from those of losses and log-sum-exps."""
    options = _Options(*arguments[:-4])
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


def _rows_at_once(x: Tensor, options: _Options) -> int:
    """How many tokens a chunk has; equal on all ranks, which count as if they had equally many columns."""
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


def _is_one_chunk(x: Tensor, options: _Options) -> bool:
    return _rows_at_once(x, options) >= len(x)


def _padded(columns: int) -> int:
    """Rows of the buffer begin at multiples of 128 bytes, for products and kernels alike."""
    return ceil_div(columns, 64) * 64


def _new_logits(x: Tensor, rows: int, columns: int) -> Tensor:
    return x.new_empty(rows, _padded(columns))[:, :columns]


def _chunks(x: Tensor, matrix: Tensor, bias: Tensor | None, options: _Options) -> Iterator[tuple[slice, Tensor]]:
    """Which tokens, and their logits; the memory is that of the next, too."""
    size = _rows_at_once(x, options)
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
    """Adds up the gradients of chunks: those of `x`, `weight`, `bias` and the logits which are `wanted`."""

    def __init__(
        self,
        x: Tensor,
        weight: Tensor,
        matrix: Tensor,
        bias: Tensor | None,
        options: _Options,
        wanted: tuple[bool, ...],
    ) -> None:
        self._x, self._matrix, self._wanted = x, matrix, wanted
        self._dtypes = weight.dtype, weight.dtype if bias is None else bias.dtype
        self._dx, self._dw, self._db, self._dlogits = _new_gradients(
            x, weight, bias, (*wanted[:3], wanted[3] and not len(x))
        )
        if wanted[1] and len(x) > _MOST_ROUNDINGS * _rows_at_once(x, options):
            self._dw = torch.empty_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        if not len(x):
            self._dw.zero_()
        self._db = torch.zeros_like(self._db, dtype=torch.promote_types(self._db.dtype, torch.float32))

    def add(self, rows: slice, dlogits: Tensor) -> None:
        """Add those of a chunk."""
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
        """In the dtypes of what they are gradients of."""
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


def _add_product(total: Tensor, dlogits: Tensor, x: Tensor, *, is_first: bool) -> Tensor:
    """`total += dlogits.T @ x`, rounded once; `total` is in their dtype or in a wider one."""
    beta = 0 if is_first else 1
    if total.dtype == x.dtype:
        return torch.addmm(total, dlogits.t(), x, beta=beta, out=total)
    if total.is_cuda:
        return torch.addmm(total, dlogits.t(), x, out_dtype=total.dtype, beta=beta, out=total)
    return total.addmm_(dlogits.t().to(total.dtype), x.to(total.dtype), beta=beta)


# What happens to the logits of a chunk


def _write_statistics(logits: Tensor, labels: Tensor, statistics: Tensor, options: _Options) -> None:
    """Of each token the log-sum-exp, the logit of its label and the sum of the logits, over the whole vocabulary."""
    if options.triton:
        from lightning_d9d.ops.kernels import linear_cross_entropy as kernels

        kernels.write_statistics(logits, labels, statistics, first=options.first, soft_cap=options.soft_cap)
    else:
        wide = _capped(logits.to(statistics.dtype), options.soft_cap)
        column, is_ours = own_columns(logits, labels, options.first)
        at_label = wide.gather(1, column).squeeze(1).masked_fill(~is_ours, 0) if wide.shape[1] else wide.sum(1)
        torch.stack([wide.logsumexp(1), at_label, wide.sum(1)], out=statistics)
    if options.group_name:
        message = statistics if options.label_smoothing else statistics[:2]
        of_ranks = gather_dim(message.contiguous().unsqueeze(0), 0, options.group_name)
        statistics[0] = of_ranks[:, 0].logsumexp(0)
        statistics[1 : len(message)] = of_ranks[:, 1:].sum(0)


def _factors(lse: Tensor, is_counted: Tensor, dloss: Tensor, dlse: Tensor, options: _Options) -> Tensor:
    """How often the gradient of a token's logits has the softmax, less the label's one, and less 1: `[3, tokens]`."""
    dloss = dloss.masked_fill(~is_counted, 0)
    of_softmax = dloss * (1 + 2 * options.z_loss * lse) + dlse
    of_all = dloss * (options.label_smoothing / max(1, options.vocab_size))
    return torch.stack([of_softmax, dloss * (1 - options.label_smoothing), of_all])


def _write_gradient(logits: Tensor, labels: Tensor, lse: Tensor, factors: Tensor, options: _Options) -> None:
    """Overwrites logits with their gradient."""
    if options.triton:
        from lightning_d9d.ops.kernels import linear_cross_entropy as kernels

        kernels.write_gradient(logits, labels, lse, factors, first=options.first, soft_cap=options.soft_cap)
        return
    if not logits.shape[1]:
        return
    of_softmax, of_label, of_all = factors.unsqueeze(2)
    column, is_ours = own_columns(logits, labels, options.first)
    wide = _capped(logits.to(lse.dtype), options.soft_cap)
    gradient = (wide - lse.unsqueeze(1)).exp_().mul_(of_softmax).sub_(of_all)
    gradient.scatter_add_(1, column, -of_label * is_ours.unsqueeze(1))
    if options.soft_cap:
        gradient.mul_(1 - (wide / options.soft_cap).square_())
    logits.copy_(gradient)


def _capped(logits: Tensor, soft_cap: float) -> Tensor:
    return soft_cap * torch.tanh(logits / soft_cap) if soft_cap else logits


_OPTIONS = (
    "int ignore_index, float soft_cap, float z_loss, float label_smoothing, int chunk_bytes, SymInt first, "
    "SymInt vocab_size, str group_name, bool triton, bool dx, bool dw, bool db, bool dlogits"
)
_forward_op = define(
    "linear_cross_entropy",
    f"(Tensor x, Tensor weight, Tensor? bias, Tensor labels, {_OPTIONS}) -> ({', '.join(['Tensor'] * 6)})",
    _forward,
    _new_forward,
)
_backward_op = define(
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
    """Of the logits, and of the gradients of `x` and `weight` if they are made."""
    makes_dx, makes_dw = arguments[-4:-2]
    return 2 * x_shape[0] * weight_shape[0] * weight_shape[1] * (1 + makes_dx + makes_dw)
