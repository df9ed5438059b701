"""Kernels of stochastic rounding, and of AdamW for many tensors.

Bfloat16 is handled as 16-bit integers, whose bits are the upper ones of a float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_d9d.ops.kernels.compiling import jit
from lightning_d9d.ops.philox import ROUNDS, SPREAD
from lightning_d9d.ops.rows import ceil_div

_ROUNDED = 2048
"""Elements that a program rounds: eight for each thread of eight warps, so 16 bytes of bfloat16."""
_TILE = 1024
"""Elements that AdamW updates at a time: four for each thread of eight warps, for which one call of Philox has enough
bits. A thread makes and uses its own bits, so that threads do not wait for each other. A thread runs about 80
instructions for each element, about as many as fit while memory is busy.
"""
_WARPS = 8
CHUNK = 16 * _TILE
"""Elements that a program of AdamW updates: so many that reading the tables costs little."""
_ROUNDS = tl.constexpr(ROUNDS)
_SPREAD = tl.constexpr(SPREAD)
_LARGEST = tl.constexpr(torch.finfo(torch.bfloat16).max)


def round_stochastic(target: Tensor, source: Tensor, seed: int, offset: int) -> None:
    """Fill `target`, bfloat16, from `source`, float32; both are contiguous and not empty."""
    count, shift = source.numel(), offset % 8
    _round[(ceil_div(count + shift, _ROUNDED),)](
        target.view(torch.int16),
        source,
        count,
        seed,
        offset // 8,
        shift,
        _ROUNDED,
        num_warps=8,  # type: ignore[call-arg]
    )


def adamw(
    blocks: Tensor,
    gradients: Tensor,
    chunks: Tensor,
    scalars: Tensor,
    found_inf: Tensor | None,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    betas: tuple[float, float],
    eps: float,
    seed: int,
) -> None:
    """Update all tensors of a table.

    Args:
        blocks: Int64 `[blocks, 8]`: the addresses of parameter, exp_avg and exp_avg_sq, the row of `scalars`, the
            number of elements, and the `first`, `length` and `stride` of `Block`.
        gradients: Int64 `[blocks]`, addresses.
        chunks: Int32 `[chunks, 2]`: a block, and the index of `CHUNK` elements in it.
        scalars: Float32 `[tensors, 5]`: step size, inverse root of the second bias correction, factor of a parameter
            for decay, factor of a gradient, step.
        found_inf: Float32 scalar; nothing is changed unless it is 0.
        dtypes: Dtypes of parameters, gradients and states.
        betas: decay rates.
        eps: Number added to the root.
        seed: Seed, from 0 to `2**32 - 1`.
    """
    _adamw[(len(chunks),)](
        blocks,
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
        dtypes[2] == torch.float32,
        CHUNK,
        _TILE,
        num_warps=_WARPS,  # type: ignore[call-arg]
        enable_fp_fusion=False,  # type: ignore[call-arg]  # as torch rounds on the CPU
    )


@triton.jit
def _philox(c0, c1, c2, c3, k0, k1):
    """Compute `lightning_d9d.ops.philox.philox`.

    Compute Philox with one product for both halves; `tl.philox` takes two.
    """
    for _ in tl.static_range(_ROUNDS):  # type: ignore[misc]
        low, high = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57
        c0, c1 = (high >> 32).to(tl.uint32) ^ c1 ^ k0, high.to(tl.uint32)
        c2, c3 = (low >> 32).to(tl.uint32) ^ c3 ^ k1, low.to(tl.uint32)
        k0 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False)  # type: ignore[arg-type]
        k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)  # type: ignore[arg-type]
    return c0, c1, c2, c3


@triton.jit
def _words(counter, key0, key1):
    """Compute the words of a 64-bit counter."""
    none = tl.zeros_like(counter).to(tl.uint32)
    return _philox(counter.to(tl.uint32), (counter >> 32).to(tl.uint32), none, none, key0, key1)


@triton.jit
def _in_order(w0, w1, w2, w3):
    """Put the words of each call one after the other."""
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [4 * w0.shape[0]])


@triton.jit
def _widened(values):
    """Widen 16-bit integers that are bfloat16 to float32; return float32 unchanged."""
    if values.dtype == tl.int16:
        bits = values.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        return bits.to(tl.float32, bitcast=True)
    else:
        return values


@triton.jit
def _raised(values, random):
    """Add 16 random bits to the bits of values, of which the upper 16 are then the rounded bfloat16.

    A NaN has payload outside the bits that are cut.
    """
    return values.to(tl.uint32, bitcast=True) + tl.where(tl.abs(values) <= _LARGEST, random, 0)


@triton.jit
def _rounded(values, random):
    """Round to bfloat16 as 16-bit integers, by 16 random bits."""
    return (_raised(values, random) >> 16).to(tl.uint16).to(tl.int16, bitcast=True)


@triton.jit
def _random_bits(first_block, start, seed, TILE: tl.constexpr):
    """Draw 16 random bits for each place of a tile; one call of Philox serves eight places."""
    block = first_block.to(tl.int64) + start // 8 + tl.arange(0, TILE // 8)
    key = seed.to(tl.int64)
    words = _in_order(*_words(block, key.to(tl.uint32), (key >> 32).to(tl.uint32)))
    return tl.reshape(tl.join(words & 0xFFFF, words >> 16), [TILE])


@triton.jit
def _quiet(values):
    bits = values.to(tl.uint32, bitcast=True)
    return (bits | ((values != values).to(tl.uint32) << 22)).to(tl.float32, bitcast=True)


@triton.jit
def _pointer(address, WIDE: tl.constexpr):
    """Make a pointer to float32, or to 16 bits."""
    if WIDE:
        return address.to(tl.pointer_type(tl.float32))
    else:
        return address.to(tl.pointer_type(tl.int16))


@triton.jit
def _store(pointer, values, random, mask, WIDE: tl.constexpr):
    """Store values as float32, or rounded."""
    if WIDE:
        tl.store(pointer, values, mask=mask)
    else:
        tl.store(pointer, _rounded(values, random), mask=mask)


@jit(do_not_specialize=["seed", "first_block"])
def _round(target, source, count, seed, first_block, shift, TILE: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * TILE
    random = _random_bits(first_block, start, seed, TILE)
    lanes = start - shift + tl.arange(0, TILE)
    if (start >= shift) & (start - shift + TILE <= count):
        tl.store(target + lanes, _rounded(_quiet(tl.load(source + lanes)), random))
    else:
        is_there = (lanes >= 0) & (lanes < count)
        values = _quiet(tl.load(source + lanes, mask=is_there, other=0.0))
        tl.store(target + lanes, _rounded(values, random), mask=is_there)


@jit(do_not_specialize=["seed"])
def _adamw(
    blocks, gradients, chunks, scalars, found_inf, seed,
    beta2, one_minus_beta1, one_minus_beta2, eps,
    WIDE_PARAMETER: tl.constexpr, WIDE_GRADIENT: tl.constexpr, WIDE_STATE: tl.constexpr,
    CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    if found_inf is not None:  # noqa: SIM102  # this is decided when it is compiled
        if tl.load(found_inf) != 0:
            return
    chunk = chunks + tl.program_id(0).to(tl.int64) * 2
    block = tl.load(chunk).to(tl.int64)
    begin = tl.load(chunk + 1).to(tl.int64) * CHUNK
    gradient = tl.load(gradients + block)
    blocks += block * 8
    parameter, exp_avg, exp_avg_sq = tl.load(blocks), tl.load(blocks + 1), tl.load(blocks + 2)
    scalars += tl.load(blocks + 3) * 5
    count, first = tl.load(blocks + 4), tl.load(blocks + 5)
    length, stride = tl.load(blocks + 6), tl.load(blocks + 7)
    step_size, inverse_root = tl.load(scalars), tl.load(scalars + 1)
    decay, unscale = tl.load(scalars + 2), tl.load(scalars + 3)
    key0, key1 = seed.to(tl.uint32), tl.load(scalars + 4).to(tl.uint32)
    is_sliced = length < count  # the rows are parts of longer ones
    has_quads = (first % 4 == 0) & ((not is_sliced) | ((length | stride) % 4 == 0))
    is_aligned = ((parameter | gradient | exp_avg | exp_avg_sq) & 15) == 0
    if is_aligned & has_quads & (begin + CHUNK <= count):  # nearly all chunks: nothing is masked
        quads, places = tl.arange(0, TILE // 4), tl.arange(0, 4)[None, :]
        for near in range(0, CHUNK, TILE):
            words = places.to(tl.uint32)
            if not (WIDE_PARAMETER and WIDE_STATE):
                index = _index(begin + near, quads * 4, first, length, stride, is_sliced)
                w0, w1, w2, w3 = _words(index // 4, key0, key1)
                upper = tl.where(places == 2, w2[:, None], w3[:, None])
                words = tl.where(places == 0, w0[:, None], tl.where(places == 1, w1[:, None], upper))
            offsets = near + quads[:, None] * 4 + places
            _update(
                tl.multiple_of(_pointer(parameter, WIDE_PARAMETER) + begin, 16) + offsets,
                tl.multiple_of(_pointer(gradient, WIDE_GRADIENT) + begin, 16) + offsets,
                tl.multiple_of(_pointer(exp_avg, WIDE_STATE) + begin, 16) + offsets,
                tl.multiple_of(_pointer(exp_avg_sq, WIDE_STATE) + begin, 16) + offsets,
                None,
                words,
                step_size,
                inverse_root,
                decay,
                unscale,
                beta2,
                one_minus_beta1,
                one_minus_beta2,
                eps,
                WIDE_PARAMETER,
                WIDE_STATE,
            )
    else:
        lanes = tl.arange(0, TILE // 4)
        for start in range(begin, tl.minimum(begin + CHUNK, count), TILE // 4):
            words = lanes.to(tl.uint32)
            if not (WIDE_PARAMETER and WIDE_STATE):
                index = _index(start, lanes, first, length, stride, is_sliced)
                w0, w1, w2, w3 = _words(index // 4, key0, key1)
                words = tl.where(index % 2 == 0, tl.where(index % 4 == 0, w0, w2), tl.where(index % 4 == 1, w1, w3))
            _update(
                _pointer(parameter, WIDE_PARAMETER) + start + lanes,
                _pointer(gradient, WIDE_GRADIENT) + start + lanes,
                _pointer(exp_avg, WIDE_STATE) + start + lanes,
                _pointer(exp_avg_sq, WIDE_STATE) + start + lanes,
                start + lanes < count,
                words,
                step_size,
                inverse_root,
                decay,
                unscale,
                beta2,
                one_minus_beta1,
                one_minus_beta2,
                eps,
                WIDE_PARAMETER,
                WIDE_STATE,
            )


@triton.jit
def _index(start, lanes, first, length, stride, is_sliced):
    """Return the indices in the whole parameter of elements `start + lanes` of a block."""
    index = first + start + lanes
    if is_sliced:
        columns = (start % length + lanes).to(tl.uint32)
        rows = (columns // length.to(tl.uint32)).to(tl.int64)
        index = first + (start // length + rows) * stride + columns.to(tl.int64) - rows * length
    return index


@triton.jit
def _update(
    parameter,
    gradient,
    exp_avg,
    exp_avg_sq,
    mask,
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
    WIDE_STATE: tl.constexpr,
):
    p = _widened(tl.load(parameter, mask=mask))
    g = _widened(tl.load(gradient, mask=mask))
    m = _widened(tl.load(exp_avg, mask=mask))
    v = _widened(tl.load(exp_avg_sq, mask=mask))
    if not (WIDE_PARAMETER and WIDE_STATE):
        mixed = (g.to(tl.uint32, bitcast=True) ^ (p.to(tl.uint32, bitcast=True) >> 16)) * _SPREAD
        words += mixed ^ (mixed >> 16)
    g = g * unscale
    m = m + (g - m) * one_minus_beta1
    v = v * beta2 + g * g * one_minus_beta2
    p = p * decay - tl.div_rn(m, tl.sqrt_rn(v) * inverse_root + eps) * step_size
    _store(parameter, p, words & 0xFFFF, mask, WIDE_PARAMETER)
    _store(exp_avg, m, words >> 16, mask, WIDE_STATE)
    _store(exp_avg_sq, v, (words * _SPREAD) >> 16, mask, WIDE_STATE)
