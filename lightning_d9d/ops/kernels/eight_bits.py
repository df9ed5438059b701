"""Kernel of AdamW for many tensors whose states are in eight bits.

[Note: octets] A GPU that reads 4 TB/s has time for about 75 instructions for each element. So the kernel must run few,
and must not wait for memory. A thread works on 8 consecutive places of a row, an *octet*: 16 bytes of bfloat16 and one
call of Philox. It reads and writes whole words of 64 bits, and each place of an octet is a tensor of its own.
So a tensor has one element for each thread, and only the largest magnitudes of a block are exchanged between threads. A
program is one warp, so that it waits for no other one. The compiler loads late, to keep few registers, so the next
octets are fetched into the L2 cache ahead. The kernel runs about 54 instructions for each element. Codes are decoded
and encoded as pairs of 16 bits: places 0 and 2 of each four, and 1 and 3. `ops/kernels/words.py` has such steps.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_d9d.ops.eight_bits import AVERAGE, BLOCK, CUT, LEAST_SQUARE, SQUARE
from lightning_d9d.ops.kernels.compiling import jit
from lightning_d9d.ops.kernels.stochastic import _index, _philox, _pointer, _store, _widened
from lightning_d9d.ops.kernels.words import (
    _above,
    _as_bits,
    _as_float,
    _as_word,
    _codes,
    _difference,
    _fetch,
    _fma,
    _four_upper_bytes,
    _joined,
    _pairs,
    _quotient,
    _raised_value,
    _root,
    _split,
    _upper_halves,
)
from lightning_d9d.ops.philox import OTHER_SPREAD, SPREAD

_BLOCKS = 8
"""Number of blocks that AdamW updates at a time, each in four threads."""
_WARPS = 1
CHUNK = 128
"""Number of blocks that a program updates: so many that reading the tables costs little."""
COLUMNS = 11
"""Numbers of a part in the table."""
_BLOCK = tl.constexpr(BLOCK)
_CUT, _NOT_CUT, _LOWER = tl.constexpr(CUT), tl.constexpr(32 - CUT), tl.constexpr(2**CUT - 1)
_COLUMNS = tl.constexpr(COLUMNS)
_SPREAD = tl.constexpr(SPREAD)
_OTHER_SPREAD = tl.constexpr(OTHER_SPREAD)
_UPPER = tl.constexpr(0xFFFF0000)
_OCTETS = tl.constexpr(BLOCK // 8)
_LEAST = tl.constexpr(LEAST_SQUARE)
_ROOM_OF_AVERAGE, _BELOW_OF_AVERAGE, _MOST_OF_AVERAGE = map(tl.constexpr, AVERAGE)
_ROOM_OF_SQUARE, _BELOW_OF_SQUARE, _MOST_OF_SQUARE = map(tl.constexpr, SQUARE)


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
        *betas,
        1 - betas[0],
        math.sqrt(1 - betas[1]),
        eps,
        dtypes[0] == torch.float32,
        dtypes[1] == torch.float32,
        CHUNK,
        _BLOCKS,
        num_warps=_WARPS,  # type: ignore[call-arg]
        enable_fp_fusion=False,  # type: ignore[call-arg]  # as torch rounds on the CPU
    )


@triton.jit
def _load_words(pointer):
    """Load four words of 32 bits."""
    low, high = tl.split(tl.load(pointer[:, None] + tl.arange(0, 2)))
    return _split(low) + _split(high)


@triton.jit
def _store_words(pointer, words):
    """Store four words of 32 bits."""
    pairs = tl.join(_joined(words[0], words[1]), _joined(words[2], words[3]))
    tl.store(pointer[:, None] + tl.arange(0, 2), pairs)


@triton.jit
def _load_octet(address, WIDE: tl.constexpr):
    """Load octets at addresses: float32, or bfloat16 as float32.

    Returns:
        The sum of the values' bits, those of even places shifted right by 16, and the values.
    """
    pointer = tl.multiple_of(address.to(tl.pointer_type(tl.int64)), 16)
    values = ()
    if WIDE:
        words = _load_words(pointer) + _load_words(pointer + 2)
        for place in tl.static_range(8):  # type: ignore[misc]
            values += (_as_float(words[place]),)
        odd = words[1] + words[3] + words[5] + words[7]
        return (words[0] >> 16) + (words[2] >> 16) + (words[4] >> 16) + (words[6] >> 16) + odd, values
    else:
        words = _load_words(pointer)
        for pair in tl.static_range(4):  # type: ignore[misc]
            values += (_as_float(words[pair] << 16), _as_float(words[pair] & _UPPER))
        return words[0] + words[1] + words[2] + words[3], values


@triton.jit
def _store_octet(address, values, random, WIDE: tl.constexpr):
    """Store values of octets as float32, or rounded by the upper 16 bits of random words."""
    pointer = tl.multiple_of(address.to(tl.pointer_type(tl.int64)), 16)
    words = ()
    if WIDE:
        for place in tl.static_range(8):  # type: ignore[misc]
            words += (_as_word(values[place]),)
        _store_words(pointer, words[:4])
        _store_words(pointer + 2, words[4:])
    else:
        for place in tl.static_range(0, 8, 2):  # type: ignore[misc]
            first = _raised_value(values[place], random[place])
            words += (_upper_halves(first, _raised_value(values[place + 1], random[place + 1])),)
        _store_words(pointer, words)


@triton.jit
def _averages(word, base):
    """Decode a word of four codes of averages; `base` has the upper half of the scale's number twice."""
    even, odd = _pairs(word, 0x007F007F, base)
    even = _difference(even, base) | ((word << 8) & 0x80008000)
    odd = _difference(odd, base) | (word & 0x80008000)
    return _as_float(even << 16), _as_float(odd << 16), _as_float(even & _UPPER), _as_float(odd & _UPPER)


@triton.jit
def _squares(word, base):
    """Decode a word of four codes of squares."""
    even, odd = _pairs(word, 0x00FF00FF, base)
    return _as_float(even << 16), _as_float(odd << 16), _as_float(even & _UPPER), _as_float(odd & _UPPER)


@triton.jit
def _raised_average(value, base, random):
    """Add random bits to an average, of which the code then has the bits above."""
    return (_as_bits(tl.abs(value) + _as_float(base)) - base).to(tl.uint32, bitcast=True) + (random & _LOWER)


@triton.jit
def _raised_square(bits, random):
    """Add random bits to a square, of which the code then has the bits above."""
    return bits.to(tl.uint32, bitcast=True) + ((random * _SPREAD) >> _NOT_CUT)


@triton.jit
def _average_codes(values, base, random):
    """Encode four averages in a word."""
    even = _upper_halves(_raised_average(values[0], base, random[0]), _raised_average(values[2], base, random[2]))
    odd = _upper_halves(_raised_average(values[1], base, random[1]), _raised_average(values[3], base, random[3]))
    signs = _four_upper_bytes(_as_word(values[0]), _as_word(values[1]), _as_word(values[2]), _as_word(values[3]))
    return _codes(even, odd) | (signs & 0x80808080)  # type: ignore[operator]


@triton.jit
def _square_codes(bits, base, random):
    """Encode four squares in a word; `base` is that of `_squares`."""
    even = _upper_halves(_raised_square(bits[0], random[0]), _raised_square(bits[2], random[2]))
    odd = _upper_halves(_raised_square(bits[1], random[1]), _raised_square(bits[3], random[3]))
    return _codes(_above(even, base), _above(odd, base))


@triton.jit
def _twice(scale):
    """Put the upper half of a scale's number into both halves of a word."""
    return scale.to(tl.uint32) * 0x00800080


@triton.jit
def _updated(p, g, m, v, factors):
    """Compute a step of AdamW."""
    minus_step, inverse_root, decay, of_average, of_square, beta1, beta2, eps = factors
    m = _fma(g, of_average, m * beta1)
    root = g * of_square
    v = _fma(root, root, _fma(v, beta2, _LEAST))
    return _fma(_quotient(m, _fma(_root(v), inverse_root, eps)), minus_step, p * decay), m, v


@triton.jit
def _scales(largest, ROOM: tl.constexpr, BELOW: tl.constexpr, MOST: tl.constexpr):
    """Compute scales from the bits of the largest magnitudes."""
    return tl.minimum(tl.maximum(((largest + ROOM) >> 23) - BELOW, 1), MOST)


@triton.jit
def _store_scales(avg_scale, sq_scale, m_largest, v_largest, mask):
    """Compute the scales of averages and squares, store them, and return them."""
    m_scale = _scales(m_largest, _ROOM_OF_AVERAGE, _BELOW_OF_AVERAGE, _MOST_OF_AVERAGE)
    v_scale = _scales(v_largest, _ROOM_OF_SQUARE, _BELOW_OF_SQUARE, _MOST_OF_SQUARE)
    tl.store(avg_scale, m_scale.to(tl.uint8), mask=mask)
    tl.store(sq_scale, v_scale.to(tl.uint8), mask=mask)
    return m_scale, v_scale


@triton.jit
def _largest_of_blocks(values):
    """Replace the values of octets by the largest ones of their blocks."""
    largest = values[0]
    for place in tl.static_range(1, 8):  # type: ignore[misc]
        largest = tl.maximum(largest, values[place])
    of_blocks = tl.reshape(largest, [largest.shape[0] // _OCTETS, _OCTETS])
    of_octets = tl.broadcast_to(tl.expand_dims(tl.max(of_blocks, axis=1), 1), of_blocks.shape)
    return tl.reshape(of_octets, largest.shape)


@jit(do_not_specialize=["seed"])
def _adamw(
    parts, gradients, chunks, scalars, found_inf, seed,
    beta1, beta2, one_minus_beta1, root_of_rest, eps,
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
    of_average, of_square = unscale * one_minus_beta1, unscale * root_of_rest
    factors = (-step_size, inverse_root, decay, of_average, of_square, beta1, beta2, eps)
    key0, key1 = seed.to(tl.uint32), tl.load(scalars + 4).to(tl.uint32)
    is_sliced = length < size  # the rows are parts of longer ones
    has_blocks = (first % _BLOCK == 0) & ((not is_sliced) | (stride % _BLOCK == 0))  # in the whole tensor
    is_aligned = ((parameter | gradient | exp_avg | exp_avg_sq) & 15) == 0
    of_row = (columns + _BLOCK - 1) // _BLOCK
    end = tl.minimum(begin + CHUNK, size // columns * of_row)
    avg_scale, sq_scale = avg_scale.to(tl.pointer_type(tl.uint8)), sq_scale.to(tl.pointer_type(tl.uint8))
    if is_aligned & has_blocks & (columns % _BLOCK == 0):  # nearly all: nothing is masked
        octets, whole = tl.arange(0, BLOCKS * _OCTETS), (end - begin) // BLOCKS * BLOCKS
        start, OCTETS = begin * _OCTETS + octets, BLOCKS * _OCTETS
        OF_PARAMETER, OF_GRADIENT = 32 if WIDE_PARAMETER else 16, 32 if WIDE_GRADIENT else 16
        p_at, g_at = parameter + start * OF_PARAMETER, gradient + start * OF_GRADIENT
        m_at, v_at = exp_avg + start * 8, exp_avg_sq + start * 8
        m_scale, v_scale = avg_scale + start // _OCTETS, sq_scale + start // _OCTETS
        for near in range(0, whole, BLOCKS):
            index = _index((begin + near) * _BLOCK, octets * 8, first, length, stride, is_sliced)
            has_next = (near + BLOCKS < whole).to(tl.int32)
            _fetch(p_at + OCTETS * OF_PARAMETER, has_next)
            _fetch(g_at + OCTETS * OF_GRADIENT, has_next)
            _fetch(m_at + OCTETS * 8, has_next)
            _fetch(v_at + OCTETS * 8, has_next)
            _update_octets(
                p_at,
                g_at,
                m_at,
                v_at,
                m_scale,
                v_scale,
                octets % _OCTETS == 0,
                index,
                key0,
                key1,
                factors,
                WIDE_PARAMETER,
                WIDE_GRADIENT,
            )
            p_at, g_at = p_at + OCTETS * OF_PARAMETER, g_at + OCTETS * OF_GRADIENT
            m_at, v_at = m_at + OCTETS * 8, v_at + OCTETS * 8
            m_scale, v_scale = m_scale + BLOCKS, v_scale + BLOCKS
        begin += whole
    memory = (parameter, gradient, exp_avg, exp_avg_sq, avg_scale, sq_scale)
    layout = (first, length, stride, columns, of_row)
    _update_rest(begin, end, memory, layout, (key0, key1), factors, WIDE_PARAMETER, WIDE_GRADIENT, BLOCKS // 2)


@triton.jit
def _update_rest(
    begin, end, memory, layout, key, factors,
    WIDE_PARAMETER: tl.constexpr, WIDE_GRADIENT: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Update blocks that `_update_octets` cannot: of any length and in any place."""
    parameter, gradient, exp_avg, exp_avg_sq, avg_scale, sq_scale = memory
    first, length, stride, columns, of_row = layout
    few, places = tl.arange(0, BLOCKS), tl.arange(0, _BLOCK)[None, :]
    for at in range(begin, end, BLOCKS):
        number = at + few
        column = (number % of_row)[:, None] * _BLOCK + places
        offsets = (number // of_row)[:, None] * columns + column
        is_block = number < end
        mask = is_block[:, None] & (column < columns)
        index = first + offsets // length * stride + offsets % length
        _update(
            _pointer(parameter, WIDE_PARAMETER) + offsets,
            _pointer(gradient, WIDE_GRADIENT) + offsets,
            exp_avg.to(tl.pointer_type(tl.uint8)) + offsets,
            exp_avg_sq.to(tl.pointer_type(tl.uint8)) + offsets,
            avg_scale + number,
            sq_scale + number,
            mask,
            is_block,
            places,
            index - places % 8,
            key[0],
            key[1],
            factors,
            WIDE_PARAMETER,
        )


@triton.jit
def _update_octets(
    parameter,
    gradient,
    exp_avg,
    exp_avg_sq,
    avg_scale,
    sq_scale,
    is_first,
    index,
    key0,
    key1,
    factors,
    WIDE_PARAMETER: tl.constexpr,
    WIDE_GRADIENT: tl.constexpr,
):
    """Update whole blocks. [Note: octets]."""
    m_base, v_base = _twice(tl.load(avg_scale)), _twice(tl.load(sq_scale))
    p_words, p = _load_octet(parameter, WIDE_PARAMETER)
    g_words, g = _load_octet(gradient, WIDE_GRADIENT)
    exp_avg = tl.multiple_of(exp_avg.to(tl.pointer_type(tl.int64)), 8)
    exp_avg_sq = tl.multiple_of(exp_avg_sq.to(tl.pointer_type(tl.int64)), 8)
    m_codes, v_codes = _split(tl.load(exp_avg)), _split(tl.load(exp_avg_sq))
    m = _averages(m_codes[0], m_base) + _averages(m_codes[1], m_base)
    v = _squares(v_codes[0], v_base) + _squares(v_codes[1], v_base)
    words = _philox(index.to(tl.uint32), (index >> 32).to(tl.uint32), p_words, g_words, key0, key1)
    values = ()
    averages = ()
    magnitudes = ()
    squares = ()
    random = ()
    for place in tl.static_range(8):  # type: ignore[misc]
        random += (words[place] if place < 4 else words[place - 4] * _OTHER_SPREAD,)
        value, average, square = _updated(p[place], g[place], m[place], v[place], factors)
        values += (value,)
        averages += (average,)
        magnitudes += (tl.abs(average),)
        squares += (_as_bits(square),)
    _store_octet(parameter, values, random, WIDE_PARAMETER)
    m_largest, v_largest = _as_bits(_largest_of_blocks(magnitudes)), _largest_of_blocks(squares)
    m_scale, v_scale = _store_scales(avg_scale, sq_scale, m_largest, v_largest, is_first)
    m_base, v_base = m_scale << 23, _twice(v_scale)
    low = _average_codes(averages[:4], m_base, random[:4])
    tl.store(exp_avg, _joined(low, _average_codes(averages[4:], m_base, random[4:])))
    low = _square_codes(squares[:4], v_base, random[:4])
    tl.store(exp_avg_sq, _joined(low, _square_codes(squares[4:], v_base, random[4:])))


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
    places,
    index,
    key0,
    key1,
    factors,
    WIDE_PARAMETER: tl.constexpr,
):
    m_base = (_load(avg_scale, is_block).to(tl.int32) << 23)[:, None]
    v_base = (_load(sq_scale, is_block).to(tl.int32) << 23)[:, None]
    p = _widened(_load(parameter, mask))
    g = _widened(_load(gradient, mask))
    m_code = _load(exp_avg, mask).to(tl.int32)
    m = _as_float(((m_code & 127) << _CUT) + m_base) - _as_float(m_base)
    m = tl.where(m_code < 128, m, -m)
    v = _as_float((_load(exp_avg_sq, mask).to(tl.int32) << _CUT) + v_base)
    w0, w1, w2, w3 = _philox(
        index.to(tl.uint32), (index >> 32).to(tl.uint32), _sums(p, places), _sums(g, places), key0, key1
    )
    words = tl.where(places % 2 == 0, tl.where(places % 4 == 0, w0, w2), tl.where(places % 4 == 1, w1, w3))
    words = tl.where(places % 8 < 4, words, words * _OTHER_SPREAD)
    p, m, v = _updated(p, g, m, v, factors)
    _store(parameter, p, words >> 16, mask, WIDE_PARAMETER)
    m_largest, v_largest = _as_bits(tl.max(tl.abs(m), axis=1)), _as_bits(tl.max(v, axis=1))
    m_scale, v_scale = _store_scales(avg_scale, sq_scale, m_largest, v_largest, is_block)
    m_code = (_raised_average(m, (m_scale << 23)[:, None], words) >> _CUT) | (_as_word(m) >> 24 & 128)
    raised = _raised_square(_as_bits(v), words).to(tl.int32, bitcast=True)
    v_base = (v_scale << 23)[:, None]
    tl.store(exp_avg, m_code.to(tl.uint8), mask=mask)
    tl.store(exp_avg_sq, ((tl.maximum(raised, v_base) - v_base) >> _CUT).to(tl.uint8), mask=mask)


@triton.jit
def _sums(values, places):
    """Sum the bits of each octet like `_load_octet`; the result has the shape of the values."""
    words = tl.where(places % 2 == 0, _as_word(values) >> 16, _as_word(values))
    octets = tl.reshape(words, [words.shape[0], _OCTETS, 8])
    return tl.reshape(tl.broadcast_to(tl.expand_dims(tl.sum(octets, axis=2), 2), octets.shape), words.shape)
