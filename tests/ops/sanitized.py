"""Runs each op once at small, odd sizes, for a tool that watches every access of kernels to memory: `nox -s sanitizer`.

That turns the cache of memory off: each tensor is an allocation of its own, and what lies outside of it is nobody's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from tests.benchmarks.op_case import Inputs, OpCase, Sizes
from tests.benchmarks.op_cases import op_cases
from tests.benchmarks.ops import OURS, Contender

ODD = Sizes(
    batch=1,
    seq=37,
    documents=3,
    hidden=72,
    heads=4,
    kv_heads=2,
    head_dim=64,
    experts=5,
    top_k=3,
    width=40,
    vocab=131,
    layers=1,
    rounded=1003,
)
SIZES = {
    "odd": ODD,
    "odd, float32": replace(ODD, dtype=torch.float32),
    "one token": replace(ODD, seq=1, documents=1, rounded=1),
    "more than a block": replace(
        ODD, batch=3, seq=257, hidden=1032, head_dim=128, experts=9, width=136, vocab=5003, rounded=70_001
    ),
}


def sanitized_cases() -> Iterator[tuple[str, OpCase]]:
    """What is run, with a name."""
    for name, sizes in SIZES.items():
        for case in op_cases(sizes):
            yield f"{case.name}, {name}", case


def run(case: OpCase, device: torch.device) -> list[Tensor]:
    """Results and gradients, when the device is done with them."""
    generator = torch.Generator(device).manual_seed(0)
    values = Contender(case, OURS, [case.inputs(Inputs(device, case.dtype, generator))], generator).prepare(0)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return values


if __name__ == "__main__":
    for name, case in sanitized_cases():
        run(case, torch.device("cuda"))
        print(name, flush=True)
