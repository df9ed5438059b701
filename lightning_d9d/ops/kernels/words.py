"""Steps on words and on float32 that take fewer instructions than the compiler finds. The interpreter takes its own."""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

from lightning_d9d.ops.kernels.stochastic import _raised

_UPPER = tl.constexpr(0xFFFF0000)
_INTERPRETED = tl.constexpr(knobs.runtime.interpret)
"""The interpreter lacks the device's approximations, from which the exact results are computed."""


@triton.jit
def _as_float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _as_bits(values):
    return values.to(tl.int32, bitcast=True)


@triton.jit
def _as_word(values):
    return values.to(tl.uint32, bitcast=True)


@triton.jit
def _fma(a, b, c):
    """Compute `a * b + c`, rounded once, like `lightning_d9d.ops.stochastic_adamw.fma`."""
    if _INTERPRETED:
        one = tl.full(a.shape, 1, tl.float32)
        product, c = a.to(tl.float64) * (one * b).to(tl.float64), (one * c).to(tl.float64)
        total = product + c
        of_c = total - product
        error = (product - (total - of_c)) + (c - of_c)
        bits = total.to(tl.int64, bitcast=True)
        toward = tl.where((error > 0) == (total > 0), 1, -1)
        is_rounded = ((error < 0) | (error > 0)) & (bits % 2 == 0)
        return (bits + tl.where(is_rounded, toward, 0)).to(tl.float64, bitcast=True).to(tl.float32)
    else:
        return tl.fma(a, b, c)


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
def _raised_value(value, random):
    """Add the upper 16 bits of random words, like `_raised`, in two instructions."""
    if _INTERPRETED:
        return _raised(value, random >> 16)
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .pred small;
            .reg .f32 size;
            .reg .b32 bits;
            mov.b32 size, $1;
            abs.f32 size, size;
            setp.le.f32 small, size, 0f7F7F0000;
            selp.b32 bits, $2, 0, small;
            shr.u32 bits, bits, 16;
            add.u32 $0, $1, bits;
            }""",
            "=r,r,r",
            [_as_word(value), random],
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
def _difference(pairs, others):
    """Subtract pairs of bfloat16 that have an exact difference."""
    if _INTERPRETED:
        low = _as_float(pairs << 16) - _as_float(others << 16)
        return _upper_halves(_as_word(low), _as_word(_as_float(pairs & _UPPER) - _as_float(others & _UPPER)))
    else:
        return tl.inline_asm_elementwise(
            "sub.rn.bf16x2 $0, $1, $2;", "=r,r,r", [pairs, others], dtype=tl.uint32, is_pure=True, pack=1
        )


@triton.jit
def _above(pairs, bases):
    """Subtract bases from pairs of 16 bits; the rest is 0 if it is negative."""
    if _INTERPRETED:
        low = tl.maximum(pairs & 0xFFFF, bases & 0xFFFF) - (bases & 0xFFFF)
        return low | (tl.maximum(pairs & _UPPER, bases & _UPPER) - (bases & _UPPER))
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 minus, rest;
            sub.u32 minus, 0x10000, $2;
            add.s16x2 rest, $1, minus;
            mov.b32 minus, 0;
            max.s16x2 $0, rest, minus;
            }""",
            "=r,r,r",
            [pairs, bases],
            dtype=tl.uint32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def _pairs(word, mask, base):
    """Move masked codes 0 and 2, and 1 and 3, to bit 3 of pairs of 16 bits and above, and add a base."""
    if _INTERPRETED:
        return ((word & mask) << 3) + base, (((word >> 8) & mask) << 3) + base
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 odd;
            mad.lo.u32 $0, $2, 8, $4;
            shr.u32 odd, $3, 5;
            add.u32 $1, odd, $4;
            }""",
            "=r,=r,r,r,r",
            [word & mask, word & (mask << 8), base],
            dtype=(tl.uint32, tl.uint32),
            is_pure=True,
            pack=1,
        )


@triton.jit
def _codes(even, odd):
    """Put four codes together, which pairs of 16 bits have from bit 3 on."""
    if _INTERPRETED:
        return ((even >> 3) & 0x00FF00FF) | ((odd << 5) & 0xFF00FF00)
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 even, odd;
            shr.u32 even, $1, 3;
            shr.u32 odd, $2, 3;
            prmt.b32 $0, even, odd, 0x6240;
            }""",
            "=r,r,r",
            [even, odd],
            dtype=tl.uint32,
            is_pure=True,
            pack=1,
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
