"""Products of experts with adapters: what adapters add is part of the products and the activation around it.

[Note: adapted experts] Adapters of rank r are few numbers and few operations. As separate products they would read and
write all rows once more. Here only `h`, with r numbers a row, is passed between the kernels:

| function | product of the experts | and of adapters |
|---|---|---|
| `adapted_gate_up` | `gate_up = x @ weight.T` | `h = scale * x @ a.T` |
| `adapted_swiglu` | | `gate_up + h @ b.T` before the activation; `scale * inner @ a.T` after it |
| `adapted_down` | `y = inner @ weight.T` | `y + h @ b.T` |

[Note: products by token] If this rank makes the copies of tokens and sums them, a thin product need not work on rows.
`h` is written to the columns of its token and expert, and all other elements are zero. Then the sum over copies of
`h @ b[expert].T` is one dense product of tokens with the matrices of all experts. The product of tokens with all `a` is
computed in the same way. It has many times as many operations, but it reads each token once. The adapter's rank decides
which way takes less time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lightning_d9d.ops.backend import runs_triton
from lightning_d9d.ops.grouped_gemm import choose_backend, chosen_grouped_gemm, grouped_gemm, multiply
from lightning_d9d.ops.linear import autocast_dtype
from lightning_d9d.ops.moe_permute import Permutation, copy_tokens, sum_copies
from lightning_d9d.ops.operator import define
from lightning_d9d.ops.rows import HOPPER_SHARED_MEMORY, shared_memory
from lightning_d9d.ops.sharded_weights import local_shard
from lightning_d9d.ops.swiglu import swiglu

MOST_RANK = 64
"""Largest rank whose tiles fit into registers; larger ones take ordinary grouped products."""
_MOST_READ = 96
"""Columns of all experts' matrices, by copies of a token: a dense product with this many takes as long as reading all
rows."""
_MOST_WRITTEN = 512
"""The same limit for a product that is added to a tensor; its alternative would read and write rows."""


def adapted_gate_up(
    x: Tensor, weight: Tensor, a: Tensor, offsets: Tensor, scale: float, copies: Permutation | None = None
) -> tuple[Tensor, Tensor]:
    """Multiply experts' rows with their matrices, and with those of an adapter. [Note: adapted experts].

    On CUDA, with a frozen `weight`, it is one operator, `torch.ops.lightning_d9d.adapted_gate_up`, which keeps `x` and
    the matrices. Gradients of `a` are summed in float32 and rounded once, and are never deferred by a split backward.

    Args:
        x: Rows sorted by expert, shape `[rows, hidden]`, or with `copies` the tokens, `[tokens, hidden]`.
        weight: Shape `[experts, out, hidden]`; it and `a` as in `grouped_gemm`.
        a: Shape `[experts, n, hidden]`.
        offsets: As in `grouped_gemm`.
        scale: Factor of the second product.
        copies: Permutation from tokens to rows, without padding.

    Returns:
        Shapes `[rows, out]` and `[rows, n]`.
    """
    a, frozen = local_shard(a, x), local_shard(weight, x)
    if not _fits(x, frozen, a.shape[1] // 2, a):
        return adapted_gate_up_reference(x, weight, a, offsets, scale, copies)
    x = x.to(frozen.dtype)
    backend = choose_backend(x, frozen, offsets, chosen_grouped_gemm())
    return _gate_up_op(x, frozen, a.to(x.dtype), offsets, *_places(copies), scale, backend)


def adapted_swiglu(
    gate_up: Tensor,
    h: Tensor | None,
    b: Tensor | None,
    a: Tensor | None,
    weights: Tensor,
    offsets: Tensor,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor | None]:
    """Add an adapter's summand to experts' rows, then compute `swiglu` and the next adapter's hidden state.

    On CUDA it is one operator, `torch.ops.lightning_d9d.adapted_swiglu`, which keeps its arguments. [Note: adapted
    experts].

    Args:
        gate_up: Shape `[rows, 2 * inner]`, the gate first.
        h: Shape `[rows, 2 * rank]`, the gate's part first; None adds nothing.
        b: Shape `[experts, 2 * inner, rank]`: each half is multiplied with its own half of `h`.
        a: Shape `[experts, rank, inner]`; with None the second result is None.
        weights: Factors of rows, shape `[rows]`.
        offsets: As in `grouped_gemm`.
        scale: Factor of the second result.

    Returns:
        Shape `[rows, inner]`, and its product with `a`, `[rows, rank]`.
    """
    b, a = (None if each is None else local_shard(each, gate_up) for each in (b, a))
    rank = max(0 if b is None else b.shape[2], 0 if a is None else a.shape[1])
    if not (runs_triton(gate_up, h, b, a, weights) and _has_room(rank, gate_up.dtype, gate_up.device)):
        return adapted_swiglu_reference(gate_up, h, b, a, weights, offsets, scale)
    dtype = gate_up.dtype
    h, b, a = (None if each is None else each.to(dtype) for each in (h, b, a))
    inner, projected = _swiglu_op(gate_up, h, b, a, weights, offsets, scale)
    return inner, None if a is None else projected


def adapted_down(
    inner: Tensor, weight: Tensor, h: Tensor, b: Tensor, offsets: Tensor, copies: Permutation | None = None
) -> Tensor:
    """Add two products of experts' rows: with their matrices, and with those of an adapter. [Note: adapted experts].

    On CUDA, with a frozen `weight`, it is one operator, `torch.ops.lightning_d9d.adapted_down`, which keeps `h` and the
    matrices. Gradients of `b` are summed in float32 and rounded once, and are never deferred by a split backward.

    Args:
        inner: Rows sorted by expert, shape `[rows, inner]`.
        weight: Shape `[experts, hidden, inner]`; it and `b` as in `grouped_gemm`.
        h: Shape `[rows, rank]`.
        b: Shape `[experts, hidden, rank]`.
        offsets: As in `grouped_gemm`.
        copies: Permutation from tokens to rows, without padding: then the results of each token's copies are summed.

    Returns:
        Shape `[rows, hidden]`, or with `copies` `[tokens, hidden]`.
    """
    b, frozen = local_shard(b, inner), local_shard(weight, inner)
    if not _fits(inner, frozen, b.shape[2], b):
        return adapted_down_reference(inner, weight, h, b, offsets, copies)
    inner = inner.to(frozen.dtype)
    backend = choose_backend(inner, frozen, offsets, chosen_grouped_gemm())
    return _down_op(inner, frozen, h.to(inner.dtype), b.to(inner.dtype), offsets, *_places(copies), backend)


def thin_product(x: Tensor, matrices: Tensor, offsets: Tensor) -> Tensor:
    """Run `grouped_gemm` with matrices that have the adapter's rank as one dim, padded on CUDA in 16 bits.

    Args:
        x: Rows sorted by expert, shape `[rows, in]`.
        matrices: Shape `[experts, out, in]`.
        offsets: As in `grouped_gemm`.
    """
    if not x.is_cuda or x.dtype == torch.float64:
        return grouped_gemm(x, matrices, offsets)
    matrices = local_shard(matrices, x)
    unit = 16 // autocast_dtype(x).itemsize
    _, num_out, num_in = matrices.shape
    of_out, of_in = -num_out % unit, -num_in % unit
    if of_out or of_in:
        pad = torch.nn.functional.pad
        x, matrices = pad(x, (0, of_in)), pad(matrices, (0, of_in, 0, of_out))
    return grouped_gemm(x, matrices, offsets)[:, :num_out]


# In plain torch


def adapted_gate_up_reference(
    x: Tensor, weight: Tensor, a: Tensor, offsets: Tensor, scale: float, copies: Permutation | None = None
) -> tuple[Tensor, Tensor]:
    """Compute `adapted_gate_up` as separate products."""
    rows = x if copies is None else copies.copy(x)
    return grouped_gemm(rows, weight, offsets), thin_product(rows, a, offsets) * scale


def adapted_swiglu_reference(
    gate_up: Tensor,
    h: Tensor | None,
    b: Tensor | None,
    a: Tensor | None,
    weights: Tensor,
    offsets: Tensor,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor | None]:
    """Compute `adapted_swiglu` as separate products."""
    if h is not None and b is not None:
        halves = zip(h.chunk(2, 1), b.chunk(2, 1), strict=True)
        gate_up = gate_up + torch.cat([thin_product(of_h, of_b, offsets) for of_h, of_b in halves], 1)
    inner = swiglu(gate_up, weights)
    return inner, None if a is None else thin_product(inner, a, offsets) * scale


def adapted_down_reference(
    inner: Tensor, weight: Tensor, h: Tensor, b: Tensor, offsets: Tensor, copies: Permutation | None = None
) -> Tensor:
    """Compute `adapted_down` as separate products."""
    rows = grouped_gemm(inner, weight, offsets) + thin_product(h, b, offsets)
    return rows if copies is None else copies.sum(rows)


def _fits(x: Tensor, weight: Tensor, rank: int, *thin: Tensor) -> bool:
    """Return whether the operators support these: the weight must be frozen, and in the dtype of the computation."""
    is_frozen = not weight.requires_grad and weight.dtype == autocast_dtype(x)
    return is_frozen and runs_triton(x, weight, *thin) and _has_room(rank, weight.dtype, x.device)


def _has_room(rank: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether the tiles of kernels fit into registers and shared memory; in float32 only Hopper's is enough."""
    has_memory = dtype != torch.float32 or shared_memory(device) >= HOPPER_SHARED_MEMORY
    return 0 < rank <= MOST_RANK and has_memory


def _places(copies: Permutation | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if copies is None else (copies.places, copies.sources())


# Thin products: by rows, or where tokens are at hand dense ones. [Note: products by token]


def _is_dense(rank: int, offsets: Tensor, places: Tensor | None, most: int) -> bool:
    return places is not None and len(offsets) * rank <= most * places.shape[1]


def _project(x: Tensor, matrices: Tensor, offsets: Tensor, sources: Tensor | None, scale: float, dense: bool) -> Tensor:
    """Return `scale * matrices[g] @ x` of each row, shape `[rows, n]`, for matrices `[groups, n, width]`."""
    from lightning_d9d.ops.kernels import thin_products as kernels

    rank = matrices.shape[1]
    h = x.new_empty(len(x) if sources is None else len(sources), rank)
    if 0 in (*h.shape, *matrices.shape):
        return h
    if dense:
        assert sources is not None
        kernels.pick(x @ matrices.reshape(-1, matrices.shape[2]).t(), offsets, sources, scale, h)
    else:
        kernels.project(x, matrices, offsets, sources, scale, h)
    return h


def _columns(h: Tensor, offsets: Tensor, sources: Tensor, num_tokens: int) -> Tensor:
    """Place each row in the columns of its token and expert, `[tokens, groups * n]`; all other elements are zero."""
    from lightning_d9d.ops.kernels import thin_products as kernels

    columns = h.new_zeros(num_tokens, len(offsets) * h.shape[1])
    if h.numel():
        kernels.spread(h, offsets, sources, columns)
    return columns


def _added(rows: Tensor, h: Tensor, matrices: Tensor, offsets: Tensor, scale: float) -> Tensor:
    """Add `scale * h @ matrices[g]`, matrices `[groups, n, width]`, to each row, in place."""
    from lightning_d9d.ops.kernels import thin_products as kernels

    if rows.numel() and matrices.numel():
        kernels.accumulate(rows, h, matrices, offsets, scale)
    return rows


def _summed(
    rows: Tensor,
    h: Tensor,
    matrices: Tensor,
    offsets: Tensor,
    scale: float,
    places: Tensor | None,
    columns: Tensor | None,
) -> Tensor:
    """Add `scale * h @ matrices[g]` to rows; with places sum over a token's copies, densely if there are `columns`."""
    if places is None:
        return _added(rows, h, matrices, offsets, scale)
    if columns is None:
        return sum_copies(_added(rows, h, matrices, offsets, scale), places)
    return sum_copies(rows, places).addmm_(columns, matrices.reshape(-1, matrices.shape[2]), alpha=scale)


def _thin_gradient(
    h: Tensor, x: Tensor, offsets: Tensor, sources: Tensor | None, scale: float, columns: Tensor | None, result: Tensor
) -> None:
    """Fill `result` `[groups, n, width]`, of any strides, with `scale * h.T @ x` of each group's rows."""
    from lightning_d9d.ops.kernels import thin_products as kernels

    if columns is not None:
        product = torch.addmm(x.new_empty(()), columns.t(), x, beta=0, alpha=scale)
        result.copy_(product.view(result.shape))
    elif result.numel():
        kernels.gradient(h, x, offsets, sources, scale, result)


# The operators


def _new_gate_up(
    x: Tensor, weight: Tensor, a: Tensor, offsets: Tensor, places: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor]:
    num_rows = x.shape[0] if places is None else places.numel()
    return x.new_empty(num_rows, weight.shape[1]), x.new_empty(num_rows, a.shape[1])


def _gate_up(
    x: Tensor,
    weight: Tensor,
    a: Tensor,
    offsets: Tensor,
    places: Tensor | None,
    sources: Tensor | None,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor]:
    x = x.contiguous()
    rows = x if places is None else copy_tokens(x, places)
    dense = _is_dense(a.shape[1], offsets, places, _MOST_READ)
    return multiply(rows, weight, offsets, backend), _project(x, a, offsets, sources, scale, dense)


def _new_of_gate_up(
    d_gate_up: Tensor, dh: Tensor, x: Tensor, weight: Tensor, a: Tensor, *others: Any
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape if others[-1] else 0), a.new_empty(a.shape)


def _gate_up_gradients(
    d_gate_up: Tensor,
    dh: Tensor,
    x: Tensor,
    weight: Tensor,
    a: Tensor,
    offsets: Tensor,
    places: Tensor | None,
    sources: Tensor | None,
    scale: float,
    backend: str,
    needs_x: bool,
) -> tuple[Tensor, Tensor]:
    x, dh, da = x.contiguous(), dh.contiguous(), torch.empty_like(a, memory_format=torch.contiguous_format)
    rank = a.shape[1]
    reads, writes = (_is_dense(rank, offsets, places, most) for most in (_MOST_READ, _MOST_WRITTEN))
    columns = _columns(dh, offsets, sources, len(x)) if sources is not None and (reads or writes) else None
    dx = x.new_empty(0)
    if needs_x:
        rows = multiply(d_gate_up, weight.mT, offsets, backend)
        dx = _summed(rows, dh, a, offsets, scale, places, columns if writes else None)
    _thin_gradient(dh, x, offsets, sources, scale, columns if reads else None, da)
    return dx, da


def _setup_gate_up(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.scale, ctx.backend = inputs
    ctx.save_for_backward(*tensors)


def _gate_up_backward(ctx: Any, d_gate_up: Tensor, dh: Tensor) -> tuple[Tensor | None, ...]:
    needs_x = ctx.needs_input_grad[0]
    dx, da = _gate_up_gradients_op(d_gate_up, dh, *ctx.saved_tensors, ctx.scale, ctx.backend, needs_x)
    return dx if needs_x else None, None, da, None, None, None, None, None


def _new_activated(
    gate_up: Tensor, h: Tensor | None, b: Tensor | None, a: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor]:
    num_rows, width = gate_up.shape
    projected = gate_up.new_empty(0) if a is None else gate_up.new_empty(num_rows, a.shape[1])
    return gate_up.new_empty(num_rows, width // 2), projected


def _activate(
    gate_up: Tensor,
    h: Tensor | None,
    b: Tensor | None,
    a: Tensor | None,
    weights: Tensor,
    offsets: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    from lightning_d9d.ops.kernels.adapted_swiglu import forward

    results = _new_activated(gate_up, h, b, a)
    if results[0].numel():
        arguments = [*_contiguous(gate_up, h, b, a, weights), offsets, scale, *results]
        forward(*arguments)
    return results


def _new_of_activated(
    dy: Tensor,
    d_projected: Tensor | None,
    gate_up: Tensor,
    h: Tensor | None,
    b: Tensor | None,
    a: Tensor | None,
    weights: Tensor,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dh, db, da = (gate_up.new_empty(0 if each is None else each.shape) for each in (h, b, a))
    return gate_up.new_empty(gate_up.shape), dh, db, da, weights.new_empty(weights.shape)


def _activated_gradients(
    dy: Tensor,
    d_projected: Tensor | None,
    gate_up: Tensor,
    h: Tensor | None,
    b: Tensor | None,
    a: Tensor | None,
    weights: Tensor,
    offsets: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from lightning_d9d.ops.kernels.adapted_swiglu import backward

    results = _new_of_activated(dy, d_projected, gate_up, h, b, a, weights)
    if dy.numel():
        arguments = [*_contiguous(dy, d_projected, gate_up, h, b, a, weights), offsets, scale, results]
        backward(*arguments)
    else:
        for result in results:
            result.zero_()
    return results


def _contiguous(*tensors: Tensor | None) -> list[Any]:
    return [None if tensor is None else tensor.contiguous() for tensor in tensors]


def _setup_swiglu(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _swiglu_backward(ctx: Any, dy: Tensor, d_projected: Tensor) -> tuple[Tensor | None, ...]:
    gate_up, h, b, a, weights, offsets = ctx.saved_tensors
    of_projected = None if a is None else d_projected
    results = _swiglu_gradients_op(dy, of_projected, gate_up, h, b, a, weights, offsets, ctx.scale)
    needed = zip(results, ctx.needs_input_grad, strict=False)
    return *(gradient if needs else None for gradient, needs in needed), None, None


def _new_down(inner: Tensor, weight: Tensor, h: Tensor, b: Tensor, offsets: Tensor, *others: Any) -> Tensor:
    places = others[0]
    return inner.new_empty(inner.shape[0] if places is None else places.shape[0], weight.shape[1])


def _down(
    inner: Tensor,
    weight: Tensor,
    h: Tensor,
    b: Tensor,
    offsets: Tensor,
    places: Tensor | None,
    sources: Tensor | None,
    backend: str,
) -> Tensor:
    rows, columns, h = multiply(inner, weight, offsets, backend), None, h.contiguous()
    if places is not None and sources is not None and _is_dense(b.shape[2], offsets, places, _MOST_WRITTEN):
        columns = _columns(h, offsets, sources, len(places))
    return _summed(rows, h, b.mT, offsets, 1.0, places, columns)


def _new_of_down(dy: Tensor, weight: Tensor, h: Tensor, b: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return dy.new_empty(h.shape[0], weight.shape[2]), h.new_empty(h.shape), b.new_empty(b.shape)


def _down_gradients(
    dy: Tensor,
    weight: Tensor,
    h: Tensor,
    b: Tensor,
    offsets: Tensor,
    places: Tensor | None,
    sources: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    dy, h, db = dy.contiguous(), h.contiguous(), torch.empty_like(b, memory_format=torch.contiguous_format)
    dense = _is_dense(b.shape[2], offsets, places, _MOST_READ)
    rows = dy if places is None else copy_tokens(dy, places)
    d_inner = multiply(rows, weight.mT, offsets, backend)
    dh = _project(dy, b.mT, offsets, sources, 1.0, dense)
    columns = _columns(h, offsets, sources, len(dy)) if dense and sources is not None else None
    _thin_gradient(h, dy, offsets, sources, 1.0, columns, db.mT)
    return d_inner, dh, db


def _setup_down(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, *tensors, ctx.backend = inputs
    ctx.save_for_backward(*tensors)


def _down_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    d_inner, dh, db = _down_gradients_op(dy, *ctx.saved_tensors, ctx.backend)
    return d_inner, None, dh, db, None, None, None, None


_gate_up_op = define(
    "adapted_gate_up",
    "(Tensor x, Tensor weight, Tensor a, Tensor offsets, Tensor? places, Tensor? sources, float scale, str backend) "
    "-> (Tensor, Tensor)",
    _gate_up,
    _new_gate_up,
    setup_context=_setup_gate_up,
    backward=_gate_up_backward,
)
_gate_up_gradients_op = define(
    "adapted_gate_up_backward",
    "(Tensor d_gate_up, Tensor dh, Tensor x, Tensor weight, Tensor a, Tensor offsets, Tensor? places, Tensor? sources, "
    "float scale, str backend, bool needs_x) -> (Tensor, Tensor)",
    _gate_up_gradients,
    _new_of_gate_up,
)
_swiglu_op = define(
    "adapted_swiglu",
    "(Tensor gate_up, Tensor? h, Tensor? b, Tensor? a, Tensor weights, Tensor offsets, float scale) "
    "-> (Tensor, Tensor)",
    _activate,
    _new_activated,
    setup_context=_setup_swiglu,
    backward=_swiglu_backward,
)
_swiglu_gradients_op = define(
    "adapted_swiglu_backward",
    "(Tensor dy, Tensor? d_projected, Tensor gate_up, Tensor? h, Tensor? b, Tensor? a, Tensor weights, Tensor offsets, "
    "float scale) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _activated_gradients,
    _new_of_activated,
)
_down_op = define(
    "adapted_down",
    "(Tensor inner, Tensor weight, Tensor h, Tensor b, Tensor offsets, Tensor? places, Tensor? sources, str backend) "
    "-> Tensor",
    _down,
    _new_down,
    setup_context=_setup_down,
    backward=_down_backward,
    keeps_first=True,
)
_down_gradients_op = define(
    "adapted_down_backward",
    "(Tensor dy, Tensor weight, Tensor h, Tensor b, Tensor offsets, Tensor? places, Tensor? sources, str backend) "
    "-> (Tensor, Tensor, Tensor)",
    _down_gradients,
    _new_of_down,
)


@register_flop_formula(torch.ops.lightning_d9d.adapted_gate_up)
def _gate_up_flops(x: Any, weight: Any, a: Any, offsets: Any, places: Any = None, *_: Any, **__: Any) -> int:
    num_rows = x[0] if places is None else places[0] * places[1]
    return 2 * num_rows * x[1] * (weight[1] + a[1])


@register_flop_formula(torch.ops.lightning_d9d.adapted_gate_up_backward)
def _gate_up_backward_flops(d_gate_up: Any, dh: Any, x: Any, weight: Any, a: Any, *others: Any, **__: Any) -> int:
    return 2 * d_gate_up[0] * x[1] * ((weight[1] + a[1]) * others[-1] + a[1])


@register_flop_formula(torch.ops.lightning_d9d.adapted_down)
def _down_flops(inner: Any, weight: Any, h: Any, b: Any, *_: Any, **__: Any) -> int:
    return 2 * inner[0] * weight[1] * (weight[2] + b[2])


@register_flop_formula(torch.ops.lightning_d9d.adapted_down_backward)
def _down_backward_flops(dy: Any, weight: Any, h: Any, b: Any, *_: Any, **__: Any) -> int:
    return 2 * h[0] * weight[1] * (weight[2] + 2 * b[2])
