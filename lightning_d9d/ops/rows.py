"""How kernels that process rows, the last dim of a tensor, read and distribute them, on the host."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

HOPPER_SHARED_MEMORY = 227 * 1024
"""Bytes of shared memory that a program can have on Hopper, and in Triton's interpreter, which has no limit."""
_LEAST_OF_PRODUCTS = 16
"""The fewest rows and columns of a product that tensor cores support; the others are zero."""
_PROGRAMS_A_PROCESSOR = 4
"""Number of programs that fit on a multiprocessor at a time: some compute while others wait for memory."""
_PROGRAMS_ON_CPU = 3
"""Number of programs in Triton's interpreter, one after the other; several, so that tests cover the addition of their
sums."""


def rows_of(tensor: Tensor) -> Tensor:
    """Return shape `[rows, columns]`, with adjacent elements in a row: a view if strides allow it, else a copy."""
    rows = tensor if tensor.dim() == 2 else tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def ceil_div(number: int, divisor: int) -> int:
    """Return the quotient, rounded up, like `triton.cdiv`, which takes far longer on the host."""
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    """Return the lowest power of 2 that is not less than `number`, 1 or more, like `triton.next_power_of_2`."""
    return 1 << (number - 1).bit_length()


def padded_for_products(length: int) -> int:
    """Return the lowest length, not less than this one, that a dim of a product in a kernel may have."""
    return max(_LEAST_OF_PRODUCTS, next_power_of_2(length))


def num_programs(num_tiles: int, device: torch.device, a_processor: int = _PROGRAMS_A_PROCESSOR) -> int:
    """Return the number of programs that share tiles of rows, each with its own partial sum; equal on equal devices.

    `a_processor` is how many run there at a time, limited by their registers; further ones would begin when these end.
    """
    most = _PROGRAMS_ON_CPU if device.type == "cpu" else a_processor * _num_processors(device)
    return min(num_tiles, most)


def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a program can have."""
    return HOPPER_SHARED_MEMORY if device.type == "cpu" else gpu_properties(device).shared_memory_per_block_optin


def _num_processors(device: torch.device) -> int:
    return gpu_properties(device).multi_processor_count


@cache
def gpu_properties(device: torch.device) -> Any:
    """Return the properties of a GPU; of the current one for tensors without values, see [Note: compiling ahead]."""
    current = None
    return torch.cuda.get_device_properties(device if device.type == "cuda" else current)
