"""The number of microbatches of a batch, and its number of tokens."""

from __future__ import annotations

from typing import Any

import torch

from lightning_d9d.errors import ConfigError
from lightning_d9d.legal import divisors
from lightning_d9d.pipeline.trees import take_apart


def num_tokens(batch: Any) -> int:
    """Return the size of the largest integer tensor in a batch (token ids, labels); 0 without one."""
    sizes = [t.numel() for t in take_apart(batch)[0] if t.dtype == torch.int64 and t.ndim]
    return max(sizes, default=0)


class MicrobatchCount:
    """The number of microbatches of a batch, from `microbatch_size` (rows) or `num_microbatches`; at most one is given.

    Batches need not divide evenly (the last one of an epoch is often short): they give fewer or shorter microbatches,
    never an empty one. Use `check` on the first training batch, which should divide evenly.
    """

    def __init__(
        self, microbatch_size: int | None, num_microbatches: int | None, rows_expected: int | None = None
    ) -> None:
        if microbatch_size is not None and num_microbatches is not None:
            raise ConfigError(
                f"microbatch_size={microbatch_size} and num_microbatches={num_microbatches} are both given; set one"
            )
        for name, value in (("microbatch_size", microbatch_size), ("num_microbatches", num_microbatches)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name}={value!r} must be an integer of at least 1")
        self.microbatch_size = microbatch_size
        self.num_microbatches = num_microbatches
        self.rows_expected = rows_expected

    @property
    def is_one(self) -> bool:
        """True if every batch is one microbatch, whatever its size."""
        return self.microbatch_size is None and self.num_microbatches in (None, 1)

    def of(self, rows: int) -> int:
        """Return the number of microbatches for a batch of `rows` rows."""
        if self.microbatch_size is not None:
            return -(-rows // self.microbatch_size)
        return min(rows, self.num_microbatches or 1)

    def check(self, rows: int) -> None:
        """Raise `ConfigError` if `rows` rows do not make equal microbatches."""
        if self.rows_expected not in (None, rows):
            raise ConfigError(
                f"the first batch has {rows} rows, but schedule=Auto(batch_size={self.rows_expected}) chose for "
                f"that size. Give Auto batch_size={rows}, or the DataLoader batch_size={self.rows_expected}"
            )
        name = "num_microbatches" if self.microbatch_size is None else "microbatch_size"
        value = self.num_microbatches or self.microbatch_size or 1
        if rows % value != 0:
            raise ConfigError(
                f"the first batch has {rows} rows, which {name}={value} does not divide; choose {name} from "
                f"{divisors(rows)} or change the DataLoader's `batch_size`"
            )
