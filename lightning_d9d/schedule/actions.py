"""The actions a program is made of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Forward:
    """Run the forward of `stage` on `microbatch`; on the last stage also its loss. Printed as `0F3`."""

    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}F{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Backward:
    """Run the whole backward (inputs and weights) of `stage` on `microbatch`. Printed as `0B3`."""

    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}B{self.microbatch}"


Action = Forward | Backward
Program = tuple[Action, ...]
