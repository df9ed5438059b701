"""Kernel of AdamW for many tensors whose states are in eight bits.

[Note: octets] A GPU that reads 4 TB/s has time for about 75 instructions for each element. So the kernel must run few,
and must not wait for memory. A thread works on 8 consecutive places of a row, an *octet*: 16 bytes of bfloat16 and two
calls of Philox. It reads and writes whole words of 64 bits, and each place of an octet is a tensor of its own.
So a tensor has one element for each thread, and only the largest magnitudes of a block are exchanged between threads. A
program is one warp, so that it waits for no other one. The compiler loads late, to keep few registers, so the next
octets are fetched into the L2 cache ahead. Other inline assembly does by one instruction what the compiler does by
several.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from lightning_d9d.ops.eight_bits import AVERAGE, BLOCK, CUT, LEAST_SQUARE, SQUARE
from lightning_d9d.ops.kernels.compiling import jit
from lightning_d9d.ops.kernels.stochastic import _index, _philox, _pointer, _raised, _store, _widened, _words
from lightning_d9d.ops.philox import OTHER_SPREAD, SPREAD

_BLOCKS = 8
"""Number of blocks that AdamW updates at a time, each in four threads."""
_WARPS = 1
CHUNK = 512
"""Number of blocks that a program updates: so many that reading the tables costs little."""
COLUMNS = 11
"""Numbers of a part in the table."""
_BLOCK = tl.constexpr(BLOCK)
_CUT, _NOT_CUT, _LOWER = tl.constexpr(CUT), tl.constexpr(32 - CUT), tl.constexpr(2**CUT - 1)
_COLUMNS = tl.constexpr(COLUMNS)
_SPREAD = tl.constexpr(SPREAD)
_OTHER_SPREAD = tl.constexpr(OTHER_SPREAD)
_TO_TOP = tl.constexpr(32 - CUT - 8)
_SIGN = tl.constexpr(-(2**31))
_OCTETS = tl.constexpr(BLOCK // 8)
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
        return tl.inline_asm_elementwise(
            """{
            .reg .f32 inverse, half, root, minus, rest;
            rsqrt.approx.ftz.f32 inverse, $1;
            mul.rn.f32 half, inverse, 0f3F000000;
            mul.rn.f32 root, $1, inverse;
            neg.f32 minus, root;
            fma.rn.f32 rest, minus, root, $1;
            fma.rn.f32 $0, rest, half, root;
            }""",
            "=f,f",
            [values],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def _quotient(numerator, denominator):
    """Compute quotients, rounded to nearest if they are normal numbers, like `tl.div_rn` without its branches."""
    if _INTERPRETED:
        return tl.div_rn(numerator, denominator)
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .f32 inverse, minus, rest, quotient;
            rcp.approx.ftz.f32 inverse, $2;
            neg.f32 minus, $2;
            fma.rn.f32 rest, minus, inverse, 0f3F800000;
            fma.rn.f32 inverse, rest, inverse, inverse;
            mul.rn.f32 quotient, $1, inverse;
            fma.rn.f32 rest, minus, quotient, $1;
            fma.rn.f32 $0, rest, inverse, quotient;
            }""",
            "=f,f,f",
            [numerator, denominator],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def _byte(words, PLACE: tl.constexpr):
    """Take a byte of words."""
    if _INTERPRETED:
        return ((words >> 8 * PLACE) & 255).to(tl.int32)
    else:
        select = tl.full(words.shape, 0x4440 + PLACE, tl.int32)  # this byte, and three that are 0
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, 0, $2;", "=r,r,r", [words, select], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def _four_upper_bytes(w0, w1, w2, w3):
    """Put the upper bytes of four words together, the first one lowest."""
    if _INTERPRETED:
        return (w0 >> 24) | (w1 >> 24 << 8) | (w2 >> 24 << 16) | (w3 >> 24 << 24)
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 low, high;
            prmt.b32 low, $1, $2, 0x0073;
            prmt.b32 high, $3, $4, 0x0073;
            prmt.b32 $0, low, high, 0x5410;
            }""",
            "=r,r,r,r,r",
            [w0, w1, w2, w3],
            dtype=tl.uint32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def _upper_halves(w0, w1):
    """Put the upper halves of two words together, the first one lower."""
    if _INTERPRETED:
        return (w0 >> 16) | (w1 >> 16 << 16)
    else:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x7632;", "=r,r,r", [w0, w1], dtype=tl.uint32, is_pure=True, pack=1
        )


@triton.jit
def _fetch(addresses, is_used):
    """Bring memory into the L2 cache, before it is loaded. [Note: octets]."""
    if not _INTERPRETED:
        tl.inline_asm_elementwise(
            """{
            .reg .pred used;
            setp.ne.b32 used, $2, 0;
            @used prefetch.global.L2 [$1];
            mov.b32 $0, 0;
            }""",
            "=r,l,r",
            [addresses, is_used],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _split(words):
    """Split words of 64 bits into their lower and upper halves."""
    return words.to(tl.uint32), (words >> 32).to(tl.uint32)


@triton.jit
def _joined(low, high):
    """Put the halves of words of 64 bits together."""
    return (low.to(tl.uint64) | (high.to(tl.uint64) << 32)).to(tl.int64, bitcast=True)


@triton.jit
def _upper_bytes(words):
    """Put the upper bytes of eight words together, in words of 64 bits."""
    low = _four_upper_bytes(words[0], words[1], words[2], words[3])
    return _joined(low, _four_upper_bytes(words[4], words[5], words[6], words[7]))


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
def _load_octet(address, octet, WIDE: tl.constexpr):
    """Load the values of octets that lie one after the other from an address: float32, or bfloat16 as float32."""
    pointer = tl.multiple_of(address.to(tl.pointer_type(tl.int64)), 16)
    values = ()
    if WIDE:
        words = _load_words(pointer + octet * 4) + _load_words(pointer + octet * 4 + 2)
        for place in tl.static_range(8):  # type: ignore[misc]
            values += (_as_float(words[place]),)
    else:
        words = _load_words(pointer + octet * 2)
        for pair in tl.static_range(4):  # type: ignore[misc]
            values += (_as_float(words[pair] << 16), _as_float(words[pair] & 0xFFFF0000))
    return values


@triton.jit
def _store_octet(address, octet, values, random, WIDE: tl.constexpr):
    """Store values of octets as float32, or rounded by the upper 16 bits of random words."""
    pointer = tl.multiple_of(address.to(tl.pointer_type(tl.int64)), 16)
    words = ()
    if WIDE:
        for place in tl.static_range(8):  # type: ignore[misc]
            words += (_as_bits(values[place]).to(tl.uint32, bitcast=True),)
        _store_words(pointer + octet * 4, words[:4])
        _store_words(pointer + octet * 4 + 2, words[4:])
    else:
        for pair in tl.static_range(4):  # type: ignore[misc]
            first = _raised(values[2 * pair], random[2 * pair] >> 16)
            second = _raised(values[2 * pair + 1], random[2 * pair + 1] >> 16)
            words += (_upper_halves(first, second),)
        _store_words(pointer + octet * 2, words)


@triton.jit
def _average(code, sign, base):
    """Decode 7 bits of codes of averages; the highest bit of `sign` is theirs."""
    magnitude = _as_float((code << _CUT) + base) - _as_float(base)
    return _as_float(_as_bits(magnitude) | (sign & _SIGN))


@triton.jit
def _square(code, base):
    """Decode codes of squares."""
    return _as_float((code << _CUT) + base)


@triton.jit
def _average_code(value, scale, random):
    """Encode averages, by the lower bits of random words; codes are the upper bytes."""
    base = scale << 23
    steps = _as_bits(tl.abs(value) + _as_float(base)) - base + (random & _LOWER).to(tl.int32, bitcast=True)
    return ((steps << _TO_TOP) | (_as_bits(value) & _SIGN)).to(tl.uint32, bitcast=True)


@triton.jit
def _square_code(bits, scale, random):
    """Encode the bits of squares, by the upper bits of a product with random words; codes are the upper bytes."""
    raised = bits + ((random * _SPREAD) >> _NOT_CUT).to(tl.int32, bitcast=True)
    return ((tl.maximum(raised, scale << 23) << _TO_TOP) - (scale << 23 + _TO_TOP)).to(tl.uint32, bitcast=True)


@triton.jit
def _updated(p, g, m, v, factors):
    """Compute a step of AdamW."""
    step_size, inverse_root, decay, unscale, beta2, one_minus_beta1, one_minus_beta2, eps = factors
    g = g * unscale
    m = m + (g - m) * one_minus_beta1
    v = tl.maximum(v * beta2 + g * g * one_minus_beta2, _LEAST)
    return p * decay - _quotient(m, _root(v) * inverse_root + eps) * step_size, m, v


@triton.jit
def _scales(largest, ROOM: tl.constexpr, BELOW: tl.constexpr, MOST: tl.constexpr):
    """Compute scales from the bits of the largest magnitudes."""
    return tl.minimum(tl.maximum(((largest + ROOM) >> 23) - BELOW, 1), MOST)


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
    factors = (step_size, inverse_root, decay, unscale, beta2, one_minus_beta1, one_minus_beta2, eps)
    key0, key1 = seed.to(tl.uint32), tl.load(scalars + 4).to(tl.uint32)
    is_sliced = length < size  # the rows are parts of longer ones
    has_blocks = (first % _BLOCK == 0) & ((not is_sliced) | (stride % _BLOCK == 0))  # in the whole tensor
    is_aligned = ((parameter | gradient | exp_avg | exp_avg_sq) & 15) == 0
    of_row = (columns + _BLOCK - 1) // _BLOCK
    end = tl.minimum(begin + CHUNK, size // columns * of_row)
    avg_scale, sq_scale = avg_scale.to(tl.pointer_type(tl.uint8)), sq_scale.to(tl.pointer_type(tl.uint8))
    if is_aligned & has_blocks & (columns % _BLOCK == 0):  # nearly all: nothing is masked
        octets, whole = tl.arange(0, BLOCKS * _OCTETS), (end - begin) // BLOCKS * BLOCKS
        for near in range(0, whole, BLOCKS):
            at = begin + near
            index = _index(at * _BLOCK, octets * 8, first, length, stride, is_sliced)
            has_next, later = (near + BLOCKS < whole).to(tl.int32), (at + BLOCKS) * _OCTETS + octets
            _fetch(parameter + later * (32 if WIDE_PARAMETER else 16), has_next)
            _fetch(gradient + later * (32 if WIDE_GRADIENT else 16), has_next)
            _fetch(exp_avg + later * 8, has_next)
            _fetch(exp_avg_sq + later * 8, has_next)
            _update_octets(
                parameter,
                gradient,
                exp_avg,
                exp_avg_sq,
                avg_scale + at + octets // _OCTETS,
                sq_scale + at + octets // _OCTETS,
                at * _OCTETS + octets,
                octets % _OCTETS == 0,
                index,
                key0,
                key1,
                factors,
                WIDE_PARAMETER,
                WIDE_GRADIENT,
            )
        begin += whole
    few, places = tl.arange(0, BLOCKS // 2), tl.arange(0, _BLOCK)[None, :]
    for at in range(begin, end, BLOCKS // 2):
        number = at + few
        column = (number % of_row)[:, None] * _BLOCK + places
        offsets = (number // of_row)[:, None] * columns + column
        is_block = number < end
        mask = is_block[:, None] & (column < columns)
        index = first + offsets // length * stride + offsets % length
        w0, w1, w2, w3 = _words(index // 4, key0, key1)
        words = tl.where(index % 2 == 0, tl.where(index % 4 == 0, w0, w2), tl.where(index % 4 == 1, w1, w3))
        _update(
            _pointer(parameter, WIDE_PARAMETER) + offsets,
            _pointer(gradient, WIDE_GRADIENT) + offsets,
            exp_avg.to(tl.pointer_type(tl.uint8)) + offsets,
            exp_avg_sq.to(tl.pointer_type(tl.uint8)) + offsets,
            avg_scale + number,
            sq_scale + number,
            mask,
            is_block,
            words,
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
    octet,
    is_first,
    index,
    key0,
    key1,
    factors,
    WIDE_PARAMETER: tl.constexpr,
    WIDE_GRADIENT: tl.constexpr,
):
    """Update whole blocks. [Note: octets]."""
    m_base, v_base = tl.load(avg_scale).to(tl.int32) << 23, tl.load(sq_scale).to(tl.int32) << 23
    p = _load_octet(parameter, octet, WIDE_PARAMETER)
    g = _load_octet(gradient, octet, WIDE_GRADIENT)
    exp_avg = tl.multiple_of(exp_avg.to(tl.pointer_type(tl.int64)), 8) + octet
    exp_avg_sq = tl.multiple_of(exp_avg_sq.to(tl.pointer_type(tl.int64)), 8) + octet
    m_codes, v_codes = _split(tl.load(exp_avg)), _split(tl.load(exp_avg_sq))
    low, high = (index >> 2).to(tl.uint32), (index >> 34).to(tl.uint32)
    none = tl.zeros_like(low)
    words = _philox(low, high, none, none, key0, key1) + _philox(low | 1, high, none, none, key0, key1)
    values = ()
    averages = ()
    magnitudes = ()
    squares = ()
    random = ()
    for place in tl.static_range(8):  # type: ignore[misc]
        m_code, v_code = m_codes[place // 4], v_codes[place // 4]
        sign = (m_code << 24 - 8 * (place % 4)).to(tl.int32, bitcast=True)
        m = _average(_byte(m_code & 0x7F7F7F7F, place % 4), sign, m_base)
        v = _square(_byte(v_code, place % 4), v_base)
        random += (_mixed(words[place], p[place], g[place]),)
        value, m, v = _updated(p[place], g[place], m, v, factors)
        values += (value,)
        averages += (m,)
        magnitudes += (tl.abs(m),)
        squares += (_as_bits(v),)
    _store_octet(parameter, octet, values, random, WIDE_PARAMETER)
    m_largest, v_largest = _as_bits(_largest_of_blocks(magnitudes)), _largest_of_blocks(squares)
    m_scale = _scales(m_largest, _ROOM_OF_AVERAGE, _BELOW_OF_AVERAGE, _MOST_OF_AVERAGE)
    v_scale = _scales(v_largest, _ROOM_OF_SQUARE, _BELOW_OF_SQUARE, _MOST_OF_SQUARE)
    tl.store(avg_scale, m_scale.to(tl.uint8), mask=is_first)
    tl.store(sq_scale, v_scale.to(tl.uint8), mask=is_first)
    of_averages = ()
    of_squares = ()
    for place in tl.static_range(8):  # type: ignore[misc]
        of_averages += (_average_code(averages[place], m_scale, random[place]),)
        of_squares += (_square_code(squares[place], v_scale, random[place]),)
    tl.store(exp_avg, _upper_bytes(of_averages))
    tl.store(exp_avg_sq, _upper_bytes(of_squares))


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
    factors,
    WIDE_PARAMETER: tl.constexpr,
):
    m_base = (_load(avg_scale, is_block).to(tl.int32) << 23)[:, None]
    v_base = (_load(sq_scale, is_block).to(tl.int32) << 23)[:, None]
    p = _widened(_load(parameter, mask))
    g = _widened(_load(gradient, mask))
    m_code = _load(exp_avg, mask).to(tl.int32)
    words = _mixed(words, p, g)
    m = _average(m_code & 127, m_code << 24, m_base)
    v = _square(_load(exp_avg_sq, mask).to(tl.int32), v_base)
    p, m, v = _updated(p, g, m, v, factors)
    _store(parameter, p, words >> 16, mask, WIDE_PARAMETER)
    m_largest, v_largest = _as_bits(tl.max(tl.abs(m), axis=1)), _as_bits(tl.max(v, axis=1))
    m_scale = _scales(m_largest, _ROOM_OF_AVERAGE, _BELOW_OF_AVERAGE, _MOST_OF_AVERAGE)
    v_scale = _scales(v_largest, _ROOM_OF_SQUARE, _BELOW_OF_SQUARE, _MOST_OF_SQUARE)
    tl.store(exp_avg, (_average_code(m, m_scale[:, None], words) >> 24).to(tl.uint8), mask=mask)
    tl.store(exp_avg_sq, (_square_code(_as_bits(v), v_scale[:, None], words) >> 24).to(tl.uint8), mask=mask)
    tl.store(avg_scale, m_scale.to(tl.uint8), mask=is_block)
    tl.store(sq_scale, v_scale.to(tl.uint8), mask=is_block)


@triton.jit
def _mixed(words, p, g):
    """Add a number that depends on the element's values to its random word."""
    return words + g.to(tl.uint32, bitcast=True) * _SPREAD + p.to(tl.uint32, bitcast=True) * _OTHER_SPREAD
