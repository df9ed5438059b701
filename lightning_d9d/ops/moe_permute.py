from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_d9d.ops.backend import runs_triton
from lightning_d9d.ops.operator import define


class Permutation(NamedTuple):
    """The places of tokens' copies among rows that are grouped by expert; all on the device.

    There may be fewer rows than `places` has elements: a place of `num_rows` or more has no copy. So the last groups
    can be left out.
    """

    places: Tensor
    """The rows of each token's copies, int32 `[tokens, top_k]`."""

    counts: Tensor
    """Number of copies of each expert, int32 `[experts]`."""

    offsets: Tensor
    """One past the last row of each expert, padding included, int32 `[experts]`."""

    num_rows: int
    """The number of rows, padding included. The host knows it from the shapes."""

    def copy(self, x: Tensor) -> Tensor:
        """Copy `[tokens, ...]` to `[rows, ...]`; padding is zero. Its backward is `sum`."""
        places, padding = self.places, self._padding
        return _copy_op(x, places, None, *padding, self.num_rows, runs_triton(x))

    def spread(self, values: Tensor) -> Tensor:
        """Move `[tokens, top_k]`, a value for each copy, to `[rows]`; padding is zero."""
        places, padding = self.places.view(-1, 1), self._padding
        values = values.flatten()
        return _copy_op(values, places, None, *padding, self.num_rows, runs_triton(values))

    def sum(self, rows: Tensor, weights: Tensor | None = None) -> Tensor:
        """Sum `[rows, ...]` to `[tokens, ...]`, optionally times weights `[tokens, top_k]`. Its backward is `copy`.

        The copies of a token are summed in float32, in the order of its experts.
        """
        places, padding = self.places, self._padding
        return _sum_op(rows, places, weights, *padding, runs_triton(rows))

    def sources(self) -> Tensor:
        """Return the token of each row, int32 `[rows]`, if there is neither padding nor a group left out."""
        assert self.num_rows == self.places.numel(), "padding has no token, and what is left out has no row"
        return (_sources_op if runs_triton(self.places) else _sources_reference)(self.places)

    @property
    def _padding(self) -> tuple[Tensor | None, Tensor | None]:
        """Return counts and offsets that identify rows of padding; without padding the backward keeps nothing."""
        return (self.counts, self.offsets) if self.num_rows > self.places.numel() else (None, None)


def moe_permute(
    x: Tensor, indices: Tensor, weights: Tensor | None, num_experts: int, *, multiple: int = 1
) -> tuple[Tensor, Tensor | None, Permutation]:
    """Copy tokens to the rows of their experts.

    Rows are grouped by expert and, within an expert, in the order of tokens. The host does not wait, and no result
    depends on the order in which programs run. It is differentiable in `x`, whose gradient is the sum over its copies
    (`moe_unpermute`), and in `weights`.

    With a `multiple` the rows of each expert are padded to a multiple of it, as a grouped product may require. Since
    the host does not know how many rows an expert has, there are as many as there can be, `tokens * top_k +
    min(experts, tokens
    * top_k) * (multiple - 1)`, down to a multiple; those after the last expert's are padding, too. Padding is zero, and
      its gradient is not read.

    Args:
        x: Shape `[tokens, hidden]`.
        indices: The experts of each token, int32 or int64 `[tokens, top_k]`, all of them below `num_experts`.
        weights: One weight for each copy, shape `[tokens, top_k]`, if they are needed in the order of rows.
        num_experts: Number of all experts.
        multiple: Each expert's rows are padded to a multiple of this number.

    Returns:
        The rows `[rows, hidden]`, their weights `[rows]`, and the permutation for `moe_unpermute`.
    """
    permutation = sort_by_expert(indices, num_experts, multiple)
    return permutation.copy(x), None if weights is None else permutation.spread(weights), permutation


def moe_unpermute(rows: Tensor, permutation: Permutation, weights: Tensor | None = None) -> Tensor:
    """Sum the copies of each token: row `places[t, k]`, optionally times `weights[t, k]`, over k.

    Sums are in float32, in the order of k, rounded once to the dtype of `rows`. It is differentiable in `rows` and in
    `weights`. The gradient of a weight is the product of its row with the gradient of its token; rows are kept for that
    only with weights.

    Args:
        rows: Results for the rows of `moe_permute`, shape `[rows, hidden]`. Padding is not read, and its gradient is
            zero.
        permutation: The permutation that `moe_permute` returned.
        weights: Shape `[tokens, top_k]`; None means ones.

    Returns:
        Shape `[tokens, hidden]`.
    """
    return permutation.sum(rows, weights)


def sort_by_expert(indices: Tensor, num_experts: int, multiple: int = 1) -> Permutation:
    """Return the places of copies of tokens with these experts `[tokens, top_k]`; see `moe_permute`."""
    num_copies = indices.numel()
    num_rows = (num_copies + min(num_experts, num_copies) * (multiple - 1)) // multiple * multiple
    sort = _sort_op if runs_triton(indices) else sort_reference
    places, counts, offsets = sort(indices, num_experts, multiple)
    return Permutation(places, counts, offsets, num_rows)


def copy_tokens(x: Tensor, places: Tensor) -> Tensor:
    """Return rows of tokens' copies, like `Permutation.copy` without padding, with kernels and without derivatives."""
    return _copy(x, places, None, None, None, places.numel(), True)


def sum_copies(rows: Tensor, places: Tensor) -> Tensor:
    """Return the sums of tokens' rows, like `Permutation.sum` without padding, with kernels and without derivatives."""
    return _sum(rows, places, None, None, None, True)


# In plain torch


def moe_permute_reference(
    x: Tensor, indices: Tensor, weights: Tensor | None, num_experts: int, *, multiple: int = 1
) -> tuple[Tensor, Tensor | None, Permutation]:
    """Compute `moe_permute` with torch's own operators and derivatives."""
    num_rows = sort_by_expert(indices, num_experts, multiple).num_rows
    permutation = Permutation(*sort_reference(indices, num_experts, multiple), num_rows)
    rows = _copied(x, permutation.places, None, num_rows)
    if weights is not None:
        weights = _copied(weights.flatten(), permutation.places.view(-1, 1), None, num_rows)
    return rows, weights, permutation


def moe_unpermute_reference(rows: Tensor, permutation: Permutation, weights: Tensor | None = None) -> Tensor:
    """Compute `moe_unpermute` with torch's own operators and derivatives."""
    return summed(rows, permutation.places, weights)


def sort_reference(indices: Tensor, num_experts: int, multiple: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return places, counts and offsets of a `Permutation`."""
    experts, order = indices.flatten().sort(stable=True)
    ends = torch.searchsorted(experts, torch.arange(num_experts, device=indices.device), right=True)
    counts = ends.diff(prepend=ends.new_zeros(1))
    padded = (counts + multiple - 1) // multiple * multiple
    offsets = padded.cumsum(0)
    shifts = (offsets - padded) - (ends - counts)
    rows = torch.arange(len(order), device=order.device) + shifts.index_select(0, experts)
    places = torch.empty_like(order).scatter_(0, order, rows)
    return places.view_as(indices).int(), counts.int(), offsets.int()


def _sources_reference(places: Tensor) -> Tensor:
    tokens = torch.arange(places.numel(), device=places.device) // places.shape[1]
    return torch.empty_like(places.flatten()).scatter_(0, places.flatten().long(), tokens.int())


def _weighted(rows: Tensor, weights: Tensor) -> Tensor:
    return rows * weights.view(*weights.shape, *[1] * (rows.dim() - 2))


def _copied(x: Tensor, places: Tensor, weights: Tensor | None, num_rows: int) -> Tensor:
    copies = x.unsqueeze(1)
    copies = copies if weights is None else _weighted(copies, weights).to(x.dtype)
    is_partial = num_rows < places.numel()
    rows = x.new_zeros(num_rows + is_partial, *x.shape[1:])
    rows[places.clamp(max=num_rows) if is_partial else places] = copies
    return rows[:num_rows].clone() if is_partial else rows


def gathered(rows: Tensor, places: Tensor, num_rows: int | None = None) -> Tensor:
    """Return rows by place `[tokens, top_k, ...]`; zero if there is none.

    Places from `num_rows` on have no row; by default those beyond the last row, if there are more places.
    """
    if num_rows is not None or len(rows) < places.numel():
        most = len(rows) if num_rows is None else num_rows
        places, rows = places.clamp(max=most), torch.cat([rows[:most], rows.new_zeros(1, *rows.shape[1:])])
    return rows.index_select(0, places.flatten()).view(*places.shape, *rows.shape[1:])


def summed(rows: Tensor, places: Tensor, weights: Tensor | None, num_rows: int | None = None) -> Tensor:
    """Return the sums of tokens' rows, optionally times weights; `num_rows` as in `gathered`."""
    copies = gathered(rows, places, num_rows)
    if weights is not None:
        return _weighted(copies, weights).sum(1).to(rows.dtype)
    return copies.squeeze(1) if places.shape[1] == 1 else copies.sum(1)


# The operators. Copying and summing are each other's backward. Left to autograd, the backward of the copy would add the
# gradients of a token one by one in the model's dtype, in no fixed order on CUDA. With weights the backward of the sum
# copies and multiplies at once, which reads the gradient once.


def _new_places(indices: Tensor, num_experts: int, multiple: int) -> tuple[Tensor, Tensor, Tensor]:
    of_experts = indices.new_empty(num_experts, dtype=torch.int32)
    return indices.new_empty(indices.shape, dtype=torch.int32), of_experts, torch.empty_like(of_experts)


def _sort(indices: Tensor, num_experts: int, multiple: int) -> tuple[Tensor, Tensor, Tensor]:
    from lightning_d9d.ops.kernels import moe_permute as kernels

    results = _new_places(indices, num_experts, multiple)
    kernels.sort(indices, multiple, *results)
    return results


def _new_sources(places: Tensor) -> Tensor:
    return places.new_empty(places.numel())


def _sources(places: Tensor) -> Tensor:
    from lightning_d9d.ops.kernels import moe_permute as kernels

    sources = _new_sources(places)
    kernels.fill_sources(places, sources)
    return sources


def _new_rows(
    x: Tensor,
    places: Tensor,
    weights: Tensor | None,
    counts: Tensor | None,
    offsets: Tensor | None,
    num_rows: int,
    triton: bool,
) -> Tensor:
    return x.new_empty(num_rows, *x.shape[1:])


def _copy(
    x: Tensor,
    places: Tensor,
    weights: Tensor | None,
    counts: Tensor | None,
    offsets: Tensor | None,
    num_rows: int,
    triton: bool,
) -> Tensor:
    if not triton:
        return _copied(x, places, weights, num_rows)
    from lightning_d9d.ops.kernels import moe_permute as kernels

    rows = x.new_empty(num_rows, *x.shape[1:])
    kernels.copy_rows(x, places, weights, rows)
    if counts is not None and offsets is not None:
        kernels.clear_padding(counts, offsets, rows)
    return rows


def _new_sums(
    rows: Tensor, places: Tensor, weights: Tensor | None, counts: Tensor | None, offsets: Tensor | None, triton: bool
) -> Tensor:
    return rows.new_empty(len(places), *rows.shape[1:])


def _sum(
    rows: Tensor, places: Tensor, weights: Tensor | None, counts: Tensor | None, offsets: Tensor | None, triton: bool
) -> Tensor:
    if not triton:
        return summed(rows, places, weights)
    from lightning_d9d.ops.kernels import moe_permute as kernels

    sums = rows.new_empty(len(places), *rows.shape[1:])
    kernels.sum_rows(rows, places, weights, sums)
    return sums


def _new_products(x: Tensor, rows: Tensor, places: Tensor, dtype: torch.dtype, triton: bool) -> Tensor:
    return x.new_empty(places.shape, dtype=dtype)


def _dot(x: Tensor, rows: Tensor, places: Tensor, dtype: torch.dtype, triton: bool) -> Tensor:
    if not triton:
        products = x.unsqueeze(1).to(dtype) * gathered(rows, places)
        return products.flatten(2).sum(2).to(dtype)
    from lightning_d9d.ops.kernels import moe_permute as kernels

    products = x.new_empty(places.shape, dtype=dtype)
    kernels.dot_rows(x, rows, places, products)
    return products


def _new_copies_and_products(
    x: Tensor, rows: Tensor, places: Tensor, weights: Tensor, *_: Any
) -> tuple[Tensor, Tensor]:
    return x.new_empty(rows.shape), weights.new_empty(weights.shape)


def _copy_and_dot(
    x: Tensor,
    rows: Tensor,
    places: Tensor,
    weights: Tensor,
    counts: Tensor | None,
    offsets: Tensor | None,
    triton: bool,
) -> tuple[Tensor, Tensor]:
    if not triton:
        return _copied(x, places, weights, len(rows)), _dot(x, rows, places, weights.dtype, triton)
    from lightning_d9d.ops.kernels import moe_permute as kernels

    copies, products = _new_copies_and_products(x, rows, places, weights)
    kernels.copy_and_dot_rows(x, rows, places, weights, copies, products)
    if counts is not None and offsets is not None:
        kernels.clear_padding(counts, offsets, copies)
    return copies, products


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, places, weights, counts, offsets, *_ = inputs
    ctx.triton, ctx.size = inputs[-1], len(x)
    # Not saved in autograd's way, since a recomputation goes on until it has all that was saved so: it would bring the
    # results of other ranks' experts back once more, for nothing but these.
    ctx.where = places, counts, offsets
    ctx.dtype = None if weights is None else weights.dtype
    if weights is not None:
        ctx.save_for_backward(x if ctx.needs_input_grad[2] else None, weights)


def _copy_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    (places, counts, offsets), (x, weights) = ctx.where, ctx.saved_tensors or (None, None)
    of_x = of_weights = None
    if ctx.needs_input_grad[0]:
        of_x = _sum_op(gradient, places, weights, counts, offsets, ctx.triton)
    if ctx.needs_input_grad[2]:
        of_weights = _dot_op(x, gradient, places, ctx.dtype, ctx.triton)
    return of_x, None, of_weights, None, None, None, None


def _sum_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    (places, counts, offsets), (rows, weights) = ctx.where, ctx.saved_tensors or (None, None)
    of_rows = of_weights = None
    # Both at once have no derivative of their own, so for a second one they are computed one by one.
    if ctx.needs_input_grad[0] and ctx.needs_input_grad[2] and not torch.is_grad_enabled():
        of_rows, of_weights = _copy_and_dot_op(gradient, rows, places, weights, counts, offsets, ctx.triton)
        return of_rows, None, of_weights, None, None, None
    if ctx.needs_input_grad[0]:
        of_rows = _copy_op(gradient, places, weights, counts, offsets, ctx.size, ctx.triton)
    if ctx.needs_input_grad[2]:
        of_weights = _dot_op(gradient, rows, places, ctx.dtype, ctx.triton)
    return of_rows, None, of_weights, None, None, None


_sort_op = define(
    "moe_sort", "(Tensor indices, SymInt num_experts, SymInt multiple) -> (Tensor, Tensor, Tensor)", _sort, _new_places
)
_sources_op = define("moe_sources", "(Tensor places) -> Tensor", _sources, _new_sources)
_copy_op = define(
    "moe_copy_rows",
    "(Tensor x, Tensor places, Tensor? weights, Tensor? counts, Tensor? offsets, SymInt num_rows, bool triton) "
    "-> Tensor",
    _copy,
    _new_rows,
    setup_context=_setup_context,
    backward=_copy_backward,
    compiles_ahead=True,
)
_sum_op = define(
    "moe_sum_rows",
    "(Tensor rows, Tensor places, Tensor? weights, Tensor? counts, Tensor? offsets, bool triton) -> Tensor",
    _sum,
    _new_sums,
    setup_context=_setup_context,
    backward=_sum_backward,
    compiles_ahead=True,
)
_dot_op = define(
    "moe_dot_rows",
    "(Tensor x, Tensor rows, Tensor places, ScalarType dtype, bool triton) -> Tensor",
    _dot,
    _new_products,
)
_copy_and_dot_op = define(
    "moe_copy_and_dot_rows",
    "(Tensor x, Tensor rows, Tensor places, Tensor weights, Tensor? counts, Tensor? offsets, bool triton) "
    "-> (Tensor, Tensor)",
    _copy_and_dot,
    _new_copies_and_products,
)
