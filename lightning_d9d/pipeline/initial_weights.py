"""The slice of a tensor's initial value that a rank holds, drawn without the rest."""

from __future__ import annotations

import itertools
import math
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from lightning_d9d.mesh.seeds import derived
from lightning_d9d.mesh.sharding import local_ranges

ROWS_PER_BLOCK = 16  # part of what a seed means: another number gives other weights


class InitialValue(Protocol):
    """A distribution whose rows are independent, such as `lightning_d9d.modules.Normal`."""

    def draw(self, generator: np.random.Generator, shape: tuple[int, int]) -> Tensor:
        """A block of rows, float32 on the CPU."""
        ...


def draw_local(value: InitialValue, tensor: Tensor, *, seed: int, name: str) -> Tensor:
    """What this rank holds of a tensor's initial value, on the CPU in the tensor's dtype. Local.

    A tensor `[..., rows, columns]` is a stack of matrices (experts, say); a vector is one row. Each matrix is cut into
    blocks of `ROWS_PER_BLOCK` rows, and each block has a random stream of its own: Philox
    (https://doi.org/10.1145/2063384.2063405) with the hash of seed and name as key, counting from (matrix, block).
    Blocks that this rank has no row of are not drawn.

    Args:
        value: What it is drawn from.
        tensor: Says shape, dtype and placements; may be on the meta device.
        seed: Of the job.
        name: Of the tensor in the whole model.
    """
    ranges = local_ranges(tensor)
    local = torch.empty([len(r) for r in ranges], dtype=tensor.dtype, device="cpu")
    if local.numel() == 0:
        return local
    num_rows, num_columns = (1, 1, *tensor.shape)[-2:]
    *stack, rows, columns = (range(1), range(1), *ranges)[-max(2, len(ranges)) :]
    key = derived(seed, name, bits=128)
    matrices = local.view(-1, len(rows), len(columns))
    for matrix, place in zip(matrices, itertools.product(*stack), strict=True):
        index = 0
        for step, size in zip(place, tensor.shape, strict=False):
            index = index * size + step
        for block in range(rows.start // ROWS_PER_BLOCK, math.ceil(rows.stop / ROWS_PER_BLOCK)):
            first, last = block * ROWS_PER_BLOCK, min((block + 1) * ROWS_PER_BLOCK, num_rows)
            generator = np.random.Generator(np.random.Philox(key=key, counter=[0, block, index, 0]))
            drawn = value.draw(generator, (last - first, num_columns))
            top, bottom = max(first, rows.start), min(last, rows.stop)
            matrix[top - rows.start : bottom - rows.start] = drawn[
                top - first : bottom - first, columns.start : columns.stop
            ]
    return local
