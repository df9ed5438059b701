"""The one table of numerical tolerances. Tests name a dtype and a kind of value, never a number of their own."""

from dataclasses import dataclass
from enum import StrEnum

import torch


class Kind(StrEnum):
    """What a compared tensor is; it decides how much rounding has piled up in it."""

    GRADIENT = "gradient"
    OUTPUT = "output"
    """Activations and logits."""
    LOSS = "loss"
    """A mean over tokens (divide a sum before comparing it)."""


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """How far a tensor may be from its expectation, by the norm of the whole tensor.

    Without `angle`: `||actual - expected|| <= absolute + relative * ||expected||`.
    With `angle`, for dtypes whose rounding spoils single elements: `1 - cos(actual, expected) <= angle` and
    `abs(||actual|| - ||expected||) <= absolute + relative * ||expected||`.
    """

    relative: float = 0.0
    absolute: float = 0.0
    angle: float | None = None


TOLERANCES: dict[torch.dtype, dict[Kind, Tolerance]] = {
    torch.float64: {
        Kind.GRADIENT: Tolerance(relative=1e-10),
        Kind.OUTPUT: Tolerance(relative=1e-10),
        Kind.LOSS: Tolerance(relative=1e-10),
    },
    torch.float32: {
        Kind.GRADIENT: Tolerance(relative=1e-5),
        Kind.OUTPUT: Tolerance(relative=1e-4),
        Kind.LOSS: Tolerance(absolute=1e-4),
    },
    torch.bfloat16: {
        Kind.GRADIENT: Tolerance(angle=0.01, absolute=3e-4, relative=0.05),
        Kind.OUTPUT: Tolerance(relative=2e-2),
        Kind.LOSS: Tolerance(absolute=1e-4, relative=1e-3),
    },
}


def tolerance_for(kind: Kind, *dtypes: torch.dtype) -> Tolerance:
    """The table's entry for the coarsest of `dtypes`."""
    coarsest = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
    return TOLERANCES[coarsest][kind]
