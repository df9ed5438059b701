"""A kernel that fills memory with normal values by place."""
# pyright: reportCallIssue=false, reportArgumentType=false, reportInvalidTypeForm=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_d9d.ops.kernels.compiling import jit
from lightning_d9d.ops.places import FACTORS, MEAN, ROUNDS, STEPS, WORD, Runs
from lightning_d9d.ops.rows import ceil_div

_BLOCK = 512
"""Calls of Philox in a program: four for each thread of four warps, so that independent products overlap. About 350
instructions compute four values, so computation limits the time, not memory.
"""
_ROUNDS = tl.constexpr(ROUNDS)
_FACTOR0, _FACTOR1 = tl.constexpr(FACTORS[0]), tl.constexpr(FACTORS[1])
_STEP0, _STEP1 = tl.constexpr(STEPS[0]), tl.constexpr(STEPS[1])
_MEAN = tl.constexpr(MEAN)


def fill_normal(target: Tensor, scale: float, key: int, runs: Runs) -> None:
    """Fill `target` with the values of its places: contiguous, not empty, in float32, float16 or bfloat16."""
    calls = (runs.length + 6) // 4  # the most calls that the words of a run come from, for any beginning
    is_bfloat16 = target.dtype == torch.bfloat16
    with torch.cuda.device_of(target):
        _fill[(ceil_div(runs.num_runs * calls, _BLOCK),)](
            target.view(torch.int16) if is_bfloat16 else target,
            *runs,
            calls,
            key & WORD,
            key >> 64,
            scale,
            is_bfloat16,
            _BLOCK,
            num_warps=4,
            enable_fp_fusion=False,  # nothing to fuse, and it stays so
        )


@jit(do_not_specialize=["first", "stride", "length", "num_runs", "calls", "key0", "key1"])
def _fill(
    target_ptr,
    first: tl.int64,
    stride: tl.int64,
    length: tl.int64,
    num_runs: tl.int64,
    calls: tl.int64,
    key0: tl.uint64,
    key1: tl.uint64,
    scale: tl.float32,
    IS_BFLOAT16: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = index // calls
    start = first + row * stride  # of the run, in the whole tensor
    call = start // 4 + index % calls
    column = call * 4 - start
    w0, w1, w2, w3 = _philox((call + 1).to(tl.uint64), key0.to(tl.uint64), key1.to(tl.uint64))
    row_ptr = target_ptr + row * length
    end = tl.where(row < num_runs, length, 0)
    _store(row_ptr, column, end, w0, scale, IS_BFLOAT16)
    _store(row_ptr, column + 1, end, w1, scale, IS_BFLOAT16)
    _store(row_ptr, column + 2, end, w2, scale, IS_BFLOAT16)
    _store(row_ptr, column + 3, end, w3, scale, IS_BFLOAT16)


@triton.jit
def _philox(c0, k0, k1):
    """Return four words, which `lightning_d9d.ops.places` returns one by one."""
    c1, c2, c3 = tl.zeros_like(c0), tl.zeros_like(c0), tl.zeros_like(c0)
    for _ in tl.static_range(_ROUNDS):  # type: ignore[misc]
        high0, high2 = tl.umulhi(c0, _FACTOR0), tl.umulhi(c2, _FACTOR1)
        low0, low2 = c0 * _FACTOR0, c2 * _FACTOR1
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, low2, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + _STEP0, k1 + _STEP1
    return c0, c1, c2, c3


@triton.jit
def _store(row_ptr, column, end, word, scale, IS_BFLOAT16: tl.constexpr):
    low, ones = word.to(tl.uint32), (word >> 32).to(tl.uint32)
    ones = ones - (ones >> 1 & 0x55555555)  # number of ones in 2, 4, 8, 16 and 32 bits
    ones = (ones & 0x33333333) + (ones >> 2 & 0x33333333)
    ones = ones + (ones >> 4) & 0x0F0F0F0F
    ones = ones + (ones >> 8)
    ones = ones + (ones >> 16) & 0x3F
    total = (ones << 16) + (low & 0xFFFF) + (low >> 16)
    value = (total.to(tl.int32) - _MEAN).to(tl.float32) * scale
    if IS_BFLOAT16:  # to the nearest, to the even one of two
        bits = value.to(tl.uint32, bitcast=True)
        value = (bits + 0x7FFF + (bits >> 16 & 1) >> 16).to(tl.int16)
    tl.store(row_ptr + column, value, mask=(column >= 0) & (column < end))
