"""Kernel of AdamW for many tensors whose states are in eight bits.

A program works on blocks of 32 places, each in two threads of 16 places.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from lightning_d9d.ops.eight_bits import AVERAGE, BLOCK, CUT, LEAST_SQUARE, SQUARE
from lightning_d9d.ops.kernels.compiling import jit
from lightning_d9d.ops.kernels.stochastic import _index, _philox, _pointer, _store, _widened, _words
from lightning_d9d.ops.philox import OTHER_SPREAD, SPREAD

_BLOCKS = 32
"""Number of blocks that AdamW updates at a time."""
_WARPS = 2
CHUNK = 16 * _BLOCKS
"""Number of blocks that a program updates."""
COLUMNS = 11
"""Numbers of a part in the table."""
_BLOCK = tl.constexpr(BLOCK)
_CUT, _NOT_CUT, _LOWER = tl.constexpr(CUT), tl.constexpr(32 - CUT), tl.constexpr(2**CUT - 1)
_COLUMNS = tl.constexpr(COLUMNS)
_SPREAD = tl.constexpr(SPREAD)
_OTHER_SPREAD = tl.constexpr(OTHER_SPREAD)
_LEAST = tl.constexpr(LEAST_SQUARE)
_ROOM_OF_AVERAGE, _BELOW_OF_AVERAGE, _MOST_OF_AVERAGE = map(tl.constexpr, AVERAGE)
_ROOM_OF_SQUARE, _BELOW_OF_SQUARE, _MOST_OF_SQUARE = map(tl.constexpr, SQUARE)
_INTERPRETED = tl.constexpr(knobs.runtime.interpret)
"""The interpreter lacks the device's approximations, from which the exact results are computed."""


def adamw(
    parts: Tensor,
    gradients: Tensor,
    chunks: Tensor,
    scalars: Tensor,
    found_inf: Tensor | None,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    betas: tuple[float, float],
    eps: float,
    seed: int,
) -> None:
    """Update all tensors of a table, like `lightning_d9d.ops.kernels.stochastic.adamw`.

    Args:
        parts: Int64 `[parts, 11]`. The addresses of parameter, exp_avg, exp_avg_sq and the scales of both come first.
            The row of `scalars` and the number of elements follow, then the `first`, `length` and `stride` of `Block`,
            and the length of its rows.
        gradients: Int64 `[parts]`, addresses.
        chunks: Int32 `[chunks, 2]`: a part, and the index of `CHUNK` blocks in it.
        scalars: The same settings as for that function.
        found_inf: The same.
        dtypes: The same.
        betas: The same.
        eps: The same.
        seed: The same.
    """
    _adamw[(len(chunks),)](
        parts,
        gradients,
        chunks,
        scalars,
        found_inf,
        seed,
        betas[1],
        1 - betas[0],
        1 - betas[1],
        eps,
        dtypes[0] == torch.float32,
        dtypes[1] == torch.float32,
        CHUNK,
        _BLOCKS,
        num_warps=_WARPS,  # type: ignore[call-arg]
        enable_fp_fusion=False,  # type: ignore[call-arg]  # as torch rounds on the CPU
    )


@triton.jit
def _as_float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _as_bits(values):
    return values.to(tl.int32, bitcast=True)


@triton.jit
def _root(values):
    """Compute square roots of normal numbers, rounded to nearest, like `tl.sqrt_rn` without its branches."""
    if _INTERPRETED:
        return tl.sqrt_rn(values)
    else:
        inverse = tl.inline_asm_elementwise(
            "rsqrt.approx.ftz.f32 $0, $1;", "=f,f", [values], dtype=tl.float32, is_pure=True, pack=1
        )
        root = values * inverse
        return tl.fma(tl.fma(-root, root, values), inverse * 0.5, root)


@triton.jit
def _quotient(numerator, denominator):
    """Compute quotients, rounded to nearest if they are normal numbers, like `tl.div_rn` without its branches."""
    if _INTERPRETED:
        return tl.div_rn(numerator, denominator)
    else:
        inverse = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [denominator], dtype=tl.float32, is_pure=True, pack=1
        )
        inverse = tl.fma(tl.fma(-denominator, inverse, 1.0), inverse, inverse)
        quotient = numerator * inverse
        return tl.fma(tl.fma(-denominator, quotient, numerator), inverse, quotient)


@triton.jit
def _bases(magnitudes, ROOM: tl.constexpr, BELOW: tl.constexpr, MOST: tl.constexpr):
    """Compute the scales of blocks."""
    largest = _as_bits(tl.max(magnitudes, axis=1))
    return tl.minimum(tl.maximum(((largest + ROOM) >> 23) - BELOW, 1), MOST)


@jit(do_not_specialize=["seed"])
def _adamw(
    parts, gradients, chunks, scalars, found_inf, seed,
    beta2, one_minus_beta1, one_minus_beta2, eps,
    WIDE_PARAMETER: tl.constexpr, WIDE_GRADIENT: tl.constexpr, CHUNK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    if found_inf is not None:  # noqa: SIM102  # this is decided when it is compiled
        if tl.load(found_inf) != 0:
            return
    chunk = chunks + tl.program_id(0).to(tl.int64) * 2
    part = tl.load(chunk).to(tl.int64)
    begin = tl.load(chunk + 1).to(tl.int64) * CHUNK
    gradient = tl.load(gradients + part)
    parts += part * _COLUMNS
    parameter, exp_avg, exp_avg_sq = tl.load(parts), tl.load(parts + 1), tl.load(parts + 2)
    avg_scale, sq_scale = tl.load(parts + 3), tl.load(parts + 4)
    scalars += tl.load(parts + 5) * 5
    size, first = tl.load(parts + 6), tl.load(parts + 7)
    length, stride, columns = tl.load(parts + 8), tl.load(parts + 9), tl.load(parts + 10)
    step_size, inverse_root = tl.load(scalars), tl.load(scalars + 1)
    decay, unscale = tl.load(scalars + 2), tl.load(scalars + 3)
    key0, key1 = seed.to(tl.uint32), tl.load(scalars + 4).to(tl.uint32)
    is_sliced = length < size  # the rows are parts of longer ones
    has_blocks = (first % _BLOCK == 0) & ((not is_sliced) | (stride % _BLOCK == 0))  # in the whole tensor
    is_aligned = ((parameter | gradient | exp_avg | exp_avg_sq) & 15) == 0
    of_row = (columns + _BLOCK - 1) // _BLOCK
    count = size // columns * of_row
    places, blocks = tl.arange(0, _BLOCK)[None, :], tl.arange(0, BLOCKS)
    if is_aligned & has_blocks & (columns % _BLOCK == 0) & (begin + CHUNK <= count):  # nearly all: nothing is masked
        for near in range(0, CHUNK, BLOCKS):
            index = _index((begin + near) * _BLOCK, blocks * _BLOCK, first, length, stride, is_sliced)
            low = (index >> 2).to(tl.uint32)[:, None] | tl.arange(0, _BLOCK // 4)[None, :].to(tl.uint32)
            high = tl.broadcast_to((index >> 34).to(tl.uint32)[:, None], [BLOCKS, _BLOCK // 4])
            w0, w1, w2, w3 = _philox(low, high, tl.zeros_like(low), tl.zeros_like(low), key0, key1)
            words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [BLOCKS, _BLOCK])
            offsets = near * _BLOCK + blocks[:, None] * _BLOCK + places
            _update(
                tl.multiple_of(_pointer(parameter, WIDE_PARAMETER) + begin * _BLOCK, 16) + offsets,
                tl.multiple_of(_pointer(gradient, WIDE_GRADIENT) + begin * _BLOCK, 16) + offsets,
                tl.multiple_of(exp_avg.to(tl.pointer_type(tl.uint8)) + begin * _BLOCK, 16) + offsets,
                tl.multiple_of(exp_avg_sq.to(tl.pointer_type(tl.uint8)) + begin * _BLOCK, 16) + offsets,
                avg_scale.to(tl.pointer_type(tl.uint8)) + begin + near + blocks,
                sq_scale.to(tl.pointer_type(tl.uint8)) + begin + near + blocks,
                None,
                None,
                words,
                step_size, inverse_root, decay, unscale, beta2, one_minus_beta1, one_minus_beta2, eps, WIDE_PARAMETER,
            )  # fmt: skip
    else:
        few = tl.arange(0, BLOCKS // 4)
        for at in range(begin, tl.minimum(begin + CHUNK, count), BLOCKS // 4):
            number = at + few
            column = (number % of_row)[:, None] * _BLOCK + places
            offsets = (number // of_row)[:, None] * columns + column
            is_block = number < count
            mask = is_block[:, None] & (column < columns)
            index = first + offsets // length * stride + offsets % length
            w0, w1, w2, w3 = _words(index // 4, key0, key1)
            words = tl.where(index % 2 == 0, tl.where(index % 4 == 0, w0, w2), tl.where(index % 4 == 1, w1, w3))
            _update(
                _pointer(parameter, WIDE_PARAMETER) + offsets,
                _pointer(gradient, WIDE_GRADIENT) + offsets,
                exp_avg.to(tl.pointer_type(tl.uint8)) + offsets,
                exp_avg_sq.to(tl.pointer_type(tl.uint8)) + offsets,
                avg_scale.to(tl.pointer_type(tl.uint8)) + number,
                sq_scale.to(tl.pointer_type(tl.uint8)) + number,
                mask,
                is_block,
                words,
                step_size, inverse_root, decay, unscale, beta2, one_minus_beta1, one_minus_beta2, eps, WIDE_PARAMETER,
            )  # fmt: skip


@triton.jit
def _load(pointer, mask):
    if mask is None:
        return tl.load(pointer)
    else:
        return tl.load(pointer, mask=mask, other=0)


@triton.jit
def _update(
    parameter,
    gradient,
    exp_avg,
    exp_avg_sq,
    avg_scale,
    sq_scale,
    mask,
    is_block,
    words,
    step_size,
    inverse_root,
    decay,
    unscale,
    beta2,
    one_minus_beta1,
    one_minus_beta2,
    eps,
    WIDE_PARAMETER: tl.constexpr,
):
    m_base = (_load(avg_scale, is_block).to(tl.int32) << 23)[:, None]
    v_base = (_load(sq_scale, is_block).to(tl.int32) << 23)[:, None]
    p = _widened(_load(parameter, mask))
    g = _widened(_load(gradient, mask))
    m_code = _load(exp_avg, mask).to(tl.int32)
    v_code = _load(exp_avg_sq, mask).to(tl.int32)
    words += g.to(tl.uint32, bitcast=True) * _SPREAD + p.to(tl.uint32, bitcast=True) * _OTHER_SPREAD
    m = _as_float(((m_code & 127) << _CUT) + m_base) - _as_float(m_base)
    m = _as_float(_as_bits(m) | (m_code >> 7 << 31))
    v = _as_float((v_code << _CUT) + v_base)
    g = g * unscale
    m = m + (g - m) * one_minus_beta1
    v = tl.maximum(v * beta2 + g * g * one_minus_beta2, _LEAST)
    p = p * decay - _quotient(m, _root(v) * inverse_root + eps) * step_size
    _store(parameter, p, words >> 16, mask, WIDE_PARAMETER)
    m_scale = _bases(tl.abs(m), _ROOM_OF_AVERAGE, _BELOW_OF_AVERAGE, _MOST_OF_AVERAGE)
    v_scale = _bases(v, _ROOM_OF_SQUARE, _BELOW_OF_SQUARE, _MOST_OF_SQUARE)
    m_base, v_base = (m_scale << 23)[:, None], (v_scale << 23)[:, None]
    m_random = (words & _LOWER).to(tl.int32, bitcast=True)
    v_random = ((words * _SPREAD) >> _NOT_CUT).to(tl.int32, bitcast=True)
    m_code = (_as_bits(tl.abs(m) + _as_float(m_base)) - m_base + m_random) >> _CUT
    m_code |= (_as_bits(m) >> 24) & 128
    v_code = tl.maximum(_as_bits(v) - v_base + v_random, 0) >> _CUT
    tl.store(exp_avg, m_code.to(tl.uint8), mask=mask)
    tl.store(exp_avg_sq, v_code.to(tl.uint8), mask=mask)
    tl.store(avg_scale, m_scale.to(tl.uint8), mask=is_block)
    tl.store(sq_scale, v_scale.to(tl.uint8), mask=is_block)
