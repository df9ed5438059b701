"""Finds the tokens of a rank in tensors, and makes copies with other numbers for some of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_d9d.parallel.tokens import TokenShard
from lightning_d9d.pipeline.trees import put_together, take_apart

SEED = 20
"""The seed of random numbers that replace those of a batch."""
_MOST_NUMBERS = 2**24
"""The largest number of elements of a tensor that are in float64 at once."""


@dataclass(frozen=True)
class TokenAxis:
    """Finds the tokens of a rank in tensors by their number: that of its chunks, or of its slice of them."""

    num_rows: int
    lengths: frozenset[int]
    """Lengths of the parts of a sequence: this rank's chunks, and its slice of them."""

    @staticmethod
    def of(tokens: TokenShard, num_rows: int, num_tokens: int) -> TokenAxis:
        """Return the axis of microbatches with this rank's chunks, `num_tokens` of each row."""
        chunks = {num_tokens} if tokens.sequence.size > 1 else set()
        return TokenAxis(num_rows, frozenset(chunks | {num_tokens // tokens.num_slices}))

    def dim_of(self, x: Any) -> int | None:
        """Return the dim of tokens: the first that fits after the dim of rows, or dim 0, perhaps joined with rows.

        A matrix with a row for each token may be as wide as the number of tokens. Tensors without tokens give None.
        DTensors also give None: results computed with them belong to all ranks.
        """
        if not isinstance(x, Tensor) or isinstance(x, nn.Parameter | DTensor):
            return None
        dims = [dim for dim in range(1, x.dim()) if x.shape[dim] in self.lengths]
        firsts = {factor * length for length in self.lengths for factor in (1, self.num_rows)}
        may_be_first = x.dim() > 0 and x.shape[0] in firsts
        if dims and (x.shape[0] == self.num_rows or not may_be_first):
            return dims[0]
        return 0 if may_be_first else None

    def places(self, x: Tensor, dim: int) -> Tensor:
        """Return the tokens' places in their rows, int64, one for each entry of the dim."""
        length = x.shape[dim] if x.shape[dim] in self.lengths else x.shape[dim] // self.num_rows
        return torch.arange(x.shape[dim], device=x.device) % length

    def with_nan(self, x: Any, place: Callable[[Tensor], Tensor]) -> Any:
        """Return a copy with NaN for the tokens at these places.

        Values without tokens or floats are returned unchanged.
        """
        if (dim := self.dim_of(x)) is None or not x.is_floating_point():
            return x
        return x.index_fill(dim, place(self.places(x, dim)).nonzero().flatten(), float("nan"))

    def reversed(self, x: Any) -> Any:
        """Return a copy with the tokens of each row in the opposite order.

        Values without tokens are returned unchanged.
        """
        if (dim := self.dim_of(x)) is None:
            return x
        places = self.places(x, dim)
        length = int(places.max()) + 1
        return x.index_select(dim, torch.arange(len(places), device=x.device) - places + (length - 1 - places))

    def exchanged(self, x: Any, place: Callable[[Tensor], Tensor]) -> Any:
        """Return a copy with the tokens at such places taken from the opposite order.

        Values without tokens are returned unchanged.
        """
        if (dim := self.dim_of(x)) is None:
            return x
        taken = place(self.places(x, dim))
        return torch.where(taken.view([-1 if each == dim else 1 for each in range(x.dim())]), self.reversed(x), x)

    def has_nan(self, x: Any, place: Callable[[Tensor], Tensor]) -> bool:
        """Return whether a token at one of these places has a NaN."""
        if (dim := self.dim_of(x)) is None or not x.is_floating_point():
            return False
        return bool(x.isnan().movedim(dim, 0).flatten(1).any(1)[place(self.places(x, dim))].any())

    def is_mixed(self, x: Any) -> bool:
        """Return whether a token other than the middle one has a NaN."""
        return self.has_nan(x, is_other)

    def is_pooled(self, x: Any) -> bool:
        """Return whether the value is one vector for each row, with NaN."""
        is_vectors = isinstance(x, Tensor) and x.is_floating_point() and x.dim() == 2 and self.dim_of(x) is None
        return is_vectors and len(x) == self.num_rows and x.shape[1] > 1 and bool(x.isnan().any())

    def summary(self, x: Any) -> Tensor | None:
        """Return one number for each token, a random projection of its values; None for values without tokens."""
        if (dim := self.dim_of(x)) is None:
            return None
        flat = x.detach().movedim(dim, 0).reshape(x.shape[dim], -1)
        numbers = torch.rand(flat.shape[1], generator=torch.Generator().manual_seed(SEED), dtype=torch.float64)
        # Logits in float64 would take more memory than a step.
        rows = flat.split(max(1, _MOST_NUMBERS // max(1, flat.shape[1])))
        return torch.cat([some.double() @ numbers.to(x.device) for some in rows])


def is_middle(places: Tensor) -> Tensor:
    """Return whether each place is the middle of its row."""
    return places == (places.max() + 1) // 2


def is_other(places: Tensor) -> Tensor:
    """Return whether each place is not the middle of its row."""
    return ~is_middle(places)


def is_any(places: Tensor) -> Tensor:
    """Return True for every place."""
    return places >= 0


def is_none(places: Tensor) -> Tensor:
    """Return False for every place."""
    return places < 0


def is_even(places: Tensor) -> Tensor:
    """Return whether each place is even."""
    return places % 2 == 0


def is_odd(places: Tensor) -> Tensor:
    """Return whether each place is odd."""
    return places % 2 == 1


def tensors_of(tree: Any) -> list[Tensor]:
    """Return all tensors of a tree, such as arguments, dataclasses or batches. See `lightning_d9d.pipeline.trees`."""
    return take_apart(tree)[0]


def mapped(change: Callable[[Tensor], Any], tree: Any) -> Any:
    """Return the tree with each of its tensors replaced by the result of `change`."""
    tensors, skeleton = take_apart(tree)
    return put_together(skeleton, [change(tensor) for tensor in tensors])
