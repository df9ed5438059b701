"""Random words that depend only on a counter and a key, so that everyone who needs the same words can compute them."""

from __future__ import annotations

from torch import Tensor

ROUNDS = 7
"""Rounds of Philox4x32: the fewest that pass all tests of BigCrush (Salmon et al., 2011, table 2)."""
SPREAD = 0x9E3779B1
"""An odd number near `2**32` over the golden ratio: products with it differ in their upper bits if the factors differ
in any lower ones."""
OTHER_SPREAD = 0x85EBCA77
"""A second such number, for other bits of the same word."""
WORD = 0xFFFFFFFF
"""The largest word, which as a mask keeps the lower 32 bits."""


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four random words for each counter.

    They are those of Philox4x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3").

    Args:
        counter: Words, least significant first, as int64 from 0 to `2**32 - 1`.
        key: Two words, int64 `[2]`.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key.unbind()
    for _ in range(ROUNDS):
        low, high = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # the low 64 bits, which are all there are
        c0, c1, c2, c3 = high >> 32 & WORD ^ c1 ^ k0, high & WORD, low >> 32 & WORD ^ c3 ^ k1, low & WORD
        k0, k1 = k0 + 0x9E3779B9 & WORD, k1 + 0xBB67AE85 & WORD
    return c0, c1, c2, c3
