from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Masks(NamedTuple):
    """The pairs of queries and keys that count in attention."""

    causal: bool
    """Integers, shape `[batch, queries]`; only keys with the same one count."""
    window: int | None = None
    """Queries and keys are those of the same tokens, and a query attends to keys up to its own."""
    q_documents: Tensor | None = None
    """Maximum number of keys of a query, its own and those before it; only with `causal`. It is given together with
    `k_documents` or not at all."""
    k_documents: Tensor | None = None
    """Integers, shape `[batch, keys]`."""
